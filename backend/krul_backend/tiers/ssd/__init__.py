"""The SSD tier: append-only log files of records on one disk or several, and an index of them beside.

Whole segments are written some time after their commit, and read past the page cache. ``store`` calls it.
"""

from krul_backend.tiers.ssd.disk import Disk, open_for_reading
from krul_backend.tiers.ssd.own_files import nearest_existing, one_per_disk, own_bytes
from krul_backend.tiers.ssd.ssd_tier import SsdTier
