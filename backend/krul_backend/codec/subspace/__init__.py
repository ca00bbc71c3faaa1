"""Stores groups of layers as coefficients in a subspace that the layers share.

The KV of all layers of one segment enters, with what each token is worth; one block per group leaves, and
back. ``bases.py`` has what belongs to the model, ``codec.py`` what is done to a segment, ``learning.py``
how bases come about.
"""
