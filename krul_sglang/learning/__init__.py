"""Learns the bases that a model's KV is stored in, before the model is served or while it is.

A Hugging Face model and some text enter; ``ModelBases`` leave. The command line and the benchmarks call it. A
server reads the file; if there is none, it starts a process that calls it (``background.py``).
"""
