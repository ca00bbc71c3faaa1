"""Stores layers as the papers do: pairs that share directions (Krul, MiniCache), and layers as codes.

Attention statistics of a conversation enter, and a strategy comes out (``selectors.py``); with that and the
KV of a segment one block per layer leaves, and back. It is here to compare with.
"""
