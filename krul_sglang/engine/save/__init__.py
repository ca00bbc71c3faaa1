"""Stores a finished turn: choose a strategy, encode, copy to the store, off the scheduler's thread.

A ``Turn`` enters with its slots on the device; committed segments leave. The adapter calls it when a
request ends.
"""
