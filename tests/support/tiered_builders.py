"""A store over two fake tiers, and segments that only a lower tier has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from krul_backend.segment import SegmentManifest
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.eviction import LruPolicy
from krul_backend.tiers.common.interface import (
    Checksums,
    Lease,
    SegmentSlice,
    block_checksum,
    block_checksums,
)
from krul_backend.tiers.dram.host_store import HostStore
from krul_sglang.engine.common.asking import AskingThread, DaemonPatience, Question
from krul_sglang.engine.common.moved_runs import FindRun
from krul_sglang.engine.restore.returning_request import Prompt
from krul_sglang.engine.restore.returning_requests import ReturningRequests
from tests.support.fake_tier import FakeTier
from tests.support.present import present
from tests.support.store_builders import commit_to, make_manifest, make_model, page_keys, tokens_of

MODEL = make_model()
T = TypeVar("T")
SIZES = (100, 60)
TAKEN_BYTES = 128 + 64
FLAGS_BYTES = 64


class AskedAtOnce(AskingThread):
    """Asks in the calling thread: every answer is prompt."""

    def __init__(self) -> None:
        self.patience = DaemonPatience()

    def ask(self, call: Callable[[], T], *, is_urgent: bool = True) -> Question[T]:
        question = Question(call, is_urgent=is_urgent)
        question.run()
        return question


def look_up(
    requests: ReturningRequests, rid: str, keys: Sequence[str], find_run: FindRun | None = None
) -> int:
    """How many of these pages can be restored for a request, which has nothing on the device."""
    requests.expect(rid, Prompt(len(keys) * MODEL.page_size + 1, 0, lambda: tokens_of(keys), find_run))
    return requests.look_up(rid, keys)


class Rig:
    """``store`` over DRAM of ``capacity_bytes``, ``ssd`` and ``mooncake``."""

    def __init__(
        self, capacity_bytes: int = 64 * 64, tenant_quota: float = 1.0, ssd: FakeTier | None = None
    ) -> None:
        self.host = HostStore(capacity_bytes, LruPolicy(), tenant_quota=tenant_quota)
        self.ssd = FakeTier("ssd") if ssd is None else ssd
        self.mooncake = FakeTier("mooncake")
        self.tiers = (self.ssd, self.mooncake)
        self.store = TieredStore(self.host, self.tiers)

    def go_on(self) -> None:
        """Let the tiers' reads and writes go on."""
        for tier in self.tiers:
            tier.reads_go_on.set()
            tier.writes_go_on.set()

    def close(self) -> None:
        self.go_on()
        self.store.close()

    def assert_nothing_is_held(self) -> None:
        """No lease, hold or pin is left: everything can be evicted."""
        self.store.flush(10)
        stats = self.store.stats()
        assert (stats.num_leases, self.host.stats().num_leases, stats.num_reservations) == (0, 0, 0)
        assert [tier.num_holds for tier in self.tiers] == [0, 0]
        reservation = present(self.host.reserve((stats.capacity_bytes,)))
        self.host.abort(reservation)


def content_of(conversation: str, first: int, end: int, sizes: tuple[int, ...] = SIZES) -> tuple[bytes, ...]:
    rng = np.random.default_rng([first, end, *conversation.encode()])
    return tuple(rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in sizes)


def checksums_in(manifest: SegmentManifest, content: Sequence[bytes]) -> Checksums:
    """The checksums of blocks of this content."""
    blocks = [np.frombuffer(block, dtype=np.uint8) for block in content]
    return block_checksums(blocks, manifest.range_bytes)


def put_below(
    tier: FakeTier,
    conversation: str,
    first: int,
    end: int,
    sizes: tuple[int, ...] = SIZES,
    tenant: str = "",
    range_bytes: int = 0,
) -> tuple[SegmentManifest, tuple[bytes, ...]]:
    """A segment that a tier alone has."""
    manifest = make_manifest(conversation, first, end, sizes, MODEL, tenant, range_bytes=range_bytes)
    content = content_of(conversation, first, end, sizes)
    tier.add(manifest, content, checksums_in(manifest, content))
    return manifest, content


def put_in_dram(
    rig: Rig, conversation: str, first: int, end: int, sizes: tuple[int, ...] = SIZES, range_bytes: int = 0
) -> tuple[int, tuple[bytes, ...]]:
    """A segment that DRAM alone has: committed past the lower tiers."""
    reservation = present(rig.host.reserve(sizes))
    content = content_of(conversation, first, end, sizes)
    for block, wanted in zip(reservation.blocks, content, strict=True):
        block[:] = np.frombuffer(wanted, dtype=np.uint8)
    manifest = make_manifest(conversation, first, end, sizes, MODEL, range_bytes=range_bytes)
    return commit_to(rig.host, reservation, manifest), content


def wait_for(pieces: tuple[SegmentSlice, ...]) -> list[tuple[bytes, ...]]:
    """The content of slices once all layers have landed, checked as a reader does."""
    contents = []
    for piece in pieces:
        for layer, (block, checksum) in enumerate(zip(piece.blocks, piece.checksums, strict=True)):
            if piece.status is not None:
                piece.status.wait(layer, 20)
            assert block_checksum(block, piece.header.range_bytes) == checksum
        contents.append(tuple(block.tobytes() for block in piece.blocks))
    return contents


def tiers_of(lease: Lease | None) -> list[tuple[str, int]]:
    """Tier and number of pages of each slice."""
    assert lease is not None
    return [(piece.tier, piece.end_page - piece.first_page) for piece in lease.slices]


def is_in_dram(rig: Rig, conversation: str, first: int, end: int) -> bool:
    return not rig.host.find_missing(MODEL, page_keys(conversation, first, end))
