"""Observes attention while the engine computes, for the requests whose turns will be stored.

Queries and keys enter from a hook on the attention backend; rows of attention per turn leave. ``attach``
installs it; ``save`` takes what it recorded.
"""
