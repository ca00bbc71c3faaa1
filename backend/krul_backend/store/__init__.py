"""One store over several tiers; its callers know only ``KVStore`` in ``interface.py``.

Given page keys and token ids, it leases the longest stored prefix, and fetches what lies below host memory.
The daemon serves it; engines call it through ``daemon.client``.
"""
