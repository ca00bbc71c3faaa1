"""The tier on a disk: an append-only log of records, with an index in memory that every start reads again.

Whole segments enter, written behind their use; blocks leave, read without the page cache. ``store`` calls it.
"""
