"""The tier in a Mooncake cluster, which several hosts share.

A segment is stored as several objects, whose names carry model, epoch and digest; pointers named by the first
page lead to it. Blocks that are read are checked as those of any tier. ``store`` calls it.
"""

from krul_backend.tiers.mooncake.mooncake_client import MooncakeOptions
from krul_backend.tiers.mooncake.tier import MooncakeTier
