"""Figures of the benchmarks, drawn from their result files."""
