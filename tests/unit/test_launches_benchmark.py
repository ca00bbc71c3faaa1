"""Counts of launches and waits on a tiny model: a launch per layer or a wait more is noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.launches.__main__ import rows_of
from benchmarks.launches.counter import DEVICE, DeviceTensor, LaunchCounter, counting
from benchmarks.launches.operations import Shape
from krul_backend.device import Device

NUM_LAYERS = 4
TINY = Shape("tiny", NUM_LAYERS, 4, 2, 16)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["operation"]: row for row in rows_of(TINY, 100)}


@pytest.mark.parametrize("operation", ["save native", "restore native", "restore subspace"])
def test_the_host_waits_once(rows: dict[str, dict[str, Any]], operation: str) -> None:
    assert rows[operation]["syncs"] == 1


def test_native_turns_take_few_launches_per_layer(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["save native"]["launches"] <= 2 * NUM_LAYERS + 1
    assert rows["restore native"]["launches"] <= 2 * NUM_LAYERS + 2


def test_turns_in_bases_take_few_launches_and_no_wait_per_layer(rows: dict[str, dict[str, Any]]) -> None:
    # Of each layer three copies of the block and one kernel, its keys for the statistics; the rest is once.
    assert rows["save subspace"]["launches"] <= 5 * NUM_LAYERS + 100
    assert rows["save subspace"]["syncs"] <= 3
    # A group is of two layers: a copy of its block, and a kernel for each. Of both groups at once: their
    # tables, their coefficients, and what was damaged.
    assert rows["restore subspace"]["launches"] == 1.5 * NUM_LAYERS + 4


def test_a_decode_step_launches_nothing_unless_queries_are_kept(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["decode step, nothing kept"]["launches"] == 0
    # The tokens that are kept, one copy per layer, where the rows go, and no tokens from then on.
    assert rows["decode step, queries kept"]["launches"] == NUM_LAYERS + 3
    assert rows["decode step, in a CUDA graph"]["launches"] == NUM_LAYERS
    for name in rows:
        assert rows[name]["syncs"] == 0 or "decode step" not in name


def test_nothing_is_waited_for_while_attention_is_measured(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["statistics"]["syncs"] == 0
    assert rows["statistics"]["launches"] <= NUM_LAYERS + 23


def test_heads_take_one_launch_per_layer(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["head recompute"]["launches"] <= NUM_LAYERS + 3
    assert rows["head recompute"]["syncs"] == 0


def test_copies_are_those_of_the_turn(rows: dict[str, dict[str, Any]]) -> None:
    turn_bytes = 100 * NUM_LAYERS * 2 * 2 * 16 * 2
    for operation in ("save native", "restore native"):
        # And where its rows lie.
        assert turn_bytes < rows[operation]["bytes_copied"] < 1.1 * turn_bytes


@pytest.fixture
def counter() -> Any:
    with counting() as counter:
        yield counter


def test_launches_are_operations_but_not_views(counter: LaunchCounter) -> None:
    x = counter.on_device(torch.arange(12.0).view(3, 4))
    assert isinstance(torch.empty_like(x[1:].flatten()), DeviceTensor)
    assert counter.launches.total() == 0
    x[1:].mul_(2)
    assert counter.launches.total() == 1
    assert torch.equal(x.held[2], torch.tensor([16.0, 18, 20, 22]))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x.sum()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: torch.ones(3).to(DEVICE),
        lambda x: x[torch.tensor([1])],
        lambda x: Device.of(x.mul_(2)).synchronize(Device.of(x).new_stream()),
    ],
)
def test_waits_of_the_host_are_counted(counter: LaunchCounter, wait: Any) -> None:
    wait(counter.on_device(torch.ones(3)))
    assert counter.syncs.total() == 1


def test_a_stream_without_work_is_not_waited_for(counter: LaunchCounter) -> None:
    device = Device.of(counter.on_device(torch.ones(3)).mul_(2))
    for _ in range(2):
        device.synchronize(device.new_stream())
    assert counter.syncs.total() == 1


def test_a_copy_through_locked_memory_is_no_wait(counter: LaunchCounter) -> None:
    device = Device(DEVICE)
    on_device = device.from_list([1, 2, 3])
    host = device.host_empty((3,), torch.int64)
    device.download(host, on_device)
    assert host.tolist() == [1, 2, 3]
    assert (counter.launches.total(), counter.syncs.total(), counter.bytes_copied) == (2, 0, 48)


def test_tensors_of_host_and_device_do_not_mix(counter: LaunchCounter) -> None:
    with pytest.raises(RuntimeError, match="of the device and of the host"):
        counter.on_device(torch.ones(3)) + torch.ones(3)


def test_the_peak_is_what_was_taken_at_a_time(counter: LaunchCounter) -> None:
    x = counter.on_device(torch.ones(256))
    counter.reset()
    for _ in range(3):
        y = x + 1
        del y
    assert counter.peak_bytes == 1024
