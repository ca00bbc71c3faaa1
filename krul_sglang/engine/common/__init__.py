"""What the engine's packages share: the KV pool, the ranks' agreement, the model's identity, refusals,
the thread that asks the daemon, and the times of scheduling steps.

Imports nothing of the other packages, and is called by all of them.
"""
