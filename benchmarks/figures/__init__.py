"""Figures, drawn from the JSON files of the benchmarks. Only these modules need matplotlib."""
