"""Computes, before anything is bought or started, how many conversations fit and how soon one comes back.

The shape of a model, sizes and rates enter; lines of arithmetic leave. The command line calls it, and the
benchmarks compute their timelines with it.
"""
