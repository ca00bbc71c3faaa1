"""The tier in a Mooncake cluster, which several hosts share.

Whole segments enter as objects named by model, epoch and page; blocks leave, and are checked like any other.
``store`` calls it.
"""
