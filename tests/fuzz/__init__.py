"""Sends a daemon what is no message, or almost one.

``python -m tests.fuzz --cases 100000`` is the long form; ``tests/integration/test_fuzz.py`` sends some.
"""
