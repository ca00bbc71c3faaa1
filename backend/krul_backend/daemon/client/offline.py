"""What a store that cannot be asked says of itself."""

from __future__ import annotations

from krul_backend.tiers.common.interface import DamageReport, StoreStats

NO_STATS = StoreStats(
    capacity_bytes=0,
    used_bytes=0,
    free_bytes=0,
    largest_free_bytes=0,
    num_free_ranges=0,
    stored_bytes=0,
    stored_tokens=0,
    num_segments=0,
    num_pages=0,
    num_leases=0,
    num_reservations=0,
    pinned_bytes=0,
    committed_segments=0,
    evicted_segments=0,
    evicted_bytes=0,
    trimmed_segments=0,
    trimmed_bytes=0,
    rejected_reservations=0,
    corrupted_segments=0,
    token_mismatches=0,
    lookups=0,
    hit_pages=0,
    missed_pages=0,
    tier_hit_pages={},
    fetched_segments=0,
    failed_fetches=0,
    tiers=(),
)
NO_DAMAGE = DamageReport(num_blocks=0, num_bytes=0, bad_segments=())
