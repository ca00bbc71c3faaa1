"""``krul-sglang``: the demo, the self-test, and what a running server restored.

Arguments enter; tables, files and exit codes leave. Only people and scripts call it.
"""
