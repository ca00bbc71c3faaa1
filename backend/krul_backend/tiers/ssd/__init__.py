"""The SSD tier: committed segments in append-only log files."""
