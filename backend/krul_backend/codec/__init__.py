"""Encodes the KV of a segment, and decodes any tail of it again: the codecs, found by their names.

KV tensors enter, and what the codec is told of them; byte blocks come out, and back. ``interface.py`` says
what each codec offers, ``registry.py`` has the table of them. Numbers only; the engine calls it when it saves
and restores.
"""
