"""Learns what belongs to a model before it is served: the bases that its KV is stored in.

A Hugging Face model and some text enter; ``ModelBases`` leave. The command line and the benchmarks call it; a
server only reads the file.
"""
