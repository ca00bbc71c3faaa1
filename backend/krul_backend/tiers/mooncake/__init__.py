"""The tier in a Mooncake cluster, which several hosts share.

A segment is stored as several objects, whose names carry model, epoch and digest; pointers named by the first
page lead to it. Blocks that are read are checked as those of any tier. ``store`` calls it.
"""
