"""What the rows of all settings say together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.simulate import hardware
from krul_sglang.sizing import on_paper

Rows = Sequence[Mapping[str, Any]]

PAPER_HISTORY_TOKENS = (1024, 2048, 4096)
PAPER_NEW_TOKENS = 128
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

_WAYS = ("recompute", "load", "both")


def summarize(rows: Rows, planned: str) -> dict[str, Any]:
    """The summary of a result; ``planned``: the method that the others are compared with."""
    of_planner = [row for row in rows if row["method"] == planned]
    return {
        "winners": _winners(rows, planned),
        "paper": _paper_ratios(rows, planned),
        "planners": _planners(rows, planned),
        "end_over_ideal": _quantiles(row["end_s"] / row["ideal_s"] for row in of_planner),
        "oracle": against_oracle(of_planner),
    }


def against_oracle(rows: Rows) -> dict[str, Any]:
    """How far plans are behind the best proven ones, and how long planning takes."""
    return {
        "settings": len(rows),
        "end_over_oracle_end": _quantiles(row["end_s"] / row["oracle_end_s"] for row in rows),
        "end_over_oracle_bound": _quantiles(row["end_s"] / row["oracle_bound_s"] for row in rows),
        "oracle_end_over_bound": _quantiles(row["oracle_end_s"] / row["oracle_bound_s"] for row in rows),
        "planning": _planning(rows),
        "planning_of_the_largest": _planning(_largest(rows)),
    }


def _planning(rows: Rows) -> dict[str, dict[str, float]]:
    """Milliseconds of the planner and of the oracle, and their ratio."""
    return {
        "plan_ms": _quantiles(1000 * row["plan_s"] for row in rows),
        "oracle_plan_ms": _quantiles(1000 * row["oracle_plan_s"] for row in rows),
        "plan_over_oracle_plan": _quantiles(row["plan_s"] / row["oracle_plan_s"] for row in rows),
    }


def _largest(rows: Rows) -> Rows:
    """Those of the model with the most layers that occurs, and of the longest history."""
    num_layers = {model.name: model.num_layers for model in hardware.MODELS}
    model = max((row["model"] for row in rows), key=num_layers.__getitem__)
    history_tokens = max(row["history_tokens"] for row in rows)
    return [row for row in rows if (row["model"], row["history_tokens"]) == (model, history_tokens)]


def _quantiles(values: Iterable[float]) -> dict[str, float]:
    ordered = np.array(list(values))
    names = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(float(np.quantile(ordered, share)), 5) for name, share in names.items()}


def _winners(rows: Rows, planned: str) -> list[dict[str, Any]]:
    """Per platform and codec how often each way wins, over models, lengths and new tokens."""
    counts: dict[tuple[str, str, str], dict[str, int]] = {}
    for row in rows:
        if row["method"] == planned:
            count = counts.setdefault((row["hardware"], row["tier"], row["codec"]), {})
            count[row["winner"]] = count.get(row["winner"], 0) + 1
    return [
        {"hardware": gpu, "tier": tier, "codec": codec, **{w: count.get(w, 0) for w in _WAYS}}
        for (gpu, tier, codec), count in counts.items()
    ]


def _paper_ratios(rows: Rows, planned: str) -> list[dict[str, Any]]:
    """How many times sooner planned restores end than the paper's baselines: Llama-7B on an A100."""
    result = []
    for link, codec in product((hardware.PAPER_LINK, on_paper.PCIE4), ("krul", "krul-int4")):
        ends_s = {
            (row["codec"], row["method"], row["history_tokens"]): row["end_s"]
            for row in rows
            if row["hardware"] == on_paper.A100.name
            and row["tier"] == link.name
            and row["model"] == hardware.LLAMA_7B.name
            and row["new_tokens"] == PAPER_NEW_TOKENS
        }
        for baseline, (base_codec, method) in PAPER_BASELINES.items():
            ratios = [
                ends_s[base_codec, method, history] / ends_s[codec, planned, history]
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


def _planners(rows: Rows, planned: str) -> dict[str, dict[str, float]]:
    """How much later than the planned restore the others end, on the same native KV, over all platforms."""
    planned_s = {_place(row): row["end_s"] for row in rows if row["method"] == planned}
    result = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        ratios = [
            row["end_s"] / planned_s[_place(row)]
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
