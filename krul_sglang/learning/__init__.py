"""Learns what belongs to a model before it is served: the bases that its KV is stored in.

A Hugging Face model and some text enter; ``ModelBases`` leave. The command line and the benchmarks call it. A
server reads the file; if there is none, it starts a process that calls it (``background.py``).
"""
