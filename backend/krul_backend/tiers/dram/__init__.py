"""The DRAM tier: segments in one arena of host memory, leased in place, evicted by value.

``HostStore`` is what ``store`` calls. Its part ``Reservations`` takes space for segments that are written or
that arrive from lower tiers; both work on the ``DramBooks`` behind ``LockedBooks``.
"""

from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.dram.reservations import Arrival
from krul_backend.tiers.dram.stored_segment import StoredSegment
