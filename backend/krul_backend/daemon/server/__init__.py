"""The daemon's process: it builds the store, answers requests, and takes back what lost clients held.

Frames enter at the sockets and leave there; metrics leave over HTTP. ``cli`` starts it.
"""
