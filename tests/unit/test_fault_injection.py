"""Which loads are hit by injected faults, on which rank and layer."""

from __future__ import annotations

import pytest

from tests.support import server_plugin
from tests.support.server_plugin import STALL_S, FaultyLoads

NUM_LAYERS = 3


def hits(num_ranks: int) -> list[tuple[int, int, int]]:
    """``(load, rank, layer)`` of each fault in the first eight loads."""
    found = []
    for rank in range(num_ranks):
        faults = FaultyLoads("load-error", rank, num_ranks, NUM_LAYERS)
        for index in range(8):
            for layer in range(NUM_LAYERS):
                try:
                    faults.before_layer(index, layer)
                except OSError:
                    found.append((index, rank, layer))
    return sorted(found)


def test_every_second_load_fails_once_at_changing_layers() -> None:
    assert hits(1) == [(0, 0, 0), (2, 0, 1), (4, 0, 2), (6, 0, 0)]


def test_ranks_take_turns_and_every_second_load_is_spared_on_all() -> None:
    assert hits(2) == [(0, 0, 0), (2, 1, 1), (4, 0, 2), (6, 1, 0)]


@pytest.mark.parametrize(("patience_s", "stall_s"), [(None, STALL_S), (0.5, 1.5)])
def test_loads_stop_for_longer_than_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, patience_s: float | None, stall_s: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(server_plugin.time, "sleep", waits.append)
    faults = FaultyLoads("load-stall", 0, 1, NUM_LAYERS, patience_s)
    for index in range(4):
        for layer in range(NUM_LAYERS):
            faults.before_layer(index, layer)
    assert waits == [stall_s, stall_s]
