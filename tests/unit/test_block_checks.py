"""Blocks are compared with their checksums before they are used: in DRAM, and while they arrive."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from krul_backend.device import Device
from krul_backend.errors import TierReadError
from krul_backend.tiers.common import interface, range_hashes
from krul_backend.tiers.common.interface import (
    FAILED,
    LANDED,
    PENDING,
    Block,
    LayerStatus,
    SegmentSlice,
    block_checksum,
    tail_is_right,
)
from krul_sglang.engine.restore import block_checks
from krul_sglang.engine.restore.block_checks import BlockChecks, DamagedBlockError, LayerBlock
from tests.support.engine_builders import PATIENCE_S, in_threads
from tests.support.segment_builders import END, NUM_LAYERS, lease_of, stored, whole_segments
from tests.support.strict_device import StrictDevice

CPU = Device(torch.device("cpu"))
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(StrictDevice(), id="strict")]
SHORT_S = 0.05
"""A deadline that passes soon; what is tested to pass it never comes."""


class Rig:
    def __init__(self, timeout_s: float = PATIENCE_S, device: Device = CPU) -> None:
        self.reported: list[int] = []
        end_s = time.monotonic() + timeout_s
        self.checks = BlockChecks(device, lambda: end_s, self.reported.append)

    def begin(self, blocks: Iterable[LayerBlock]) -> None:
        self.checks.announce(blocks)
        self.checks.start()

    def check(self, source: SegmentSlice, layer: int) -> None:
        self.begin([whole(source, layer)])
        self.checks.wait([whole(source, layer)])


def whole(source: SegmentSlice, layer: int) -> LayerBlock:
    return LayerBlock(source, layer, source.blocks[layer].nbytes)


@contextmanager
def rig_of(timeout_s: float = PATIENCE_S, device: Device = CPU) -> Iterator[Rig]:
    rig = Rig(timeout_s, device)
    with closing(rig.checks):
        yield rig


def in_dram() -> SegmentSlice:
    """The second segment of the conversation, in blocks of the test's own."""
    source = lease_of(whole_segments("coded"), 0).slices[1]
    return replace(source, blocks=tuple(block.copy() for block in source.blocks))


class Arrival:
    """A segment on its way: blocks of zeros until ``land``."""

    def __init__(self) -> None:
        self._stored = in_dram()
        self.flags = np.full(NUM_LAYERS, PENDING, np.uint8)
        self.source = replace(
            self._stored,
            tier="ssd",
            blocks=tuple(np.zeros_like(block) for block in self._stored.blocks),
            status=LayerStatus(self.flags),
        )

    def land(self, layer: int) -> None:
        self.source.blocks[layer][:] = self._stored.blocks[layer]
        self.flags[layer] = LANDED


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_are_right_pass(device: Device) -> None:
    source = in_dram()
    with rig_of(device=device) as rig:
        for layer in range(NUM_LAYERS):
            rig.check(source, layer)
        assert rig.reported == []


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_no_bytes_pass(device: Device) -> None:
    (source,) = lease_of((stored("native", 0, END, (END, END, 0, 0)),), 0).slices
    assert [block.nbytes == 0 for block in source.blocks] == [True, True, False, False]
    with rig_of(device=device) as rig:
        for layer in range(NUM_LAYERS):
            rig.check(source, layer)
        assert rig.reported == []
    with rig_of(device=device) as rig:
        rig.begin([whole(source, layer) for layer in range(NUM_LAYERS)])
        rig.checks.wait([whole(source, layer) for layer in range(NUM_LAYERS)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("byte", [0, 17, -1])
def test_a_damaged_block_is_an_error_and_reported(byte: int, device: Device) -> None:
    source = in_dram()
    source.blocks[2][byte] ^= 0x10
    with rig_of(device=device) as rig:
        for layer in (0, 1, 3):
            rig.check(source, layer)
        with pytest.raises(DamagedBlockError, match=r"layer 2 of segment 1 has a wrong checksum in dram"):
            rig.check(source, 2)
        # Whoever asks again is told again.
        with pytest.raises(DamagedBlockError):
            rig.checks.wait([whole(source, 2)])
    assert rig.reported == [1]


def test_a_block_is_hashed_once_and_in_the_order_of_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = in_dram(), replace(in_dram(), segment_id=7)
    names = {
        block.ctypes.data: (number, layer)
        for number, source in enumerate((first, second))
        for layer, block in enumerate(source.blocks)
    }
    hashed: list[tuple[int, int]] = []

    def recorded(block: Block, *args: Any) -> bool:
        hashed.append(names[block.ctypes.data])
        return tail_is_right(block, *args)

    monkeypatch.setattr(interface, "tail_is_right", recorded)
    with rig_of() as rig:
        for layer in (0, 2, 0):
            for source in (first, second):
                rig.begin([whole(source, layer)])
        for source in (first, second):
            rig.check(source, 2)
            rig.check(source, 0)
    assert hashed == [(0, 0), (1, 0), (0, 2), (1, 2)]


def test_a_layer_that_lands_late_is_waited_for() -> None:
    arrival = Arrival()
    with rig_of(device=StrictDevice()) as rig, in_threads() as start:
        for layer in range(NUM_LAYERS):
            rig.begin([whole(arrival.source, layer)])
        for layer in range(NUM_LAYERS):
            waiting = start(lambda layer=layer: rig.checks.wait([whole(arrival.source, layer)]))  # type: ignore[misc]
            # Cannot have ended, however long it takes: the bytes are not there.
            with pytest.raises(TimeoutError):
                waiting.result(SHORT_S)
            arrival.land(layer)
            waiting.result(PATIENCE_S / 2)
        assert rig.reported == []


def test_a_layer_that_cannot_be_read_is_an_error_but_no_damage() -> None:
    arrival = Arrival()
    arrival.land(0)
    arrival.flags[1] = FAILED
    with rig_of() as rig:
        rig.check(arrival.source, 0)
        with pytest.raises(TierReadError, match="layer 1 could not be read"):
            rig.check(arrival.source, 1)
        assert rig.reported == []


def test_a_layer_that_never_comes_is_given_up() -> None:
    arrival = Arrival()
    with rig_of(timeout_s=SHORT_S) as rig:
        with pytest.raises(TierReadError, match="layer 0 did not arrive from its tier in time"):
            rig.check(arrival.source, 0)
        # The next one may be there all the same.
        arrival.land(1)
        rig.check(arrival.source, 1)
        assert rig.reported == []


def test_bytes_that_landed_wrong_are_damage() -> None:
    arrival = Arrival()
    arrival.flags[3] = LANDED
    with rig_of() as rig:
        with pytest.raises(DamagedBlockError, match="in ssd"):
            rig.check(arrival.source, 3)
        assert rig.reported == [1]


def test_closing_neither_waits_nor_begins_what_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    arrival, other = Arrival(), Arrival()
    other.source = replace(other.source, segment_id=7)
    other.land(0)
    is_waiting = threading.Event()
    wait_for_layer = LayerStatus.wait_until

    def waiting(status: LayerStatus, layer: int, deadline_s: Callable[[], float]) -> None:
        is_waiting.set()
        wait_for_layer(status, layer, deadline_s)

    monkeypatch.setattr(LayerStatus, "wait_until", waiting)
    monkeypatch.setattr(block_checks, "_NUM_WAITING", 1)
    rig = Rig(device=StrictDevice())
    rig.begin([whole(arrival.source, 0)])
    rig.begin([whole(other.source, 0)])
    assert is_waiting.wait(PATIENCE_S)
    rig.checks.close()
    with pytest.raises(CancelledError):
        rig.checks.wait([whole(other.source, 0)])
    # The lease has ended: its bytes are somebody else's now, and no damage.
    arrival.flags[0] = LANDED
    with pytest.raises(DamagedBlockError):
        rig.checks.wait([whole(arrival.source, 0)])
    assert rig.reported == []


@pytest.mark.parametrize(("num_bytes", "error"), [(90, CancelledError), (100, DamagedBlockError)])
def test_closing_ends_what_compares_blocks_in_memory(
    num_bytes: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range that was begun is compared to its end, and nothing is reported."""
    source, other = in_short_ranges(100, 10), replace(in_dram(), segment_id=7)
    source.blocks[0][0] ^= 0x10
    has_begun, may_go_on = threading.Event(), threading.Event()

    def hash_late(start: int, num_bytes: int) -> int:
        has_begun.set()
        assert may_go_on.wait(PATIENCE_S)
        return range_hashes._xxh3_at(start, num_bytes)

    hash_with(monkeypatch, hash_late)
    monkeypatch.setattr(block_checks, "_NUM_THREADS", 1)
    rig = Rig(device=StrictDevice())
    block = LayerBlock(source, 0, num_bytes)
    rig.begin([block])
    rig.begin([whole(other, 0)])
    assert has_begun.wait(PATIENCE_S)
    rig.checks.close()
    may_go_on.set()
    with pytest.raises(error):
        rig.checks.wait([block])
    with pytest.raises(CancelledError):
        rig.checks.wait([whole(other, 0)])
    assert rig.reported == []


def test_on_a_cpu_the_thread_that_loads_checks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def recorded(block: Block, *args: Any) -> bool:
        threads.append(threading.current_thread())
        return tail_is_right(block, *args)

    monkeypatch.setattr(interface, "tail_is_right", recorded)
    with rig_of() as rig:
        rig.check(in_dram(), 0)
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_are_announced_together_fail_together(device: Device) -> None:
    first, damaged, last = (replace(in_dram(), segment_id=number) for number in (1, 2, 3))
    damaged.blocks[1][5] ^= 0x10
    with rig_of(device=device) as rig:
        for layer in (0, 1):
            rig.begin([whole(source, layer) for source in (first, damaged, last)])
        rig.checks.wait([whole(source, 0) for source in (first, damaged, last)])
        with pytest.raises(DamagedBlockError, match="layer 1 of segment 2"):
            rig.checks.wait([whole(last, 1)])
    assert rig.reported == [2]


def hash_with(monkeypatch: pytest.MonkeyPatch, xxh3: Callable[[int, int], int]) -> None:
    """Hash the ranges of blocks in memory with this function of an address and a number of bytes, and let
    threads take them one by one."""
    monkeypatch.setattr(range_hashes, "_BYTES_AT_ONCE", 0)
    find_wrong, _ = range_hashes._make_loops(xxh3, time.sleep)
    monkeypatch.setattr(range_hashes, "_loops", replace(range_hashes._loops, find_wrong=find_wrong))


@pytest.fixture
def eight_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(range_hashes, "_BYTES_AT_ONCE", 0)


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 2), (2, 2), (8, 4), (16, 8), (64, 8)])
def test_half_of_the_cores_compare(num_cores: int, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, names = threading.Barrier(num_threads), set[str]()

    def hash_together(start: int, num_bytes: int) -> int:
        name = threading.current_thread().name
        if name not in names:
            names.add(name)
            at_once.wait(PATIENCE_S)
        return range_hashes._xxh3_at(start, num_bytes)

    hash_with(monkeypatch, hash_together)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cores)))
    with rig_of(device=StrictDevice()) as rig:
        # As many ranges as threads: one for each.
        rig.check(in_short_ranges(num_threads * 10, 10), 0)
    assert len(names) == num_threads


@pytest.mark.usefixtures("eight_threads")
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("num_bytes", [1, 10, 35, 100, 1000])
def test_damage_anywhere_is_found_by_eight_threads(
    num_bytes: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of fewer ranges than threads, and of many more."""
    if is_compiled:
        range_hashes.compile_hashes()
    else:
        hash_with(monkeypatch, range_hashes._xxh3_at)
    sources = [
        replace(in_short_ranges(num_bytes, 10, num_layers=3), segment_id=number) for number in (1, 2, 3)
    ]
    layers = [[whole(source, layer) for source in sources] for layer in range(3)]
    for at in range(0, num_bytes, max(1, num_bytes // 100)):
        sources[1].blocks[1][at] ^= 0x10
        # The same segment again.
        sources[1].blocks[2][at] ^= 0x10
        with rig_of(device=StrictDevice()) as rig:
            rig.begin(every := [block for blocks in layers for block in blocks])
            rig.checks.wait(layers[0])
            rig.checks.wait(layers[1][:1])
            for blocks in (layers[1], layers[1][1:2], layers[2]):
                with pytest.raises(
                    DamagedBlockError, match="layer 1 of segment 2 has a wrong checksum in dram"
                ):
                    rig.checks.wait(blocks)
            assert all(checks.have_ended(end) for checks, end in rig.checks._ends(every).items())
            assert rig.reported == [2]
        for layer in (1, 2):
            sources[1].blocks[layer][at] ^= 0x10


@pytest.mark.usefixtures("eight_threads")
def test_layers_become_ready_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads compare the first layer first, and nobody waits for those after it."""
    source = in_short_ranges(200, 10, num_layers=3)
    layer_of = {
        block.ctypes.data + at: layer
        for layer, block in enumerate(source.blocks)
        for at in range(0, block.nbytes, 10)
    }
    may_go_on = [threading.Event() for _ in range(3)]
    hashed = list[int]()

    def hash_in_turn(start: int, num_bytes: int) -> int:
        layer = layer_of[int(start)]
        hashed.append(layer)
        assert may_go_on[layer].wait(PATIENCE_S)
        return range_hashes._xxh3_at(start, num_bytes)

    hash_with(monkeypatch, hash_in_turn)
    with rig_of(device=StrictDevice()) as rig, in_threads() as start:
        blocks = [whole(source, layer) for layer in range(3)]
        rig.begin(blocks)
        for layer in range(3):
            waiting = start(lambda layer=layer: rig.checks.wait(blocks[: layer + 1]))  # type: ignore[misc]
            with pytest.raises(TimeoutError):
                waiting.result(SHORT_S)
            assert not rig.checks.are_right(blocks[layer : layer + 1])
            assert max(hashed, default=0) <= layer
            may_go_on[layer].set()
            waiting.result(PATIENCE_S / 2)
        assert rig.checks.are_right(blocks)


@pytest.mark.parametrize(("device", "wants"), [(CPU, "000000"), (StrictDevice(), "110101")])
def test_layers_are_announced_until_they_have_many_blocks(device: Device, wants: str) -> None:
    """On a CPU a layer is checked when it is needed. Elsewhere layers of few blocks are announced at once."""
    source, found = in_dram(), list[bool]()
    with rig_of(device=device) as rig:
        for num_blocks, num_ahead in ((0, 0), (255, 1), (256, 2)):
            rig.checks.announce(whole(replace(source, segment_id=number), 0) for number in range(num_blocks))
            found.append(rig.checks.want_more(num_ahead))
        rig.checks.start()
        rig.checks.wait([whole(replace(source, segment_id=255), 0)])
        found += [rig.checks.want_more(num_ahead) for num_ahead in (7, 8, 0)]
    assert found == [want == "1" for want in wants]


def in_short_ranges(num_bytes: int, range_bytes: int, num_layers: int = 1) -> SegmentSlice:
    """A segment whose blocks have many ranges."""
    source = lease_of(whole_segments("native"), 0).slices[0]
    random = np.random.default_rng(1)
    blocks = tuple(random.integers(0, 256, num_bytes, dtype=np.uint8) for _ in range(num_layers))
    return replace(
        source,
        header=replace(source.header, range_bytes=range_bytes),
        blocks=blocks,
        checksums=tuple(block_checksum(block, range_bytes) for block in blocks),
    )


@pytest.mark.parametrize(("num_bytes", "first_checked"), [(1, 90), (10, 90), (11, 80), (95, 0), (105, 0)])
@pytest.mark.parametrize("device", DEVICES)
def test_only_the_ranges_that_are_read_are_checked(
    num_bytes: int, first_checked: int, device: Device
) -> None:
    """Damage before them fails nothing; any damage in them does, also in the part that is not used."""
    source = in_short_ranges(100, 10)
    for at in range(100):
        source.blocks[0][at] ^= 0x10
        with rig_of(device=device) as rig:
            block = LayerBlock(source, 0, min(num_bytes, 100))
            rig.begin([block])
            if at < first_checked:
                rig.checks.wait([block])
            else:
                with pytest.raises(DamagedBlockError):
                    rig.checks.wait([block])
            assert rig.reported == ([source.segment_id] if at >= first_checked else [])
        source.blocks[0][at] ^= 0x10


def test_a_load_that_reads_more_of_a_block_checks_it_again() -> None:
    """Two loads of one batch may read the same block from different tokens on."""
    source = in_short_ranges(100, 10)
    source.blocks[0][35] ^= 0x10
    few, many = (LayerBlock(source, 0, num_bytes) for num_bytes in (40, 70))
    with rig_of() as rig:
        rig.begin([few])
        rig.begin([many])
        rig.checks.wait([few])
        with pytest.raises(DamagedBlockError):
            rig.checks.wait([many])
