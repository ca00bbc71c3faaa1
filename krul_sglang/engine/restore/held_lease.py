"""Leases that are held for requests, and the bytes that they pin."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from krul_backend.segment import TokenIds
from krul_backend.tiers.common.interface import (
    CHECKSUM_BYTES,
    DRAM_TIER,
    Lease,
    SegmentSlice,
    SegmentTail,
    Tails,
)
from krul_sglang.engine.common.asking import PATIENCE_S
from krul_sglang.engine.common.moved_runs import MovedRun

RENEW_INTERVAL_S = 0.05
"""Seconds until the store is asked whether a waiting request's prefetch has arrived, if it is not known how
long that takes. The time doubles with each further question: every one goes through all of the prefix."""
MAX_RENEW_INTERVAL_S = 1.0
LEAST_SAVED_S = 0.02
"""Nobody waits for reads if others would go on by less sooner: about a step of decoding."""


@dataclass(frozen=True)
class KeyRun:
    """Names a run of page keys. A key is a hash over all pages up to its own: the last one covers all."""

    first_key: str
    last_key: str
    num_keys: int

    @classmethod
    def of(cls, page_keys: Sequence[str]) -> KeyRun:
        return cls(page_keys[0], page_keys[-1], len(page_keys))


SegmentBytes = Mapping[Hashable, int]
"""Bytes of segments, by something that is the same in all tiers, and for a part of one."""


class Waiting(NamedTuple):
    """Tells the seconds that a request and others lose or gain if it waits until all it wants is in DRAM.

    That is read in ``read_s``. Its answer comes ``lost_s`` later than if its load read it, but those that
    share its forward, or wait for that, go on ``saved_s`` sooner. After ``longest_s`` computing is sooner.
    """

    read_s: float
    lost_s: float
    saved_s: float
    longest_s: float

    def is_worth(self, num_others: int, *, has_to: bool = False) -> bool:
        """Return True if ``num_others`` together gain more than the request loses, and each a moment; or if
        it ``has_to`` wait, because it cannot be read now. Never for a short read, or if computing is sooner.
        """
        if not LEAST_SAVED_S < self.read_s < self.longest_s:
            return False
        return has_to or (self.saved_s > LEAST_SAVED_S and num_others * self.saved_s > self.lost_s)


class Ahead(NamedTuple):
    """What is read for a request that waits: ``first`` of each slice, and when that is in DRAM, ``goal``."""

    first: Tails
    goal: Tails
    waiting: Waiting | None = None


PlanAhead = Callable[["HeldLease"], Ahead]


def whole_segments(held: HeldLease) -> Ahead:
    """All of what lies below DRAM, at once."""
    whole = (None,) * len(held.lease.slices)
    return Ahead(whole, whole)


@dataclass(frozen=True)
class HeldLease:
    """The lease of a waiting request, and the page keys and tokens that it was given for.

    ``token_ids``: as for ``KVStore.lease``. ``asked_s``: when the store was asked last. ``num_renewals``: how
    often a prefetch from lower tiers was asked for, and the lease renewed; ``is_refused``: the last one was
    refused, or a part of it. ``num_arriving``: pages that were on their way to DRAM then. ``moved``: the run
    that is leased, if it is stored at another place than where the request has it; then keys and tokens are
    those of the run. ``tails``: what a load is expected to want in DRAM; None if nobody has asked yet.
    ``waiting``: what that changes, if it is known, and ``wait_until_s`` when it has taken too long.
    ``boundaries``: after how many of the pages the request can go on, ascending, if it needs the state of
    recurrent layers there; None if it can after each.
    """

    run: KeyRun
    page_keys: Sequence[str]
    token_ids: Callable[[], TokenIds]
    lease: Lease
    asked_s: float
    num_renewals: int = 0
    is_refused: bool = False
    num_arriving: int = 0
    moved: MovedRun | None = None
    tails: Tails | None = None
    waiting: Waiting | None = None
    wait_until_s: float = math.inf
    boundaries: Sequence[int] | None = None

    @cached_property
    def is_here(self) -> bool:
        """Whether all that a load is expected to want is in DRAM."""
        if self.tails is None:
            return self.lease.is_all_in_dram
        return all(map(SegmentSlice.holds, self.lease.slices, self.tails))

    @property
    def renew_at_s(self) -> float:
        """When the lease should be renewed; at once if nothing is on its way for it."""
        if not self.num_renewals or self.is_refused:
            return self.asked_s
        interval_s = RENEW_INTERVAL_S * 2.0 ** (self.num_renewals - 1)
        if self.waiting is not None:
            interval_s = self.waiting.read_s if self.num_renewals == 1 else interval_s / 2
        return self.asked_s + min(max(RENEW_INTERVAL_S, interval_s), MAX_RENEW_INTERVAL_S)

    def is_worth_waiting(self, now_s: float, num_others: int, *, in_turn: bool) -> bool:
        """Return True while its request should wait for what is read for it, because ``num_others`` would
        have to wait for that, too; because there is no room for it yet; or because reads go on ``in_turn``,
        and somebody else has its own. At first, until that is known."""
        if self.is_here or now_s >= self.wait_until_s:
            return False
        if not self.num_renewals:
            return now_s < self.asked_s + PATIENCE_S
        has_to = in_turn or self.is_refused
        return self.waiting is not None and self.waiting.is_worth(num_others, has_to=has_to)

    @cached_property
    def segments(self) -> SegmentBytes:
        """What the leased segments take in DRAM when all that is wanted is there."""
        return self.in_dram | {_name(piece): num_bytes_of(piece, tail) for piece, tail in self._wanted}

    @cached_property
    def in_dram(self) -> dict[Hashable, int]:
        """What is there now."""
        slices = (piece for piece in self.lease.slices if piece.tier == DRAM_TIER)
        return {_name(piece): num_bytes_of(piece, None) for piece in slices}

    @cached_property
    def pinned(self) -> SegmentBytes:
        """What is there, or on its way: it cannot be evicted."""
        pinned = dict(self.in_dram)
        num_arriving = self.num_arriving
        for piece, tail in self._wanted:
            # The first ones of a prefix are fetched first.
            if not piece.holds(tail) and num_arriving > 0:
                num_arriving -= piece.end_page - piece.first_page
                pinned[_name(piece)] = num_bytes_of(piece, tail)
        return pinned

    @cached_property
    def _wanted(self) -> Sequence[tuple[SegmentSlice, SegmentTail | None]]:
        tails = whole_segments(self).goal if self.tails is None else self.tails
        return [*zip(self.lease.slices, tails, strict=False)]

    def num_pages(self, page_size: int) -> int:
        """How many of the request's pages can be restored."""
        if self.boundaries is not None:
            return self.boundaries[-1]
        if self.moved is None:
            return self.lease.num_pages
        return self.moved.num_pages(self.lease.num_pages, page_size)


def num_bytes_of(piece: SegmentSlice, tail: SegmentTail | None) -> int:
    """Bytes that a slice takes in DRAM when it has ``tail``, or what there is of it."""
    if tail is not None and piece.tier == DRAM_TIER:
        tail = tail.with_held(piece.header)
    return sum(piece.header.layer_num_bytes if tail is None else tail.layer_num_bytes)


def _name(piece: SegmentSlice) -> Hashable:
    """Names its segment: what is stored of a segment always has the end of its last block."""
    last = next((checksum for checksum in reversed(piece.checksums) if checksum), b"")
    return piece.header.start_token, piece.header.num_tokens, last[-CHECKSUM_BYTES:]


class Room:
    """Adds up the bytes of segments, each counted once, up to a limit. What comes first may exceed it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._segments: dict[Hashable, int] = {}

    def fits(self, segments: SegmentBytes) -> bool:
        more = self._more(segments)
        return not more or not self._num_bytes or self._num_bytes + more <= self._max_bytes

    def add(self, segments: SegmentBytes) -> None:
        self._num_bytes += self._more(segments)
        for key, num_bytes in segments.items():
            self._segments[key] = max(num_bytes, self._segments.get(key, 0))

    def _more(self, segments: SegmentBytes) -> int:
        return sum(max(0, num_bytes - self._segments.get(key, 0)) for key, num_bytes in segments.items())
