"""The rows of ``benchmarks.overlap``: what they say of turns that came back, and of the best ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overlap
from benchmarks.overlap import (
    METHODS,
    Returned,
    Setting,
    _as_dict,
    _computed_mbs,
    _rows,
    overlap_summary,
    overlap_tables,
    run,
)
from benchmarks.pages import MEASURED
from benchmarks.planners import COMPARED
from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.simulate import hardware
from benchmarks.tables import RESULTS
from krul_backend.planner.planners import PLANNERS
from krul_sglang.cli.timed_answer import TurnResult
from krul_sglang.config import KrulConfig
from krul_sglang.traced_restore import TracedRestore

RECORDED: dict[str, Any] = {
    "requests": [
        {"rid": "a", "device_tokens": 0, "restored_tokens": 64, "head_ends": [48, 32, 0], "planned_s": 0.9}
    ],
    "is_mixed": False,
    "was_rescued": False,
    "end_s": 1.0,
    "streams": {
        "load": [[0, 0.0, 0.5], [1, 0.5, 0.75], [2, 0.75, 0.9]],
        "head": [[0, 0.0, 0.4], [1, 0.4, 0.6]],
        "wait": [[0, 0.6, 0.61]],
        "own": [[0, 0.61, 0.71]],
    },
}
SSD = Setting("ssd", 40.0)


def returned(ttft_s: float, restore: TracedRestore | None = None, tokens: int = 64) -> Returned:
    turn = TurnResult("c", 2, 70, 0, 64, 4, ttft_s, ttft_s + 1, "text")
    return Returned(tokens, (turn,), restore, 1010 if restore else 0, 1000 if restore else 0)


def rows() -> list[dict[str, Any]]:
    restore = TracedRestore.parse(RECORDED, index=0, rank=0)
    return _rows(
        SSD,
        {
            "recompute": [returned(3.0), returned(5.0), returned(3.0)],
            "full-load": [returned(1.5, restore)],
            "native-planned": [returned(1.25, restore), returned(0.75, restore), returned(1.0, restore)],
        },
    )


def test_rows_compare_with_the_medians_of_computing_and_of_loading_all() -> None:
    of = {row["method"]: row for row in rows()}
    planned = of["native-planned"]
    assert planned["times_sooner_than"] == {"recompute": 3.0, "full-load": 1.5}
    assert planned["ideal_s"] == pytest.approx(1 / (1 / 3 + 1 / 1.5))
    assert planned["ttft_s"]["max"] == 1.25
    assert (planned["bytes_read"], planned["bytes_planned"], planned["head_tokens"]) == (1010, 1000, 48)
    assert (planned["predicted_s"], planned["measured_s"]) == (0.9, 1.0)
    assert planned["link_busy"] == pytest.approx(0.9)
    assert planned["compute_busy"] == pytest.approx(0.7)
    assert of["recompute"]["predicted_s"] is None


def test_tables_have_a_line_for_each_row_and_the_readme_three_of_them() -> None:
    result = {
        "configuration": {
            "model_path": "models/small",
            "dtype": "float32",
            "history_tokens": [64],
            "settings": [{"tier": "ssd", "mbs": 40.0}],
        },
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"sglang": "0"},
        "duration_s": 60.0,
        "rows": rows(),
    }
    shown = overlap_tables(result, RESULTS / "overlap-cpu.json")
    assert "**small in float32, from an SSD that reads 40 MB/s:**" in shown
    assert "| native-planned | 64 | 1 | 1000 ms | 1250 ms | 3.00 | 1.50 | 1000 ms | 900 ms |" in shown
    summary = overlap_summary(result, RESULTS / "overlap-cpu.json")
    assert "| a disk, heads computed while tails load | 1000 ms | 3.00 | 0.0 MB |" in summary
    assert summary.count("| a disk, ") == 3


def test_the_restore_that_is_kept_can_be_drawn_again() -> None:
    restore = TracedRestore.parse(RECORDED, index=0, rank=0)
    kept = _as_dict(restore)
    assert kept["requests"][0]["rid"] == ""
    again = TracedRestore.parse(kept, index=0, rank=0)
    assert (again.loads, again.heads, again.head_tokens(1)) == (restore.loads, restore.heads, 32)


def test_settings_name_a_tier_and_a_rate() -> None:
    assert Setting.parse("dram:12.5") == Setting("dram", 12.5)
    for text in ("tape:1", "ssd", "ssd:fast", "ssd:x", "dram:x0", "dram:-1", "dram:inf"):
        with pytest.raises(ServingBenchmarkError, match="--settings"):
            Setting.parse(text)


def test_a_ratio_becomes_a_rate_when_computing_has_been_measured() -> None:
    """64 tokens of 1 MB each: computed in 1, 2 and 4 s at 64, 32 and 16 MB/s; two users do not count."""
    alone = [returned(1.0), returned(2.0), returned(4.0)]
    together = replace(alone[0], turns=alone[0].turns * 2)
    computed_mbs = _computed_mbs([*alone, together], 1_000_000)
    assert computed_mbs == pytest.approx(32.0)
    setting = Setting.parse("dram:x0.5")
    assert setting.at(computed_mbs) == Setting("dram", 64.0, 0.5)
    assert Setting.parse("dram:40").at(computed_mbs) == Setting("dram", 40.0)


@pytest.mark.parametrize("asked", [["dram:x0.5", "dram:x2"], ["dram:40", "dram:x2"]])
def test_computing_is_measured_once_for_all_ratios(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    made: list[tuple[str, float]] = []
    base = Configuration(
        model_path=Path("model"), history_tokens=(64,), rounds=2, dtype="float32", max_tokens=4
    )

    def make(method: str, setting: Setting, *others: Any) -> Any:
        made.append((method, setting.mbs))
        return method

    monkeypatch.setattr(overlap.planners, "register", lambda: None)
    monkeypatch.setattr(overlap, "load_token_encoder", lambda path: (lambda messages: [0], 100))
    monkeypatch.setattr(overlap, "generated_conversation", lambda *given: ())
    monkeypatch.setattr(overlap, "plan_pools", lambda *given, **named: None)
    monkeypatch.setattr(overlap, "kv_token_bytes", lambda configuration: 1_000_000)
    monkeypatch.setattr(overlap, "_make", make)
    monkeypatch.setattr(overlap, "_play", lambda *given: [returned(2.0)])
    result = run(base, list(map(Setting.parse, asked)), ["recompute", "full-load"], 64)
    rates = [64.0 if each == "dram:x0.5" else 16.0 if each == "dram:x2" else 40.0 for each in asked]
    assert [setting["mbs"] for setting in result["configuration"]["settings"]] == rates
    # First that of the ratios, then each rate; a rate that was given has its own.
    assert made.count(("recompute", 40.0)) == asked.count("dram:40")
    assert [name for name, _ in made].count("recompute") == 1 + asked.count("dram:40")
    assert [mbs for name, mbs in made if name == "full-load"] == rates
    assert [(row["method"], row["mbs"]) for row in result["rows"]] == [
        (method, mbs) for mbs in rates for method in ("recompute", "full-load")
    ]


def test_the_page_shows_the_ratios_of_published_machines() -> None:
    page = MEASURED.read_text()
    for model, gpu, link in hardware.MACHINES:
        name = model.name.partition(" (")[0].partition(",")[0]
        shown = f"| {name} | {gpu.name} | {link.name} | {hardware.load_ratio(gpu, link, model):.2f} |"
        assert shown in page


@pytest.mark.parametrize("method", METHODS)
def test_the_options_of_each_method_are_krul_s(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, planner in COMPARED.items():
        monkeypatch.setitem(PLANNERS, name, planner)
    assert KrulConfig.from_mapping({"link_mbs": 40.0, **METHODS[method]}, method).link_mbs == 40
