from __future__ import annotations

import logging
from pathlib import Path

import orjson
import pytest

from krul_backend.planner.calibration import FORMAT, load_costs, save_costs
from krul_backend.planner.interface import ComputeCost, RestoreCosts, TierCost

COSTS = RestoreCosts(
    ComputeCost(4e-5, 2.5e-6, 1.2e-10, 3e-8), ComputeCost(0.0, 1.0, 2.0), {"host": TierCost(3e-5, 1 / 22e9)}
)
OTHER = RestoreCosts(COSTS.own, COSTS.head, {})


def test_costs_come_back_for_their_model_and_device_only(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert load_costs(path, "model", "GPU A") is None
    save_costs(path, "model", "GPU A", COSTS)
    save_costs(path, "model", "GPU B", OTHER)
    assert load_costs(path, "model", "GPU A") == COSTS
    assert load_costs(path, "model", "GPU B") == OTHER
    assert load_costs(path, "other model", "GPU A") is None
    assert [each.name for each in tmp_path.iterdir()] == ["costs.json"]


def test_newer_costs_replace_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, "model", "GPU", COSTS)
    save_costs(path, "model", "GPU", OTHER)
    assert load_costs(path, "model", "GPU") == OTHER


FOREIGN = [
    b"",
    b"{",
    b"[1]",
    b'{"format": "krul sensitivity 1"}',
    orjson.dumps({"format": FORMAT, "costs": 3}),
]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_foreign_file_is_ignored_with_one_warning_and_left_alone(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert load_costs(path, "model", "GPU") is None
    assert len(caplog.records) == 1
    assert "costs.json" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        save_costs(path, "model", "GPU", COSTS)
    assert len(caplog.records) == 1
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        {},
        {"head": {}, "own": {}, "tiers": {}},
        {"head": {"launch_s": -1, "token_s": 1, "context_s": 1, "past_s": 1}},
        {"head": {"launch_s": "1", "token_s": 1, "context_s": 1, "past_s": 1}},
        {"head": {"launch_s": 1, "token_s": 1, "context_s": 1, "past_s": 1, "extra": 1}},
        # As it was written before a past had a cost: measured again.
        {"head": {"launch_s": 1, "token_s": 1, "context_s": 1}},
        {"tiers": {"host": 5}},
        {"tiers": []},
    ],
)
def test_a_damaged_entry_is_ignored_with_one_warning(
    entry: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, "model", "GPU", COSTS)
    content = orjson.loads(path.read_bytes())
    if isinstance(entry, dict) and entry:
        content["costs"]["model GPU"] |= entry
    else:
        content["costs"]["model GPU"] = entry
    path.write_bytes(orjson.dumps(content))
    with caplog.at_level(logging.WARNING):
        assert load_costs(path, "model", "GPU") is None
    assert len(caplog.records) == (entry is not None)
