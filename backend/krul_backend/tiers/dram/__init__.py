"""The tier in host memory: segments in one arena, leased in place, evicted by value.

Reservations enter and become segments; leases on their blocks leave, without a copy. ``store`` calls it, and
the daemon when host memory is the only tier.
"""
