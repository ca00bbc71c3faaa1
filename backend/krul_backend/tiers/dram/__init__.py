"""The DRAM tier: segments in one arena of host memory, leased in place, evicted by value.

``HostStore`` is what ``store`` calls. Its parts are ``Reservations`` (writing) and ``Arrivals`` (segments of
lower tiers); all work on the ``DramBooks`` behind ``LockedBooks``, and take space from the ``Allocator``.
"""
