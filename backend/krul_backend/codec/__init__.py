"""Encodes the KV of a segment by a strategy, and decodes any tail of it again.

KV tensors and a ``Strategy`` enter, byte blocks come out, and back. Numbers only; the engine calls it when
it saves and restores.
"""
