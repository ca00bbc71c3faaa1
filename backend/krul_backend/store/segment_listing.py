"""Listings of stored segments over all tiers, for operators."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import DRAM_TIER, SegmentDetails, SegmentInfo
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.dram.host_store import HostStore


def list_all_segments(host: HostStore, tiers: Sequence[LowerTier]) -> list[SegmentInfo]:
    """List each segment once, those in DRAM first. Ids of the others are those of their tier."""
    manifests = host.manifests()
    lines = [
        dataclasses.replace(info, tiers=(DRAM_TIER, *_holders_of(manifests.get(info.segment_id), tiers)))
        for info in host.list_segments()
    ]
    for tier in tiers:
        # A line does not name its pages: a line of the tier is matched with any equal line of DRAM.
        listed = Counter(_line_key(info) for info in lines if tier.name in info.tiers)
        for info in tier.list_segments():
            key = _line_key(info)
            if listed[key]:
                listed[key] -= 1
            else:
                lines.append(info)
    return lines


def inspect_segment(host: HostStore, tiers: Sequence[LowerTier], segment_id: int) -> SegmentDetails | None:
    """Describe a segment in DRAM, with the lower tiers that hold it, too; None if it is not in DRAM."""
    details = host.inspect(segment_id)
    if details is None:
        return None
    holders = (DRAM_TIER, *_holders_of(host.manifest_of(segment_id), tiers))
    return dataclasses.replace(details, info=dataclasses.replace(details.info, tiers=holders))


def _holders_of(manifest: SegmentManifest | None, tiers: Sequence[LowerTier]) -> list[str]:
    """Names of the tiers that hold all pages of a segment; none if it has gone meanwhile (None)."""
    if manifest is None:
        return []
    model, page_keys = manifest.model, manifest.page_keys
    return [tier.name for tier in tiers if not tier.find_missing(model, page_keys)]


def _line_key(info: SegmentInfo) -> tuple[str, str, int, int]:
    """The fields that are equal in all tiers: a trim in DRAM changes the number of bytes."""
    return info.fingerprint, info.tenant, info.start_token, info.num_tokens
