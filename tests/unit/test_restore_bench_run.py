"""The restore benchmark as a whole: checked restores, complete rows, and checks that notice wrong ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import orjson
import pytest
import torch

from benchmarks.figures.restore import draw
from benchmarks.pages.tables import restore_table
from benchmarks.restore.__main__ import run
from benchmarks.restore.configuration import (
    Configuration,
    RestoreBenchmarkError,
    TierSpec,
    WrongRestoreError,
)
from benchmarks.restore.restorer import Measured
from benchmarks.restore.rows import longest, settings, summarize, tier_name
from benchmarks.restore.setting import (
    METHODS,
    Checks,
    median_sample,
    relative_error,
    restore_problem,
    row,
    spread,
)
from benchmarks.simulate.pipeline import simulate
from krul_backend.planner.interface import ComputeCost, RestoreCosts, RestorePlan, TierCost
from krul_backend.planner.planners import make_planner
from krul_sglang.json_file import write_summary
from tests.support.restore_bench_builders import SHAPE, Bench, bench

TOLERANCE = 1e-3


@pytest.fixture
def built() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Two histories of the smallest shape, one tier as fast as it is and one that hardly moves."""
    return run(
        Configuration(
            shapes=("reference",),
            tiers=(TierSpec("dram"), TierSpec("dram", 1e-3)),
            history_tokens=(64, 256),
            new_tokens=8,
            turns=2,
            repeats=1,
            dtype="bfloat16",
            max_load_s=0.5,
        )
    )


def plan(*head_ends: int, is_recompute: bool = False) -> RestorePlan:
    return RestorePlan(head_ends, 1.0, is_recompute)


def checks(built: Bench, tolerance: float = TOLERANCE) -> Checks:
    return Checks(built.restorer, built.turn, built.history, tolerance)


@pytest.mark.parametrize(
    "chosen",
    [
        plan(0, 0, 0, 0),
        plan(256, 192, 64, 0),
        plan(192, 192, 192, 192),
        plan(256, 256, 256, 256),
        plan(256, 256, 256, 256, is_recompute=True),
    ],
)
def test_a_native_restore_gives_the_logits_of_recomputing(built: Bench, chosen: RestorePlan) -> None:
    stored = built.stored["native"]
    measured = built.restorer.run(built.turn, chosen, stored, built.tier)
    torch.testing.assert_close(measured.logits, built.logits, atol=1e-4, rtol=1e-4)
    assert measured.bytes_loaded == (0 if chosen.is_recompute else stored.tail_bytes(chosen.head_ends))
    assert len(measured.own) == SHAPE.num_layers
    assert 0 < measured.own[0][0] < measured.length_s <= measured.ttft_s
    for layer, (load, own) in enumerate(zip(measured.loads, measured.own, strict=False)):
        assert load[1] <= own[0], f"layer {layer} ran before it was loaded"


@pytest.mark.parametrize("strategy", ["minicache", "krul", "krul-int4"])
def test_a_lossy_restore_gives_what_its_decoded_tails_give(built: Bench, strategy: str) -> None:
    chosen, stored = plan(256, 192, 64, 0), built.stored[strategy]
    expected = checks(built).expected(stored, chosen.head_ends)
    measured = built.restorer.run(built.turn, chosen, stored, built.tier)
    assert checks(built).check(strategy, measured, expected) < TOLERANCE
    with pytest.raises(WrongRestoreError, match=strategy):
        checks(built).check(strategy, measured, built.logits)


def test_the_check_notices_a_restore_without_its_head(built: Bench) -> None:
    native = built.stored["native"]
    error = checks(built).without_head(built.loader, native, built.tier, built.logits)
    assert error > 3 * TOLERANCE
    with pytest.raises(WrongRestoreError, match="without its head"):
        checks(built, tolerance=error).without_head(built.loader, native, built.tier, built.logits)


def test_nan_is_no_small_error(built: Bench) -> None:
    measured = built.restorer.run(built.turn, plan(0, 0, 0, 0), built.stored["native"], built.tier)
    broken = replace(measured, logits=measured.logits * float("nan"))
    with pytest.raises(WrongRestoreError, match="nan"):
        checks(built).check("broken", broken, built.logits)


def test_relative_error_is_the_norm_of_the_difference() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def sample(ttft_s: float, spans: Sequence[tuple[float, float]]) -> Measured:
    return Measured(ttft_s, (), tuple(spans), ((ttft_s / 2, ttft_s),), 100, torch.zeros(1))


def test_a_row_has_medians_of_its_samples() -> None:
    samples = [sample(seconds, [(0.0, seconds / 4)]) for seconds in (4.0, 1.0, 2.0)]
    of_method = row(METHODS[4], plan(2, 1), samples, bytes_stored=100, relative_error=0.5)
    assert of_method["method"] == "native-planned"
    assert of_method["chosen"] == "restore"
    assert of_method["ttft_s"] == {"median": 2.0, "min": 1.0, "p90": 4.0, "n": 3, "samples": [4.0, 1.0, 2.0]}
    assert of_method["ideal_s"] == of_method["compute_s"] == 1.0
    assert of_method["load_s"] == 0.5
    assert (of_method["compute_busy"], of_method["load_busy"]) == (0.5, 0.25)
    assert (of_method["head_tokens"], of_method["head_ends"]) == (3, [2, 1])
    assert median_sample(samples) is samples[2]


def test_a_recomputed_row_has_no_head() -> None:
    chosen = plan(5, 5, is_recompute=True)
    of_method = row(METHODS[0], chosen, [sample(1.0, [])], bytes_stored=0, relative_error=0.0)
    assert (of_method["chosen"], of_method["head_tokens"], of_method["head_ends"]) == ("recompute", 0, None)


def test_the_90th_percentile_is_a_sample() -> None:
    assert spread([float(number) for number in range(1, 11)])["p90"] == 9.0
    assert spread([float(number) for number in range(1, 6)])["p90"] == 5.0
    assert spread([1.0])["p90"] == 1.0


def test_a_run_has_a_row_for_every_method_and_setting(result: dict[str, Any]) -> None:
    places = {(row["bandwidth_gbs"], row["history_tokens"]) for row in result["rows"]}
    # 64 tokens of 6 KiB take 0.4 s at 1 MB/s, 256 more than the half second that is allowed
    assert places == {(None, 64), (None, 256), (1e-3, 64)}
    assert [(each["bandwidth_gbs"], each["history_tokens"]) for each in result["left_out"]] == [(1e-3, 256)]
    assert len(result["rows"]) == len(places) * len(METHODS)
    by_setting = settings(result["rows"])
    assert list(by_setting) == [("reference", "dram"), ("reference", "dram at 1 MB/s")]
    for of_setting in by_setting.values():
        assert [row["method"] for row in longest(of_setting)] == [method.name for method in METHODS]


def test_rows_of_a_run_are_consistent(result: dict[str, Any]) -> None:
    token_bytes = result["models"][0]["pool_bytes_per_token"]
    for of_method in result["rows"]:
        assert of_method["ttft_s"]["n"] == 1
        assert of_method["bytes_loaded"] == of_method["bytes_stored"]
        assert of_method["relative_error"] <= result["models"][0]["tolerance"]
        assert (of_method["chosen"] == "recompute") == (of_method["head_ends"] is None)
        full_bytes = of_method["history_tokens"] * token_bytes
        if of_method["method"] == "full-load":
            assert of_method["bytes_loaded"] == full_bytes
        elif of_method["chosen"] == "recompute":
            assert of_method["bytes_loaded"] == 0
        else:
            assert of_method["bytes_loaded"] <= full_bytes
        assert ("timeline" in of_method) == (of_method["history_tokens"] == 256)


def test_a_limited_tier_is_never_faster_than_its_limit(result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if tier_name(row) == "dram at 1 MB/s"]
    for of_method in rows:
        assert min(of_method["ttft_s"]["samples"]) >= of_method["bytes_loaded"] / 1e6


@pytest.mark.parametrize(("byte_s", "chosen"), [(1e-12, "load"), (1e-7, "both"), (1e-3, "recompute")])
def test_the_problem_that_is_planned_is_that_of_the_stored_bytes(
    built: Bench, byte_s: float, chosen: str
) -> None:
    stored = built.stored["krul"]
    compute = ComputeCost(launch_s=1e-4, token_s=1e-5, context_s=0.0)
    costs = RestoreCosts(compute, compute, {"dram": TierCost(latency_s=0.0, byte_s=byte_s)})
    problem = restore_problem(stored, built.turn, "dram", costs, (0.0,) * SHAPE.num_layers, page_size=64)
    planned = make_planner("local-search").plan(problem)
    assert planned.is_recompute == (chosen == "recompute")
    assert (sum(planned.head_ends) == 0) == (chosen == "load")
    if chosen == "load":
        assert simulate(problem, planned.head_ends).bytes_loaded == stored.tail_bytes(planned.head_ends)


def test_the_table_compares_with_full_recompute(result: dict[str, Any]) -> None:
    lines = restore_table(result).splitlines()
    assert lines[0] == "| restored by | dram, 256 tokens | dram at 1 MB/s, 64 tokens |"
    assert [line.split(" | ")[0] for line in lines[2:10]] == [f"| {method.name}" for method in METHODS]
    rows = [row for row in result["rows"] if row["history_tokens"] == 256]
    recompute_s, load_s = (rows[number]["ttft_s"]["median"] for number in (0, 1))
    assert lines[2].split(" | ")[1] == f"{recompute_s * 1000:.0f} ms, recomputes"
    full_load = f"{load_s * 1000:.0f} ms ({recompute_s / load_s:.2f}x), 1.5 MiB"
    assert lines[3].split(" | ")[1] == full_load


def test_a_summary_has_the_same_table_and_no_samples(result: dict[str, Any]) -> None:
    kept = summarize(result)
    assert restore_table(kept) == restore_table(result)
    assert len(kept["rows"]) == len(result["rows"])
    assert all(set(row["ttft_s"]) == {"median", "min", "p90", "n"} for row in kept["rows"])
    assert kept["models"][0]["calibration"]["head"]["samples"]["n"] > 0
    # The limited tier has one length, whose restores were not recorded; so those of memory are drawn.
    timelines = [row for row in kept["rows"] if "timeline" in row]
    assert timelines
    assert {(row["tier"], row["history_tokens"], row["chosen"]) for row in timelines} == {
        ("dram", 256, "restore")
    }


def test_figures_are_drawn_of_what_was_measured(result: dict[str, Any], tmp_path: Path) -> None:
    write_summary(summarize(result), tmp_path / "result.json")
    draw(orjson.loads((tmp_path / "result.json").read_bytes()), tmp_path / "figures")
    drawn = {path.name: plt.imread(path) for path in (tmp_path / "figures").iterdir()}
    # two lengths are too few for the figure against the length
    assert set(drawn) == {"restore-ttft.png", "restore-timeline.png"}
    assert all(image.std() > 0.01 for image in drawn.values())


def test_options_that_measure_nothing() -> None:
    for wrong, message in (
        ({"shapes": ("tiny",)}, "unknown"),
        ({"history_tokens": (100,)}, "whole pages"),
        ({"repeats": 0}, "repeats"),
        ({"new_tokens": 0}, "new_tokens"),
    ):
        with pytest.raises(RestoreBenchmarkError, match=message):
            Configuration(**wrong)  # type: ignore[arg-type]
