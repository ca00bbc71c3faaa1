"""Codecs: how a layer's keys and values become the bytes of a block, and back."""
