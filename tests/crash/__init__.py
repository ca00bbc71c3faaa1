"""Kills daemons and engines at random moments, and compares what is left with what may be left.

``python -m tests.crash --rounds 200`` is the long form; ``tests/integration/test_crashes.py`` runs a few.
"""
