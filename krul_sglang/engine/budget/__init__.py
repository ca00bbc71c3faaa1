"""Keeps what compression may cost a conversation within ``error_budget``.

Turns and probes of the running model enter; a strategy per turn leaves, with the damage that it adds.
``save`` asks it through its interface for decisions; the adapter runs its probes when the server is idle.
"""
