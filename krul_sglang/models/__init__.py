"""Pretrained models that can be had without a model hub.

The name of a model enters; a Hugging Face folder in the cache directory leaves, checked and ready to serve.
The command line calls it.
"""
