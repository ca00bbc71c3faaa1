"""A tier below DRAM that lies in memory, and is as slow, broken or wrong as a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from krul_backend.restore.costs import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.store.interface import Block, DamageReport, SegmentInfo, TierStats
from krul_backend.tiers.lower_tier import LowerTier, TierRun


@dataclass(frozen=True, eq=False)
class Record:
    manifest: SegmentManifest
    blocks: tuple[Block, ...]
    checksums: tuple[int, ...]


class MemoryTier(LowerTier):
    """Keeps one segment, the last that was put: enough for one conversation of one turn.

    ``before_layer(layer)`` is called before each layer is copied; what it raises ends the fetch.
    """

    name = "ssd"

    def __init__(self) -> None:
        self.record: Record | None = None
        self.before_layer: Callable[[int], None] = lambda layer: None
        self.num_held = 0

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        is_here = self.record is not None and tuple(page_keys) == self.record.manifest.page_keys
        return [] if is_here else [range(len(page_keys))]

    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[TierRun, ...]:
        record = self.record
        if record is None or tuple(page_keys) != record.manifest.page_keys:
            return ()
        assert np.array_equal(token_ids, record.manifest.token_ids)
        self.num_held += 1
        return (TierRun(self.name, record.manifest, record.checksums, 0, len(page_keys), record),)

    def release(self, run: TierRun) -> None:
        self.num_held -= 1

    def fetch(self, run: TierRun, blocks: Sequence[Block], landed: Callable[[int], None]) -> None:
        for layer, (target, block) in enumerate(zip(blocks, run.place.blocks, strict=True)):
            self.before_layer(layer)
            target[:] = block
            landed(layer)

    def put(
        self,
        manifest: SegmentManifest,
        blocks: Sequence[Block],
        checksums: Sequence[int],
        done: Callable[[], None],
    ) -> bool:
        self.record = Record(manifest, tuple(block.copy() for block in blocks), tuple(checksums))
        done()
        return True

    def discard(self, run: TierRun) -> None:
        self.record = None

    def cost(self) -> TierCost:
        return TierCost(0.0, 1e-9)

    def flush(self, timeout_s: float) -> bool:
        return True

    def clear(self, model: ModelIdentity | None = None) -> None:
        self.record = None

    def list_segments(self) -> list[SegmentInfo]:
        return []

    def verify(self) -> DamageReport:
        return DamageReport(0, 0, ())

    def stats(self) -> TierStats:
        num_segments = int(self.record is not None)
        return TierStats(
            self.name, 1, 0, 1, 0, num_segments, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, is_suspended=False
        )

    def close(self) -> None:
        self.record = None
