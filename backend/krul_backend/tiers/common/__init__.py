"""What every tier is made of: the page index, the arena, records, checksums, eviction policies, write queues.

``lower_tier.py`` states what a tier below host memory must do. Called by the tiers and by ``store``.
"""
