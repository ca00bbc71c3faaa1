"""Plans of every kind on every platform, and what they say together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.simulate import hardware
from benchmarks.simulate.codecs import Codec, decode_token_s, last_use, layer_token_bytes, make_codecs
from benchmarks.simulate.hardware import Gpu, Link, Model, restore_costs
from krul_backend.planner.interface import RestorePlan, RestorePlanner
from krul_backend.planner.pipeline import simulate
from krul_backend.planner.problem import RestoreProblem, StoredRun
from krul_backend.planner.registry import PLANNERS, make_planner

PAGE_SIZE = 16
HISTORY_TOKENS = (1024, 2048, 4096, 8192, 32768, 131072)
NEW_TOKENS = (128, 1024)

METHODS: Mapping[str, Sequence[str]] = {
    "native": tuple(PLANNERS),
    "minicache": ("full-load", "optimal"),
    "krul": ("full-load", "uniform", "pyramid", "optimal"),
    "krul-int4": ("full-load", "optimal"),
}
"""Planners per codec; recomputing does not depend on the codec."""
CLEARLY = 1.01
"""A way to restore wins alone if the optimal plan is not faster by more than this."""

# The map: rates of one link to one GPU, in GB/s.
MAP_RATES_GB_S = (0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
MAP_HISTORY_TOKENS = tuple(1024 << power for power in range(8))
MAP_MODELS = (hardware.LLAMA_7B, hardware.LLAMA3_8B)
MAP_CODECS = ("native", "krul-int4")
PAPER_HISTORY_TOKENS = (1024, 2048, 4096)
PAPER_BASELINES = {
    "full load": ("native", "full-load"),
    "MiniCache, full load": ("minicache", "full-load"),
    "partial recompute": ("native", "uniform"),
    "full recompute": ("native", "full-recompute"),
}
PAPER_CLAIMS = {
    "full load": 2.35,
    "MiniCache, full load": 1.76,
    "partial recompute": 1.5,
    "full recompute": 2.65,
}
"""Section 8.3: averages over models and prompts."""


def run() -> dict[str, Any]:
    """The result, without what describes the run itself."""
    planners = {name: make_planner(name) for name in PLANNERS}
    rows = list(_rows(planners))
    return {
        "configuration": {
            "page_size": PAGE_SIZE,
            "matmul_share": hardware.MATMUL_SHARE,
            "attention_share": hardware.ATTENTION_SHARE,
            "hbm_share": hardware.HBM_SHARE,
            "layer_launch_s": hardware.LAYER_LAUNCH_S,
            "models": [asdict(model) for model in hardware.MODELS],
            "platforms": [{"gpu": asdict(gpu), "link": asdict(link)} for gpu, link in hardware.PLATFORMS],
        },
        "summary": {"winners": _winners(rows), "paper": _paper_ratios(rows), "planners": _planners(rows)},
        "map": list(_map(planners)),
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
                decode_token_s=decode_token_s(codec, model, gpu),
                last_use=last_use(codec, model.num_layers),
                stored_from=(0,) * model.num_layers,
            ),
        ),
        costs=restore_costs(gpu, link, model),
    )


def winner(ends_s: Mapping[str, float]) -> str:
    """``recompute``, ``load``, or ``both`` if only the optimal plan's mixture is clearly the fastest."""
    alone = {"recompute": ends_s["full-recompute"], "load": ends_s["full-load"]}
    best = min(alone, key=lambda name: alone[name])
    return best if alone[best] <= CLEARLY * ends_s["optimal"] else "both"


def _rows(planners: Mapping[str, RestorePlanner]) -> Iterator[dict[str, Any]]:
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
                }


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
    """The optimal plan by rate and length: on an A100, with a new turn of 128 tokens."""
    for model, rate, history in product(MAP_MODELS, MAP_RATES_GB_S, MAP_HISTORY_TOKENS):
        link = Link("link", rate * 1e9, hardware.PCIE4.latency_s, is_shared=False)
        for codec in make_codecs(model.num_layers):
            if codec.name not in MAP_CODECS:
                continue
            problem = make_problem(hardware.A100, link, model, codec, history, NEW_TOKENS[0])
            names = ("full-recompute", "full-load", "optimal")
            ends_s = {name: planners[name].plan(problem).end_s for name in names}
            yield {
                "hardware": hardware.A100.name,
                "model": model.name,
                "codec": codec.name,
                "rate_gb_s": rate,
                "history_tokens": history,
                "winner": winner(ends_s),
                "gain": round(min(ends_s["full-recompute"], ends_s["full-load"]) / ends_s["optimal"], 4),
            }


def _winners(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per platform and codec how often each way wins, over models, lengths and new tokens."""
    counts: dict[tuple[str, str, str], dict[str, int]] = {}
    for row in rows:
        if row["method"] == "optimal":
            count = counts.setdefault((row["hardware"], row["tier"], row["codec"]), {})
            count[row["winner"]] = count.get(row["winner"], 0) + 1
    return [
        {"hardware": gpu, "tier": tier, "codec": codec, **{w: count.get(w, 0) for w in _WAYS}}
        for (gpu, tier, codec), count in counts.items()
    ]


_WAYS = ("recompute", "load", "both")


def _paper_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many times sooner planned restores end than the paper's baselines: Llama-7B on an A100."""
    result = []
    for link, codec in product((hardware.PAPER_LINK, hardware.PCIE4), ("krul", "krul-int4")):
        ends_s = {
            (row["codec"], row["method"], row["history_tokens"]): row["end_s"]
            for row in rows
            if row["hardware"] == hardware.A100.name
            and row["tier"] == link.name
            and row["model"] == hardware.LLAMA_7B.name
            and row["new_tokens"] == NEW_TOKENS[0]
        }
        for baseline, (base_codec, method) in PAPER_BASELINES.items():
            ratios = [
                ends_s[base_codec, method, history] / ends_s[codec, "optimal", history]
                for history in PAPER_HISTORY_TOKENS
            ]
            result.append(
                {
                    "tier": link.name,
                    "codec": codec,
                    "baseline": baseline,
                    "paper": PAPER_CLAIMS[baseline],
                    "ratio": round(statistics.mean(ratios), 3),
                    "ratios": dict(zip(PAPER_HISTORY_TOKENS, (round(r, 3) for r in ratios), strict=True)),
                }
            )
    return result


def _planners(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """How much later than the optimal plan the others end, on the same native KV, over all platforms."""
    optimal = {_place(row): row["end_s"] for row in rows if row["method"] == "optimal"}
    result = {}
    for name in PLANNERS:
        ratios = [
            row["end_s"] / optimal[_place(row)]
            for row in rows
            if row["method"] == name and row["codec"] == "native"
        ]
        result[name] = {
            "mean": round(statistics.mean(ratios), 4),
            "median": round(statistics.median(ratios), 4),
            "worst": round(max(ratios), 4),
        }
    return result


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("hardware", "tier", "model", "history_tokens", "new_tokens", "codec"))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
