"""The command ``krul-backend``: it starts a daemon, and shows what a running one holds.

People and scripts use it, and an engine starts its own daemon with it. Arguments come in; tables, JSON and
exit statuses go out.
"""
