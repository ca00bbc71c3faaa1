"""The SSD tier: append-only log files of records, and an index in memory that each start builds from them.

Whole segments are written some time after their commit, and read past the page cache. ``store`` calls it.
"""
