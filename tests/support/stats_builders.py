"""Statistics with a different number in each field, so that no two can be mistaken for each other."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from krul_backend.daemon.protocol.messages import DaemonStats
from krul_backend.tiers.common.interface import DRAM_TIER, SegmentInfo, StoreStats, TierStats


def make_tier_stats(name: str = "ssd", first: int = 5_000, **changes: Any) -> TierStats:
    """Fields are numbered in their order from ``first`` on, but for capacity, used and free: these add up."""
    numbers = itertools.count(first)
    values: dict[str, Any] = {
        field.name: next(numbers)
        for field in dataclasses.fields(TierStats)
        if field.name not in ("name", "is_suspended", "is_opening", "skipped_segments")
    }
    values["capacity_bytes"] = values["used_bytes"] + values["free_bytes"]
    return TierStats(
        **{
            "name": name,
            "is_suspended": False,
            "is_opening": False,
            "skipped_segments": {"orphan": 77},
            **values,
            **changes,
        }
    )


def make_store_stats(**changes: Any) -> StoreStats:
    numbers = itertools.count(100)
    values: dict[str, Any] = {
        field.name: next(numbers)
        for field in dataclasses.fields(StoreStats)
        if field.name not in ("tier_hit_pages", "tiers")
    }
    values["capacity_bytes"] = values["used_bytes"] + values["free_bytes"]
    values["tier_hit_pages"] = {DRAM_TIER: 60, "ssd": 40}
    values["hit_pages"] = 100
    values["missed_pages"] = 25
    values["tiers"] = (make_tier_stats(),)
    return StoreStats(**{**values, **changes})


def make_daemon_stats(**changes: Any) -> DaemonStats:
    values: dict[str, Any] = {
        "pid": 4242,
        "uptime_s": 12.5,
        "num_sessions": 3,
        "requests": 77,
        "failed_requests": 2,
        "bad_messages": {"frames": 4},
    }
    return DaemonStats(**{**values, **changes})


def make_segment_info(segment_id: int = 1, **changes: Any) -> SegmentInfo:
    values: dict[str, Any] = {
        "model": "tiny",
        "fingerprint": "f" * 32,
        "tenant": "",
        "parent_key": None,
        "last_page_key": f"{segment_id:02x}",
        "start_token": 0,
        "num_tokens": 64,
        "num_bytes": 4096,
        "codec": "raw",
        "codec_params": {},
        "tiers": (DRAM_TIER,),
        "num_leases": 0,
        "idle_s": 1.0,
        "pinned_s": 0.0,
        "is_fast_copy": False,
    }
    return SegmentInfo(segment_id=segment_id, **{**values, **changes})
