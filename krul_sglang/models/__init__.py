"""Checkpoints: a pretrained model that can be had without a model hub, and which weights a checkpoint has.

The name of a model enters; a Hugging Face folder in the cache directory leaves, checked and ready to serve.
A folder or a hub name enters; a text that identifies its weights leaves. The command line, the engine and
learning call it.
"""
