"""What several rooms of the engine share: the KV pool, the ranks' agreement, the model's identity, refusals.

Imports nothing of the other rooms, and is called by all of them.
"""
