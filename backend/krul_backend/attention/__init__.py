"""Tells how alike the attention of layers is, token by token.

Rows of attention enter, as the engine captured them; similarities between layers and statistics for the
damage meter come out. Numbers only; the engine and the strategies call it.
"""
