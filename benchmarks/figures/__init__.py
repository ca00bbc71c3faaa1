"""Figures of the documentation, drawn from results: ``python -m benchmarks.figures NAME``.

Only the modules in here need matplotlib.
"""
