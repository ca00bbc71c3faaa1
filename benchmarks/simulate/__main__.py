"""``python -m benchmarks.simulate --json FILE [--raw FILE]``: planned restores on published hardware."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import runner
from benchmarks.planners import ALL_PLANNERS
from benchmarks.runner import Result
from benchmarks.simulate import hardware
from benchmarks.simulate.codecs import Codec, decode_token_s, last_use, layer_token_bytes, make_codecs
from benchmarks.simulate.oracle.optimal import OptimalPlanner
from benchmarks.simulate.pipeline import simulate
from benchmarks.simulate.summary import summarize
from benchmarks.tables import Columns, cell, source, table_of
from krul_backend.planner.interface import DecodeCost, RestorePlan, RestorePlanner, RestoreProblem, StoredRun
from krul_backend.planner.planners import LocalSearchPlanner
from krul_sglang.sizing import on_paper
from krul_sglang.sizing.on_paper import Gpu, Link, Model, restore_costs

PAGE_SIZE = 16
HISTORY_TOKENS = (1024, 2048, 4096, 8192, 32768, 131072)
NEW_TOKENS = (128, 1024)
PLANNED = LocalSearchPlanner.name

METHODS: Mapping[str, Sequence[str]] = {
    "native": tuple(ALL_PLANNERS),
    "minicache": ("full-load", PLANNED),
    "krul": ("full-load", "uniform", "pyramid", PLANNED),
    "krul-int4": ("full-load", PLANNED),
}
"""Planners per codec; recomputing does not depend on the codec."""
CLEARLY = 1.01
"""A way to restore wins alone if the planned mixture is not faster by more than this."""

# The map: rates of one link to one GPU, in GB/s.
MAP_RATES_GB_S = (0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
MAP_HISTORY_TOKENS = tuple(1024 << power for power in range(8))
MAP_MODELS = (hardware.LLAMA_7B, hardware.LLAMA3_8B)
MAP_CODECS = ("native", "krul-int4")
PLAN_REPEATS = 3
"""Planning is timed so often; the shortest time counts."""

_Planned = TypeVar("_Planned")


def run() -> dict[str, Any]:
    """A summary of all settings, the map, and the rows behind the summary."""
    rows = list(_rows(ALL_PLANNERS))
    return {
        "configuration": {
            "page_size": PAGE_SIZE,
            "matmul_share": on_paper.MATMUL_SHARE,
            "attention_share": on_paper.ATTENTION_SHARE,
            "hbm_share": on_paper.HBM_SHARE,
            "layer_launch_s": on_paper.LAYER_LAUNCH_S,
            "models": [asdict(model) for model in hardware.MODELS],
            "platforms": [{"gpu": asdict(gpu), "link": asdict(link)} for gpu, link in hardware.PLATFORMS],
        },
        "summary": summarize(rows, PLANNED),
        "map": list(_map(ALL_PLANNERS)),
        "rows": rows,
    }


def make_problem(
    gpu: Gpu, link: Link, model: Model, codec: Codec, history_tokens: int, new_tokens: int
) -> RestoreProblem:
    """The whole history is one segment behind ``link``, nothing of it is on the device."""
    return RestoreProblem(
        num_layers=model.num_layers,
        page_size=PAGE_SIZE,
        device_tokens=0,
        total_tokens=history_tokens,
        new_tokens=new_tokens,
        runs=(
            StoredRun(
                tier=link.name,
                first_token=0,
                end_token=history_tokens,
                layer_token_bytes=layer_token_bytes(codec, model),
                decode=tuple(DecodeCost(0.0, token_s) for token_s in decode_token_s(codec, model, gpu)),
                last_use=last_use(codec, model.num_layers),
                stored_from=(0,) * model.num_layers,
            ),
        ),
        costs=restore_costs(gpu, link, model),
    )


def winner(ends_s: Mapping[str, float]) -> str:
    """``recompute``, ``load``, or ``both`` if only the planned mixture is clearly the fastest."""
    alone = {"recompute": ends_s["full-recompute"], "load": ends_s["full-load"]}
    best = min(alone, key=lambda name: alone[name])
    return best if alone[best] <= CLEARLY * ends_s[PLANNED] else "both"


def _rows(planners: Mapping[str, RestorePlanner]) -> Iterator[dict[str, Any]]:
    """One row per setting and planner; those of ``PLANNED`` say how far it is behind the proven optimum."""
    oracle = OptimalPlanner()
    for (gpu, link), model, history, new in product(
        hardware.PLATFORMS, hardware.MODELS, HISTORY_TOKENS, NEW_TOKENS
    ):
        for codec in make_codecs(model.num_layers):
            problem = make_problem(gpu, link, model, codec, history, new)
            plans = {name: planners[name].plan(problem) for name in METHODS[codec.name]}
            ends_s = {name: plan.end_s for name, plan in plans.items()}
            won = winner({"full-recompute": problem.recompute_s, **ends_s})
            for name, plan in plans.items():
                yield {
                    "hardware": gpu.name,
                    "tier": link.name,
                    "model": model.name,
                    "history_tokens": history,
                    "new_tokens": new,
                    "codec": codec.name,
                    "method": name,
                    **_outcome(problem, plan),
                    "winner": won,
                    **(_against(oracle, planners[name], problem) if name == PLANNED else {}),
                }


def _against(oracle: OptimalPlanner, planner: RestorePlanner, problem: RestoreProblem) -> dict[str, float]:
    """The oracle's plan and bound for ``problem``, and how long both planners take."""
    _, plan_s = _timed(lambda: planner.plan(problem))
    solution, oracle_plan_s = _timed(lambda: oracle.solve(problem))
    return {
        "oracle_end_s": _rounded(solution.plan.end_s),
        "oracle_bound_s": _rounded(solution.bound_s),
        "plan_s": _rounded(plan_s),
        "oracle_plan_s": _rounded(oracle_plan_s),
    }


def _timed(plan: Callable[[], _Planned]) -> tuple[_Planned, float]:
    """What ``plan`` returns, and the seconds of this thread that it takes, whatever else the machine does."""
    times_s = []
    for _ in range(PLAN_REPEATS):
        start_s = time.thread_time()
        planned = plan()
        times_s.append(time.thread_time() - start_s)
    return planned, min(times_s)


def _outcome(problem: RestoreProblem, plan: RestorePlan) -> dict[str, Any]:
    """``head_tokens`` as a mean over layers."""
    if plan.is_recompute:
        end_s = plan.end_s
        return {
            "end_s": _rounded(end_s),
            "ideal_s": _rounded(end_s),
            "bytes_loaded": 0,
            "head_tokens": problem.total_tokens - problem.device_tokens,
            "compute_busy": 1.0,
            "load_busy": 0.0,
        }
    pipeline = simulate(problem, plan.head_ends)
    return {
        "end_s": _rounded(plan.end_s),
        "ideal_s": _rounded(pipeline.ideal_s),
        "bytes_loaded": round(pipeline.bytes_loaded),
        "head_tokens": round(pipeline.head_tokens / problem.num_layers, 1),
        "compute_busy": round(pipeline.compute_busy, 4),
        "load_busy": round(pipeline.load_busy, 4),
    }


def _map(planners: Mapping[str, RestorePlanner]) -> Iterator[dict[str, Any]]:
    """One panel per model and codec: an A100, a new turn of 128 tokens.

    ``winner`` and ``gain`` have one row per length and one column per rate of the link. ``gain``: how many
    times sooner the planned restore ends than the better of recomputing alone and loading alone.
    """
    for model in MAP_MODELS:
        for codec in make_codecs(model.num_layers):
            if codec.name not in MAP_CODECS:
                continue
            cells = [
                [_cell(planners, model, codec, rate, history) for rate in MAP_RATES_GB_S]
                for history in MAP_HISTORY_TOKENS
            ]
            yield {
                "hardware": on_paper.A100.name,
                "model": model.name,
                "codec": codec.name,
                "rates_gb_s": MAP_RATES_GB_S,
                "history_tokens": MAP_HISTORY_TOKENS,
                "winner": [[won for won, _ in line] for line in cells],
                "gain": [[gain for _, gain in line] for line in cells],
            }


def _cell(
    planners: Mapping[str, RestorePlanner], model: Model, codec: Codec, rate_gb_s: float, history_tokens: int
) -> tuple[str, float]:
    """The winner and the gain of the planned restore on a link of ``rate_gb_s``."""
    link = Link("link", rate_gb_s * 1e9, on_paper.PCIE4.latency_s, is_shared=False)
    problem = make_problem(on_paper.A100, link, model, codec, history_tokens, NEW_TOKENS[0])
    ends_s = {name: planners[name].plan(problem).end_s for name in ("full-recompute", "full-load", PLANNED)}
    alone_s = min(ends_s["full-recompute"], ends_s["full-load"])
    return winner(ends_s), round(alone_s / ends_s[PLANNED], 3)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def show(result: Result, path: Path | None) -> str:
    """The ratios that the paper claims, and those found."""
    columns: Columns = {name: cell(name) for name in ("tier", "codec", "baseline", "ratio", "paper")}
    return f"{table_of(columns, result['summary']['paper'], left=(0, 1, 2))}\n\n{source(path)}"


def without_rows(result: Result) -> Result:
    """What is kept of a result."""
    return {name: value for name, value in result.items() if name != "rows"}


def main() -> int:
    return runner.run(runner.make_parser("simulate", __doc__).parse_args(), run, show, without_rows)


if __name__ == "__main__":
    sys.exit(main())
