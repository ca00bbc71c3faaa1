"""Chooses, for one conversation, which layers share KV and how precisely it is kept.

Attention statistics of the conversation enter; a ``Strategy`` comes out. Numbers only; the engine calls it
when a turn is stored.
"""
