"""A lease over several tiers, piece by piece."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from krul_backend.tiers.common.interface import Lease, SegmentSlice
from krul_backend.tiers.common.lower_tier import LowerTier, TierRun
from krul_backend.tiers.dram.host_store import HostStore


@dataclass(frozen=True, eq=False)
class LowerPart:
    """A held run of a lower tier, and the slice that stands for it until it is fetched."""

    tier: LowerTier
    run: TierRun
    part: SegmentSlice

    @property
    def num_pages(self) -> int:
        return self.run.end_page - self.run.first_page


Part = Lease | LowerPart
"""Of a lease: what DRAM leased, or what a lower tier holds."""


@dataclass(eq=False)
class TieredLease:
    """The parts of a lease in conversation order. ``lock`` guards all of it.

    ``began_at`` dates it against ``clear``: from before any tier was asked.
    """

    parts: list[Part]
    began_at: int
    is_released: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


def slices_of(parts: Sequence[Part]) -> tuple[SegmentSlice, ...]:
    """Of all parts, as they were when they were matched."""
    slices: list[SegmentSlice] = []
    for part in parts:
        slices.extend(part.slices if isinstance(part, Lease) else (part.part,))
    return tuple(slices)


def release_parts(host: HostStore, parts: Sequence[Part]) -> None:
    """End what holds the parts, each of them, even if one cannot be ended."""
    with ExitStack() as stack:
        for part in parts:
            if isinstance(part, Lease):
                stack.callback(host.release, part)
            else:
                stack.callback(part.tier.release, part.run)
