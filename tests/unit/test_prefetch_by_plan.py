"""What is read for a request that waits: what its plan will want, then the rest if that is worth it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from krul_backend.planner import RestorePlan, RestorePlanner, RestoreProblem, RestoreTiming, TierCost
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import DRAM_TIER, SegmentTail, block_checksums
from krul_backend.tiers.dram.host_store import HostStore
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore.held_lease import RENEW_INTERVAL_S, HeldLease
from krul_sglang.engine.restore.load_batch import Load
from krul_sglang.engine.restore.restore_path import RestorePath
from krul_sglang.engine.restore.returning_request import Prompt
from krul_sglang.engine.restore.returning_requests import ReturningRequests
from tests.support.fake_tier import FakeTier
from tests.support.planning_builders import planning_of
from tests.support.present import present
from tests.support.segment_builders import (
    END,
    MODEL,
    NUM_LAYERS,
    PAGE_SIZE,
    Heads,
    in_ranges,
    store_in,
    stored,
    whole_segments,
)
from tests.support.store_builders import Clock, wait_until
from tests.support.tiered_builders import AskedAtOnce

KEYS = tuple(f"page-{page}" for page in range(END // PAGE_SIZE))
TOKENS = np.arange(END, dtype=np.int64)
RANGE_BYTES = 256
FAR: Heads = (48, 40, 32, 24)
"""Heads of a plan that reads the disk."""
NEAR: Heads = (48, 24, 8, 8)
"""Heads of a plan for which all is in DRAM."""
WHOLE: Heads = (0,) * NUM_LAYERS
SECONDS = 10.0


class TierPlanner(RestorePlanner):
    """Takes ``far`` heads if anything comes from below DRAM, else ``near`` ones, which end after ``near_s``;
    never less than is stored. Without heads it computes everything."""

    name = "by tier"

    def __init__(self) -> None:
        self.far: Heads | None = FAR
        self.near: Heads | None = FAR
        self.near_s = SECONDS
        self.problems: list[RestoreProblem] = []

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        self.problems.append(problem)
        is_near = all(run.tier == DRAM_TIER and run.front_tier is None for run in problem.runs)
        heads = self.near if is_near else self.far
        if heads is None:
            return RestorePlan.recompute(problem)
        lowest = RestoreTiming(problem).lowest.tolist()
        return RestorePlan(tuple(map(max, heads, lowest)), self.near_s if is_near else SECONDS)


class Rig:
    """A conversation that the SSD has, in three segments, and a server that restores it."""

    def __init__(self, capacity_bytes: int = 1 << 20) -> None:
        self.ssd = FakeTier("ssd")
        self.host = HostStore(capacity_bytes)
        self.store = TieredStore(self.host, (self.ssd,))
        self.segments = [in_ranges(segment, RANGE_BYTES) for segment in whole_segments("native")]
        for manifest, blocks in self.segments:
            arrays = [block.numpy() for block in blocks]
            checksums = block_checksums(arrays, RANGE_BYTES)
            self.ssd.add(manifest, [array.tobytes() for array in arrays], checksums)
        self.planner, self.clock = TierPlanner(), Clock()
        self.tier_costs: Callable[[], Any] = lambda: {"ssd": TierCost(0.0, 1.0)}
        self.planning = planning_of(self.planner, tier_costs=lambda: self.tier_costs())
        unused, report = cast(Any, None), self.store.report_damage
        self.restore = RestorePath(unused, None, self.planning, unused, unused, PAGE_SIZE, report)
        self.waiting = ReturningRequests(
            self.store, ServedModel(MODEL), AskedAtOnce(), self.clock, plan_ahead=self.restore.plan_ahead
        )
        self.waiting.expect("r", Prompt(END + 1, 0, lambda: TOKENS))
        assert self.waiting.look_up("r", KEYS) == len(KEYS)

    def wait(self) -> None:
        """The request waits for a while, and what is read for it comes."""
        for _ in range(4):
            with self.waiting.looking_ahead() as queue:
                queue.append("r")
            wait_until(lambda: not self.store._fetcher._reads)
            self.clock.now_s += 10 * RENEW_INTERVAL_S

    def take(self) -> HeldLease:
        return present(self.waiting.take("r"))

    def plan_load(self, held: HeldLease) -> Load | None:
        return self.restore.plan_load(
            held, KEYS[0], torch.arange(END), device_tokens=0, new_tokens=1, make_room=self.waiting.make_room
        )

    def load(self, load: Load) -> None:
        """Fetch what a load reads, compare it with what was stored, and end the load."""
        load.begin()
        tails = [reader.tail() for reader in load.readers]
        fetched = self.store.fetch(load.lease, tails)
        for piece, tail, (_, blocks) in zip(fetched, tails, self.segments, strict=True):
            for layer, num_bytes in enumerate(tail.layer_num_bytes):
                if piece.status is not None:
                    piece.status.wait(layer, 20)
                assert piece.is_right(layer, num_bytes)
                content = piece.blocks[layer][piece.blocks[layer].nbytes - num_bytes :].tobytes()
                assert content == blocks[layer].numpy().tobytes()[blocks[layer].numel() - num_bytes :]
        wait_until(lambda: not self.store._fetcher._reads)
        self.store.release(load.lease)

    def num_bytes(self, heads: Heads) -> int:
        """Of the tails after these heads, in whole ranges."""
        return sum(
            segment.manifest.trimmed(*tail).num_bytes
            for segment, tail in zip(self.segments, self.tails(heads), strict=True)
        )

    def tails(self, heads: Heads) -> list[SegmentTail]:
        lease = present(self.store.lease(MODEL, KEYS, TOKENS))
        readers = present(self.planning.open(lease, END))
        for reader in readers:
            reader.begin(heads, reader.slots)
        self.store.release(lease)
        return [reader.tail() for reader in readers]

    def assert_nothing_is_held(self) -> None:
        assert (self.store.stats().num_leases, self.ssd.num_holds) == (0, 0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.waiting.release_all()
    rig.assert_nothing_is_held()
    rig.store.close()


def test_only_what_its_plan_wants_is_read_for_a_request_that_waits(rig: Rig) -> None:
    wanted = rig.num_bytes(FAR)
    rig.wait()
    assert rig.ssd.num_bytes_read == wanted < rig.num_bytes(WHOLE)
    lookups = rig.store.stats().lookups
    rig.wait()
    assert rig.store.stats().lookups == lookups, "all that is wanted is here"
    held = rig.take()
    assert held.lease.is_in_dram
    load = present(rig.plan_load(held))
    assert load.plan.head_ends == FAR
    rig.load(load)
    assert rig.ssd.num_bytes_read == wanted


def test_of_each_tier_the_layers_come_in_their_order(rig: Rig) -> None:
    """Layer 0 of all segments, then layer 1: a load that begins meanwhile waits for no segment."""
    order: list[int] = []
    read_layer = rig.ssd._read_layer

    def noting(read: Any, layer: int) -> None:
        order.append(layer)
        read_layer(read, layer)

    rig.ssd._read_layer = noting  # type: ignore[method-assign]
    rig.wait()
    assert order == [layer for layer in range(NUM_LAYERS) for _ in rig.segments]


@pytest.mark.parametrize(("near_s", "heads"), [(0.9 * SECONDS, NEAR), (0.99 * SECONDS, FAR)])
def test_the_rest_is_read_if_it_makes_the_return_sooner(rig: Rig, near_s: float, heads: Heads) -> None:
    rig.planner.near, rig.planner.near_s = NEAR, near_s
    first, whole = rig.num_bytes(FAR), rig.num_bytes(heads)
    with rig.waiting.looking_ahead() as queue:
        queue.append("r")
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    assert rig.ssd.num_bytes_read == first
    rig.wait()
    assert rig.ssd.num_bytes_read == whole, "none twice"
    held = rig.take()
    assert held.lease.is_in_dram
    rig.planner.far = heads
    load = present(rig.plan_load(held))
    assert load.plan.head_ends == heads
    rig.load(load)
    assert rig.ssd.num_bytes_read == whole


def test_the_rest_that_finds_no_room_is_done_without_and_holds_nobody_up(rig: Rig) -> None:
    rig.planner.near, rig.planner.near_s = NEAR, 0.5 * SECONDS
    with rig.waiting.looking_ahead() as queue:
        queue.append("r")
    wait_until(lambda: not rig.store._fetcher._reads)
    reservation = fill(rig)
    rig.clock.now_s += 10 * RENEW_INTERVAL_S
    rig.wait()
    lookups, failed = rig.store.stats().lookups, rig.store.stats().failed_fetches
    assert (rig.ssd.num_bytes_read, failed) == (rig.num_bytes(FAR), 1)
    assert rig.waiting._prefetch_at_s < rig.clock.now_s - 1000
    rig.wait()
    assert rig.store.stats().lookups == lookups + 1, "that of this test"
    rig.host.abort(reservation)


def test_it_is_known_what_waiting_for_all_of_it_would_change(rig: Rig) -> None:
    rig.planner.near, rig.planner.near_s = NEAR, 0.25 * SECONDS
    held = rig.take()
    waiting = present(rig.restore.plan_ahead(Prompt(END + 1, 0, lambda: TOKENS))(held).waiting)
    problem = rig.planner.problems[0]
    assert waiting.read_s == RestoreTiming(problem).work_s(NEAR)[1] > 0
    lost_s = waiting.read_s + RENEW_INTERVAL_S - 7.5
    assert waiting[1:] == (pytest.approx(lost_s), 7.5, problem.recompute_s - 2.5)
    rig.planner.near_s = SECONDS
    assert rig.restore.plan_ahead(Prompt(END + 1, 0, lambda: TOKENS))(held).waiting is None
    rig.store.release(held.lease)


@pytest.mark.parametrize("near", [None, NEAR])
def test_where_reading_is_slower_than_computing_the_rest_alone_counts(rig: Rig, near: Heads | None) -> None:
    """Nothing, if it would be computed from DRAM, too; and then the store is not asked again."""
    rig.planner.far, rig.planner.near, rig.planner.near_s = None, near, 0.5 * SECONDS
    rig.wait()
    assert rig.ssd.num_bytes_read == (0 if near is None else rig.num_bytes(near))
    lookups = rig.store.stats().lookups
    rig.wait()
    assert rig.store.stats().lookups == lookups


def test_whole_segments_are_read_as_long_as_costs_are_unknown(rig: Rig) -> None:
    rig.tier_costs = dict
    rig.wait()
    assert rig.ssd.num_bytes_read == rig.num_bytes(WHOLE)
    held = rig.take()
    assert held.lease.is_in_dram
    rig.store.release(held.lease)


def test_what_the_plan_of_its_turn_wants_beyond_that_is_read_then(rig: Rig) -> None:
    rig.wait()
    rig.planner.far = WHOLE
    load = present(rig.plan_load(rig.take()))
    assert load.plan.head_ends == WHOLE
    rig.load(load)
    assert rig.ssd.num_bytes_read == rig.num_bytes(WHOLE)
    assert rig.planning.counters.without_room == 0


def test_a_plan_ahead_changes_nothing(rig: Rig) -> None:
    before = dataclasses.asdict(rig.planning.counters)
    rig.wait()
    assert dataclasses.asdict(rig.planning.counters) == before
    last = rig.planner.problems[-1]
    assert (last.compute_delay_s, last.load_delay_s, last.new_tokens) == (0.0, 0.0, 1)


def test_a_request_outside_of_the_window_asks_for_no_more_than_its_plan_wants(rig: Rig) -> None:
    """It is admitted while what is read for it is on its way."""
    rig.ssd.reads_go_on.clear()
    with rig.waiting.looking_ahead() as queue:
        queue.append("r")
    held = rig.take()
    assert not held.lease.is_in_dram
    load = present(rig.plan_load(held))
    rig.ssd.reads_go_on.set()
    rig.load(load)
    assert rig.ssd.num_bytes_read == rig.num_bytes(FAR)


# Room to complete what DRAM has in part


@pytest.fixture
def full() -> Iterator[Rig]:
    """DRAM has what the plan wants, and room for no more."""
    rig = Rig()
    rig.wait()
    rig.planner.far = WHOLE
    yield rig
    rig.waiting.release_all()
    rig.assert_nothing_is_held()
    rig.store.close()


def fill(rig: Rig) -> Any:
    stats = rig.store.stats()
    return present(rig.host.reserve((stats.largest_free_bytes - 64,)))


def test_without_room_to_complete_a_part_the_plan_does_without(full: Rig) -> None:
    num_read = full.ssd.num_bytes_read
    held = full.take()
    reservation = fill(full)
    load = present(full.plan_load(held))
    assert load.plan.head_ends == FAR, "what DRAM has"
    full.load(load)
    assert full.ssd.num_bytes_read == num_read
    counters = full.planning.counters
    assert (counters.without_room, counters.loads, counters.refused) == (1, 1, 0)
    full.host.abort(reservation)


def test_a_plan_that_does_without_may_be_to_compute_everything(full: Rig) -> None:
    held = full.take()
    reservation = fill(full)
    full.planner.near = None
    assert full.plan_load(held) is None
    counters = full.planning.counters
    assert (counters.without_room, counters.loads, counters.refused) == (1, 0, 1)
    full.store.release(held.lease)
    full.host.abort(reservation)


def test_what_has_no_room_is_computed_without_a_load(rig: Rig) -> None:
    """A load that failed for it would fail those of its batch, too."""
    reservation = fill(rig)
    held = rig.take()
    assert rig.plan_load(held) is None
    counters = rig.planning.counters
    assert (rig.planning.declined, counters.without_room, counters.loads) == ("no room", 1, 0)
    rig.host.abort(reservation)
    rig.load(present(rig.plan_load(held)))


def test_those_that_wait_give_the_room_to_complete_a_part(full: Rig) -> None:
    held = full.take()
    for number in range(3):
        start = END + 24 * number
        store_in(full.store, other_segment(start))
    other = tuple(f"other-{page}" for page in range(18))
    full.waiting.expect("s", Prompt(73, 0, lambda: np.arange(72, dtype=np.int64)))
    assert full.waiting.look_up("s", other) == 18
    reservation = fill(full)
    load = present(full.plan_load(held))
    assert load.plan.head_ends == WHOLE
    assert full.waiting.num_leases == 0
    full.load(load)
    assert full.planning.counters.without_room == 0
    full.host.abort(reservation)


def other_segment(start: int) -> Any:
    """A segment of another conversation of 72 tokens."""
    first = start - END
    segment = stored("native", 0, 24)
    pages = tuple(f"other-{page}" for page in range(first // PAGE_SIZE, first // PAGE_SIZE + 6))
    parent = f"other-{first // PAGE_SIZE - 1}" if first else None
    manifest = dataclasses.replace(
        segment.manifest,
        page_keys=pages,
        parent_key=parent,
        start_token=first,
        token_ids=np.arange(first, first + 24, dtype=np.int64),
        layer_first_token=(first,) * NUM_LAYERS,
    )
    return segment._replace(manifest=manifest)
