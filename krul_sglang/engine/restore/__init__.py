"""Brings a stored prefix back: lease, plan, recompute heads, load tails, while the forward already runs.

A waiting request's page keys enter; slots filled with its KV leave, or the engine computes them itself.
The adapter calls it for waiting requests, and around the engine's forward for those that run.
"""
