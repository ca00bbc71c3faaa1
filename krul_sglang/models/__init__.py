"""Finds models, and makes a pretrained one that can be had without a model hub.

The name of a model enters; a Hugging Face folder leaves, checked and ready to serve, or a hub name. The
command line and the benchmarks call it.
"""
