"""Tells how alike the attention of layers is, token by token.

Query rows enter, as the engine captured them, and keys; the distances between layers' attention come out, or
the attention that each token draws. Numbers only; the engine and the strategies call it.
"""
