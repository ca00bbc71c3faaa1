"""Joins the segments of a listing to conversations, for operators."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from krul_backend.tiers.common.interface import SegmentInfo

MAX_LISTED_TURNS = 2_000
"""Of more, nothing that is shown again and again asks for a list: all are gone through for it."""


@dataclass(frozen=True)
class Conversation:
    """The segments of one conversation, by their first token; what several continue belongs to the first.

    ``first_page`` is the key of the last page of its first segment.
    """

    first_page: str
    segments: tuple[SegmentInfo, ...]

    @property
    def num_tokens(self) -> int:
        return max(segment.start_token + segment.num_tokens for segment in self.segments)

    @property
    def num_turns(self) -> int:
        return len({segment.last_page_key for segment in self.segments})

    @property
    def num_leases(self) -> int:
        return sum(segment.num_leases for segment in self.segments)

    @property
    def idle_s(self) -> float:
        """Seconds since its last use."""
        return min(segment.idle_s for segment in self.segments)

    @property
    def exact_copy_bytes(self) -> int:
        """Bytes of exact copies in DRAM, which lie beside the encoded form or wait to be encoded."""
        return sum(segment.num_bytes for segment in self.segments if segment.is_fast_copy)

    def held_bytes(self, tier: str) -> int:
        """Bytes that a tier keeps, exact copies left out."""
        return sum(
            segment.num_bytes
            for segment in self.segments
            if tier in segment.tiers and not segment.is_fast_copy
        )

    @property
    def codecs(self) -> list[str]:
        """Names of the codecs of what is kept."""
        return sorted({segment.codec for segment in self.segments if not segment.is_fast_copy})

    @property
    def spent_nats(self) -> float | None:
        """The mean KL divergence of its next tokens that compression has cost so far; None if that is not
        known of some segment. A segment's damage is that at its own end: it counts less later."""
        spent: dict[int, float] = {}
        for segment in self.segments:
            if segment.is_fast_copy:
                continue
            # What is stored as it is has none noted, unless it had come back lossy before.
            damage = segment.codec_params.get("damage", 0.0 if segment.codec == "native" else None)
            if not isinstance(damage, int | float) or not math.isfinite(damage):
                return None
            cost = damage * (segment.start_token + segment.num_tokens)
            # Ranks of one server store the same tokens.
            spent[segment.start_token] = max(cost, spent.get(segment.start_token, 0.0))
        return sum(spent.values()) / self.num_tokens


def conversations_of(segments: Iterable[SegmentInfo]) -> list[Conversation]:
    """The conversations of a listing, the last used first."""
    firsts: dict[tuple[str, str], str] = {}
    found: dict[tuple[str, str], list[SegmentInfo]] = {}
    for segment in sorted(segments, key=lambda segment: segment.start_token):
        before = segment.model, segment.parent_key or segment.last_page_key
        first = firsts.get(before, segment.last_page_key)
        firsts[segment.model, segment.last_page_key] = first
        found.setdefault((segment.model, first), []).append(segment)
    joined = [Conversation(first, tuple(parts)) for (_, first), parts in found.items()]
    return sorted(joined, key=lambda conversation: conversation.idle_s)
