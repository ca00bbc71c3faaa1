"""Loads of damaged blocks, and of blocks that come from a lower tier: right KV, or none and a failed load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from krul_backend.codec.layout import LayerKV
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.device import Device
from krul_backend.errors import CodecError, TierReadError
from krul_backend.tiers.common.interface import DRAM_TIER, Lease, SegmentSlice
from krul_backend.tiers.common.lower_tier import TailRead
from krul_backend.tiers.common.read_queue import ReadPriority, of_a_load
from krul_sglang.engine.restore import link, loading
from krul_sglang.engine.restore.link import Link
from krul_sglang.engine.restore.load_batch import Load, LoadFailedError
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.restore.tail_groups import TailGroups
from tests.support.engine_builders import PATIENCE_S, make_load
from tests.support.fake_tier import FakeTier
from tests.support.loading_builders import NUM_LAYERS, NUM_PAGES, NUM_TOKENS, SHAPE, Rig, is_equal
from tests.support.present import present
from tests.support.store_builders import wait_until
from tests.support.strict_device import DEVICES, make_device

SLOTS = torch.arange(NUM_TOKENS)
SHORT_S = 0.05
"""A deadline that passes soon; what is tested to pass it waits for an event that the test sets."""


@pytest.fixture(params=DEVICES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(PATIENCE_S, device=make_device(request.param))
    yield rig
    rig.close()


class SteppedTier(FakeTier):
    """Calls ``before_layer(layer)`` before a layer lands; what it raises ends the read."""

    def __init__(self) -> None:
        super().__init__()
        self.before_layer: Callable[[int], None] = lambda layer: None

    def fetch(self, reads: Sequence[TailRead], priority: Callable[[], ReadPriority] = of_a_load) -> None:
        for read in reads:
            read.landed = partial(self._land, read.landed)
        super().fetch(reads, priority)

    def _land(self, landed: Callable[[int], None], layer: int) -> None:
        self.before_layer(layer)
        landed(layer)


class SunkRig(Rig):
    """The conversation lies in a lower tier alone."""

    def __init__(self, timeout_s: float = PATIENCE_S, device: Device | None = None, **ranges: int) -> None:
        self.tier = SteppedTier()
        super().__init__(timeout_s, (self.tier,), device, **ranges)
        assert self.store.flush(PATIENCE_S)
        assert len(self.tier.records) == 1
        self.store.host.clear()


@pytest.fixture(params=DEVICES)
def sunk(request: pytest.FixtureRequest) -> Iterator[SunkRig]:
    rig = SunkRig(device=make_device(request.param))
    yield rig
    rig.close()


def start(rig: Rig, load: Load) -> int:
    return rig.loader.start({"r": load})


def assert_load_fails(rig: Rig, load: Load, cause: str, *, first_wrong: int) -> None:
    """Layers before ``first_wrong`` may have been written, right; nothing else of the pool has changed."""
    before = rig.pool.copy()
    index = start(rig, load)
    with pytest.raises(LoadFailedError, match=cause):
        rig.batch(index).wait_layer(NUM_LAYERS - 1)
    assert not rig.loader.finish(index)
    assert rig.loader.counters.failed_batches == 1
    assert rig.num_leases() == 0
    for layer, (new, old) in enumerate(zip(rig.pool.copy(), before, strict=True)):
        assert is_equal(new, old) == (layer >= first_wrong)
        assert layer >= first_wrong or rig.holds(layer, SLOTS)


# ---- damage ----


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_damaged_block_fails_the_load_and_never_reaches_the_pool(rig: Rig, layer: int) -> None:
    load = rig.load(SLOTS)
    offset, num_bytes = load.lease.slices[0].spans[layer]
    rig.store.host.buffer[offset + num_bytes // 2] ^= 0x10
    assert_load_fails(rig, load, f"layer {layer} of segment .* has a wrong checksum", first_wrong=layer)
    stats = rig.store.stats()
    assert (stats.corrupted_segments, stats.num_segments) == (1, 0)
    # It is found no more, and stored again when the conversation next ends a turn.
    assert rig.store.lease(rig.model, rig.page_keys, rig.token_ids) is None
    assert rig.store.find_missing(rig.model, rig.page_keys) == [range(NUM_PAGES)]


def test_damage_that_a_gpu_finds_fails_the_load_before_the_last_layer_lands(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tails: TailGroups) -> None:
        raise CodecError("record 3 of a group is damaged")

    monkeypatch.setattr(TailGroups, "check", refuse)
    assert_load_fails(rig, rig.load(SLOTS), "record 3 of a group", first_wrong=NUM_LAYERS)


def test_damage_is_one_line_in_the_log_and_an_error_of_the_code_has_its_place(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(index: int, layer: int) -> None:
        raise RuntimeError("no such layer")

    load = rig.load(SLOTS)
    rig.store.host.buffer[load.lease.slices[0].spans[1].offset] ^= 0x10
    others = rig.load(SLOTS)
    assert not rig.loader.finish(start(rig, load))
    rig.before_layer = fail
    assert not rig.loader.finish(start(rig, others))
    damage, bug = (record for record in caplog.records if record.name == loading.__name__)
    assert "recomputed: layer 1 of segment" in damage.getMessage()
    assert (damage.levelname, bool(damage.exc_info)) == ("WARNING", False)
    assert (bug.levelname, bool(bug.exc_info)) == ("ERROR", True)


def test_damage_in_what_is_not_needed_fails_nothing(rig: Rig) -> None:
    """Heads that cover a layer: its block is neither checked nor copied."""
    load = rig.load(SLOTS)
    rig.store.host.buffer[load.lease.slices[0].spans[0].offset] ^= 0x10
    covered = replace(load, plan=replace(load.plan, head_ends=(NUM_TOKENS, 0, 0)))
    assert rig.loader.finish(start(rig, covered))
    assert [rig.holds(layer, SLOTS) for layer in range(NUM_LAYERS)] == [False, True, True]
    assert rig.store.stats().corrupted_segments == 0


def test_damage_of_one_load_spares_the_next_batch(rig: Rig) -> None:
    load, whole = rig.load(SLOTS), rig.load(SLOTS + 30)
    offset = load.lease.slices[0].spans[1].offset
    rig.store.host.buffer[offset] ^= 0x10
    assert not rig.loader.finish(start(rig, load))
    rig.store.host.buffer[offset] ^= 0x10
    assert rig.loader.finish(start(rig, whole))
    assert all(rig.holds(layer, SLOTS + 30) for layer in range(NUM_LAYERS))


# ---- lower tiers ----


def test_what_lies_in_a_lower_tier_is_fetched_and_loaded(sunk: SunkRig) -> None:
    load = sunk.load(SLOTS)
    assert [part.source.tier for part in load.readers] == ["ssd"]
    assert not load.lease.is_in_dram
    assert sunk.loader.finish(start(sunk, load))
    assert all(sunk.holds(layer, SLOTS) for layer in range(NUM_LAYERS))
    assert (sunk.num_leases(), sunk.loader.counters.tokens) == (0, NUM_TOKENS)
    # The thread that fetched it may still be about to say so: from then on it is in DRAM, too.
    wait_until(lambda: sunk.store.stats().fetched_segments == 1)
    again = sunk.load(SLOTS + 30)
    assert [part.source.tier for part in again.readers] == [DRAM_TIER]
    assert sunk.loader.finish(start(sunk, again))
    assert sunk.store.stats().fetched_segments == 1


TOKEN_BYTES = 2 * 2 * 8 * 4
"""Of a layer: keys and values of two heads of 8, in float32."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_ends", [(8, 4, 0), (7, 5, 1), (8, 8, 4), (0, 0, 0)])
def test_only_what_a_load_reads_is_fetched(device: str, head_ends: tuple[int, ...]) -> None:
    """Heads are recomputed: of their tokens nothing comes from the tier, but for the rest of a range."""
    sunk = SunkRig(device=make_device(device), range_bytes=TOKEN_BYTES // 2, group_size=2)
    load = sunk.load(SLOTS)
    load = replace(load, plan=replace(load.plan, head_ends=head_ends))
    assert sunk.loader.finish(start(sunk, load))
    num_rows = [NUM_TOKENS - end // 2 * 2 for end in head_ends]
    assert sunk.tier.num_bytes_read == sum(num_rows) * TOKEN_BYTES
    for layer, (end, kv) in enumerate(zip(head_ends, sunk.layers, strict=True)):
        assert is_equal(sunk.pool.gather(layer, SLOTS[end:]), LayerKV(kv.k[end:], kv.v[end:]))
    assert sunk.num_leases() == 0
    # What was left out is left out for the next one, too, which is told so.
    assert sunk.store.flush(PATIENCE_S)
    (part,) = sunk.load(SLOTS).readers
    assert [NUM_TOKENS - first for first in part.source.header.layer_first_token] == num_rows
    assert part.source.tier == DRAM_TIER
    sunk.close()


def test_layers_are_loaded_as_they_arrive(sunk: SunkRig) -> None:
    may_come = [threading.Event() for _ in range(NUM_LAYERS)]
    sunk.tier.before_layer = lambda layer: wait_for(may_come[layer])
    index = start(sunk, sunk.load(SLOTS))
    for layer in range(NUM_LAYERS):
        assert len(sunk.batch(index).load_times) == layer
        assert not sunk.holds(layer, SLOTS)
        may_come[layer].set()
        sunk.batch(index).wait_layer(layer)
        assert sunk.holds(layer, SLOTS)
    assert sunk.loader.finish(index)


def test_waiting_for_a_lower_tier_is_part_of_what_a_load_takes(sunk: SunkRig) -> None:
    """The planner learns from it how slow the tier is."""
    late_layer, late_s = 1, 0.2
    sunk.tier.before_layer = lambda layer: time.sleep(late_s if layer == late_layer else 0)
    index = start(sunk, sunk.load(SLOTS))
    batch = sunk.batch(index)
    batch.wait_layer(NUM_LAYERS - 1)
    assert sunk.loader.finish(index)
    seconds = [(times.begin(), times.end()) for times in batch.load_times]
    assert sum(end - begin for begin, end in seconds if begin is not None and end is not None) > late_s / 2


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_a_fetch_that_fails_half_way_fails_the_load(
    sunk: SunkRig, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, has_begun = sunk.store.fetch, threading.Event()

    def begin(lease: Lease, tails: Any) -> tuple[SegmentSlice, ...]:
        slices = fetch(lease, tails)
        has_begun.set()
        return slices

    def fail(at: int) -> None:
        if at == layer:
            wait_for(has_begun)
            raise TierReadError("the disk is gone")

    monkeypatch.setattr(sunk.store, "fetch", begin)
    sunk.tier.before_layer = fail
    assert_load_fails(
        sunk, sunk.load(SLOTS), f"layer {layer} could not be read from its tier", first_wrong=layer
    )
    # An error of the medium is no damage.
    assert sunk.store.stats().corrupted_segments == 0
    sunk.tier.before_layer = lambda at: None
    assert sunk.loader.finish(start(sunk, sunk.load(SLOTS)))
    assert all(sunk.holds(layer, SLOTS) for layer in range(NUM_LAYERS))


def test_a_fetch_that_hangs_fails_the_load_after_its_deadline() -> None:
    rig, go_on = SunkRig(SHORT_S), threading.Event()
    rig.tier.before_layer = lambda layer: wait_for(go_on)
    try:
        before = rig.pool.copy()
        index = start(rig, rig.load(SLOTS))
        with pytest.raises(LoadFailedError, match=r"did not arrive|no layer has landed"):
            rig.batch(index).wait_layer(0)
        assert not rig.loader.finish(index)
        assert all(is_equal(new, old) for new, old in zip(rig.pool.copy(), before, strict=True))
        assert rig.num_leases() == 0
    finally:
        go_on.set()
        rig.close()


def test_bytes_that_arrive_wrong_are_no_kv(sunk: SunkRig) -> None:
    """A tier that claims to have checked what it has not."""
    (record,) = sunk.tier.records.values()
    damaged = bytearray(record.content[1])
    damaged[3] ^= 0x10
    record.content = (record.content[0], bytes(damaged), record.content[2])
    sunk.tier.checks_bytes = False
    assert_load_fails(sunk, sunk.load(SLOTS), "layer 1 of segment .* has a wrong checksum", first_wrong=1)


def test_no_room_for_a_fetch_fails_the_load(sunk: SunkRig) -> None:
    load = sunk.load(SLOTS)
    free_bytes = sunk.store.stats().largest_free_bytes
    taken = present(sunk.store.reserve([free_bytes]))
    assert_load_fails(sunk, load, "no room in DRAM", first_wrong=0)
    sunk.store.abort(taken)
    assert sunk.tier.num_holds == 0


def test_other_kv_of_the_same_tokens_is_not_decoded_as_what_was_leased(
    sunk: SunkRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody stored the tokens again, encoded in another way, between the lease and the fetch."""
    load = sunk.load(SLOTS)
    fetch = sunk.store.fetch

    def fetch_other(lease: Any, tails: Any) -> Any:
        (piece,) = fetch(lease, tails)
        other = ModelCodecs(SHAPE, NUM_LAYERS, None, CodecOptions(group_size=32))
        params = {**piece.header.codec_params, "group_size": 32}
        assert params != piece.header.codec_params
        other.open(params, start_token=0, num_tokens=NUM_TOKENS)
        return (replace(piece, header=replace(piece.header, codec_params=params)),)

    monkeypatch.setattr(sunk.store, "fetch", fetch_other)
    assert_load_fails(sunk, load, "were stored again since the lease", first_wrong=0)


def test_pages_that_ranks_do_not_agree_on_are_fetched_but_not_loaded(sunk: SunkRig) -> None:
    lease = present(sunk.store.lease(sunk.model, sunk.page_keys, sunk.token_ids))
    before = sunk.pool.copy()
    loader: LayerWiseLoader = sunk.loader
    assert loader.finish(loader.start({"r": make_load(lease, sunk.codec, SLOTS[:4])}))
    for layer, (new, old) in enumerate(zip(sunk.pool.copy(), before, strict=True)):
        assert torch.equal(new.k[4:], old.k[4:])
        assert torch.equal(new.k[:4], sunk.layers[layer].k[:4])


def test_a_link_holds_loads_to_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now_s = 100.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now_s

        @staticmethod
        def sleep(seconds: float) -> None:
            slept.append(seconds)

    monkeypatch.setattr(link, "time", Clock)
    slow = Link(2.0)
    slow.carry(1_000_000)
    # Behind the bytes before, of which half have passed.
    now_s = 100.25
    slow.carry(1_000_000)
    now_s = 200.0
    slow.carry(500_000)
    assert slept == pytest.approx([0.5, 0.75, 0.25])


class MeasuredLink(Link):
    """Counts what it carries, and takes no time."""

    num_carried = 0

    def carry(self, num_bytes: int) -> None:
        self.num_carried += num_bytes


@pytest.mark.parametrize(("pairs", "num_decoded"), [((), 0), (((0, 2),), 2)])
def test_what_is_decoded_is_timed_inside_of_its_layer(
    pairs: Sequence[tuple[int, int]], num_decoded: int
) -> None:
    rig = Rig(PATIENCE_S, pairs=pairs)
    index = rig.start(SLOTS)
    batch = rig.batch(index)
    assert rig.loader.finish(index)
    rig.close()
    decoded = [(times.begin(), times.end()) for times in batch.decode_times]
    layers = [(times.begin(), times.end()) for times in batch.load_times]
    assert len(decoded) == num_decoded
    for (begin_s, end_s), (first_s, last_s) in zip(decoded, [layers[0], layers[2]], strict=False):
        assert first_s <= begin_s < end_s <= last_s


@pytest.mark.parametrize("pairs", [(), ((0, 2),)])
def test_a_block_that_two_layers_need_passes_the_link_once(pairs: Sequence[tuple[int, int]]) -> None:
    rig, link = Rig(PATIENCE_S, pairs=pairs), MeasuredLink(1.0)
    loader = LayerWiseLoader(rig.store, rig.pool, rig.gate, PATIENCE_S, link)
    load = rig.load(SLOTS)
    num_stored = sum(load.lease.slices[0].header.layer_num_bytes)
    assert loader.finish(loader.start({"r": load}))
    loader.close()
    rig.close()
    assert link.num_carried == loader.counters.num_bytes == num_stored
