"""LongBench (Bai et al. 2024): its file format, tasks and metrics."""
