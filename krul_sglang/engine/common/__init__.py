"""What the engine's packages share: the KV pool, the ranks' agreement, the model's identity, refusals.

Imports nothing of the other packages, and is called by all of them.
"""
