"""The tier in a store of objects that several hosts share: a Mooncake cluster, or a bucket.

A segment is stored as several objects, whose names carry model, epoch and digest; pointers named by the first
page lead to it. Blocks that are read are checked as those of any tier. ``store`` calls it.
"""

from krul_backend.tiers.objects.bucket_client import BucketOptions
from krul_backend.tiers.objects.mooncake_client import MooncakeOptions
from krul_backend.tiers.objects.tier import ObjectTier
