"""Rows of the result, from the outcomes of all conversations, and the summary that is kept of a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.quality.conversation import Conversation
from benchmarks.quality.methods import Compression, Method
from benchmarks.quality.protocol import Outcome
from krul_backend.attention.statistics import AttentionStatistics
from krul_sglang.json_file import quantiles

MAPPED_LAYER_RATIO = 0.5
"""Of rows that share this part of the layers the figure draws how often each pair was shared."""

_MOST_SHARED = 3
"""So many pairs are kept of rows that the figure leaves out."""

_LEFT_OF_GROUPS = ("conversations", "ratio", "value_recall", "nll", "bytes_per_token")
_LEFT_OF_SAMPLES = ("recall", "value_recall", "num_bytes")


def row(
    method: Method,
    conversations: Sequence[Conversation],
    outcomes: Sequence[Outcome],
    full_bytes: Callable[[int], int],
) -> dict[str, Any]:
    """One method: what it is, means over all conversations and over groups of them, and the raw samples.

    ``outcomes`` in the order of ``conversations``. ``full_bytes``: of so many tokens in the pool.
    """
    by_group: dict[str, list[Outcome]] = {}
    for conversation, outcome in zip(conversations, outcomes, strict=True):
        for key in (conversation.group, str(conversation.history_tokens)):
            by_group.setdefault(key, []).append(outcome)
    num_segments = sum(outcome.num_segments for outcome in outcomes)
    pairs = sum((outcome.pairs for outcome in outcomes), Counter())
    precisions = sum((outcome.precisions for outcome in outcomes), Counter())
    num_layers = precisions.total()
    return {
        **_description(method),
        **summary(outcomes, full_bytes),
        "pairs": [
            {"pair": list(pair), "share": round(times / num_segments, 4)}
            for pair, times in pairs.most_common()
        ],
        "precisions": {
            precision.value: round(times / num_layers, 4) for precision, times in precisions.most_common()
        },
        "groups": {key: summary(part, full_bytes) for key, part in by_group.items()},
        "samples": _columns(outcomes),
    }


def summary(outcomes: Sequence[Outcome], full_bytes: Callable[[int], int]) -> dict[str, Any]:
    """Means of the measures; bytes over all conversations together, so that long ones weigh more."""
    num_tokens = sum(outcome.num_tokens for outcome in outcomes)
    num_bytes = sum(outcome.num_bytes for outcome in outcomes)
    names = outcomes[0].measures
    means = {name: sum(outcome.measures[name] for outcome in outcomes) / len(outcomes) for name in names}
    return {
        "conversations": len(outcomes),
        **{name: round(value, 6) for name, value in means.items()},
        "bytes_per_token": round(num_bytes / num_tokens, 2),
        "ratio": round(full_bytes(num_tokens) / num_bytes, 4),
    }


def attention_summary(statistics: Sequence[AttentionStatistics]) -> dict[str, Any]:
    """I-R mass per layer and attention distance of layers, each conversation weighing the same."""
    mass = torch.stack([each.initial_recent_mass() for each in statistics])
    distances = torch.stack([each.distances() for each in statistics])
    return {
        "initial_recent_mass": _rounded(mass.mean(0)),
        "initial_recent_mass_quartiles": [_rounded(mass.quantile(q, dim=0)) for q in (0.25, 0.5, 0.75)],
        "distances": [_rounded(line) for line in distances.mean(0)],
    }


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run's ``result``: all of its means, and quantiles in place of samples.

    ``conversations`` become a count per group and length. Each row gets ``answers_lost`` and ``answers_won``
    against the row of full KV, if answers were judged. Recall of single conversations is 0 or 1, and bytes
    follow from the length, so their means say all. Rows that are not in the figure of pairs keep the most
    shared ones only. What is None is left out.
    """
    full = next((row["samples"].get("recall") for row in result["rows"] if row["name"] == "full"), None)
    kinds = Counter((each["group"], each["history_tokens"]) for each in result["conversations"])
    return {
        **result,
        "conversations": [
            {"group": group, "history_tokens": length, "count": count}
            for (group, length), count in kinds.items()
        ],
        "rows": [_row_summary(row, full) for row in result["rows"]],
    }


def is_mapped(row: Mapping[str, Any]) -> bool:
    """Whether the figure draws how often this row shared each pair of layers."""
    if not row["pairs"] or row["region"] != "all":
        return False
    if row.get("layer_ratio") is not None:
        return bool(row["layer_ratio"] == MAPPED_LAYER_RATIO and row["precision"] == "native")
    return row.get("allowed") is None


def _row_summary(row: Mapping[str, Any], full: Sequence[float] | None) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if value is not None and name != "conversations"}
    if not is_mapped(row):
        kept["pairs"] = row["pairs"][:_MOST_SHARED]
    kept["groups"] = {
        name: {measure: value for measure, value in means.items() if measure not in _LEFT_OF_GROUPS}
        for name, means in row["groups"].items()
    }
    samples = row["samples"]
    if full is not None:
        answers = list(zip(full, samples["recall"], strict=True))
        kept["answers_lost"] = sum(bool(before) and not after for before, after in answers)
        kept["answers_won"] = sum(bool(after) and not before for before, after in answers)
    kept["samples"] = {
        name: quantiles(values) for name, values in samples.items() if name not in _LEFT_OF_SAMPLES
    }
    return kept


def _description(method: Method) -> dict[str, Any]:
    description: dict[str, Any] = {"name": method.name, "family": method.family}
    if isinstance(method, Compression):
        description |= {
            "precision": None if method.precision is None else method.precision.value,
            "layer_ratio": method.layer_ratio,
            "limit": method.limit,
            "allowed": method.allowed and [precision.value for precision in method.allowed],
            "sharing": method.sharing,
            "region": method.region.value,
        }
    return description


def _columns(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    columns: Mapping[str, list[float]] = {
        name: [round(outcome.measures[name], 5) for outcome in outcomes] for name in outcomes[0].measures
    }
    return {**columns, "num_bytes": [outcome.num_bytes for outcome in outcomes]}


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]
