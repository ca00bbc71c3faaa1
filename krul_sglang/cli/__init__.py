"""``krul-sglang``: the demo, the self-test, what a running server restored, and why not more.

Arguments enter; tables, files and exit codes leave. Only people and scripts call it.
"""
