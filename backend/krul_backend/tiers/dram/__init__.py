"""The DRAM tier: segments in one arena of host memory, leased in place, evicted by value.

``HostStore`` is what ``store`` calls. Its parts are ``Reservations`` (writing), ``Arrivals`` (segments of
lower tiers) and ``trimming``; all work on the ``DramBooks`` behind ``LockedBooks``, and take space from the
``Allocator``.
"""
