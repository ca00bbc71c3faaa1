"""Which loads are hit by injected faults, on which rank and layer."""

from __future__ import annotations

from krul_sglang.config import KrulConfig
from krul_sglang.engine.restore.loading import FaultInjection

NUM_LAYERS = 3


def hits(num_ranks: int, fault: str = "load-error") -> list[tuple[int, int, int]]:
    """``(load, rank, layer)`` of each fault in the first eight loads."""
    config = KrulConfig.from_mapping({"fault_injection": fault}, "test")
    found = []
    for rank in range(num_ranks):
        faults = FaultInjection(config, rank, num_ranks, NUM_LAYERS)
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


def test_without_a_fault_loads_run_as_always() -> None:
    assert hits(2, "none") == []
