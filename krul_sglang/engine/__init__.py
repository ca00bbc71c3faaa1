"""Saves and restores the KV of conversations: packages in the order in which KV passes them.

A turn that ended goes through ``capture`` and ``save`` to the store; a turn that returns goes through
``restore`` into the pool; ``budget`` learns what compression costs. Nothing here imports SGLang:
``krul_sglang.adapter`` calls all of it. Imports run one way: common, capture, save, restore, budget.
"""
