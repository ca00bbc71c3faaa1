"""Finds models, makes a pretrained one that can be had without a model hub, and names a checkpoint's weights.

The name of a model enters; a Hugging Face folder leaves, checked and ready to serve, or a hub name. A folder
or a hub name enters; a text that identifies its weights leaves. The command line, the engine, learning and
the benchmarks call it.
"""
