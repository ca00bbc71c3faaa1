"""Several tiers as one store: ``KVStore`` in ``interface.py`` is all that others may know of it.

Page keys and token ids enter; leases on the longest stored prefix leave, and what lies below host memory is
fetched. The daemon serves it; engines call it through ``daemon.client``.
"""
