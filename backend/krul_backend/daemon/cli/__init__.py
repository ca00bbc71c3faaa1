"""``krul-backend``: starts the daemon, and shows and changes what a running one holds.

Arguments enter; tables and exit codes leave. Only people and scripts call it.
"""
