"""Brings a stored prefix back: lease, plan, recompute heads, load tails, while the forward already runs.

A waiting request's page keys enter; slots filled with its KV leave, or the engine computes them itself.
``cache`` calls it for waiting requests, the hook around the engine's forward for those that run.
"""
