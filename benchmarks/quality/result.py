"""Rows of the result file, from the outcomes of all conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.quality.conversation import Conversation
from benchmarks.quality.methods import Compression, Method
from benchmarks.quality.protocol import Outcome
from krul_backend.attention.statistics import AttentionStatistics


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
