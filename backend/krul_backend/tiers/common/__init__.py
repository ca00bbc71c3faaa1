"""Parts that the tiers share: page index, records, checksums, eviction policies, write queues.

``lower_tier.py`` is the interface of a tier below host memory. Called by the tiers and by ``store``.
"""
