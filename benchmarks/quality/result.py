"""Rows of the result, from the outcomes of all conversations, and the summary that is kept of a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import bootstrap

from benchmarks.quality.conversation import Conversation, Samples
from benchmarks.quality.methods import Compression, Eviction, Method
from benchmarks.quality.protocol import Outcome
from benchmarks.runner import Result
from benchmarks.tables import Columns, Row, cell, source, table_of
from demo.summary import quantiles

POOL_BITS = 16
"""Of one element in the pool."""

_MOST_SHARED = 3
"""So many of the pairs that were shared most are kept of a row."""

_KEPT_SAMPLES = ("kl", "kl_over_expected")


def row(
    method: Method | Eviction,
    conversations: Sequence[Conversation],
    outcomes: Sequence[Outcome],
    uncompressed: Sequence[Samples],
    token_bytes: int,
) -> dict[str, Any]:
    """One method: what it is, means over all conversations and over groups of them, and the raw samples.

    ``outcomes`` and ``uncompressed`` (what the model answers on uncompressed KV) in the order of
    ``conversations``. ``token_bytes``: of one token in the pool.
    """
    groups: dict[str, list[int]] = {}
    for place, conversation in enumerate(conversations):
        for key in (conversation.group, str(conversation.history_tokens)):
            groups.setdefault(key, []).append(place)
    num_segments = sum(outcome.num_segments for outcome in outcomes)
    pairs = sum((outcome.pairs for outcome in outcomes), Counter())
    columns = _columns(outcomes, uncompressed)
    return {
        "name": method.name,
        "family": method.family,
        "precision": method.precision.value if isinstance(method, Compression) else None,
        "layer_ratio": method.layer_ratio if isinstance(method, Compression) else None,
        **_summary(outcomes, columns, range(len(outcomes)), token_bytes),
        "ci": _intervals(columns, conversations),
        **_answers(outcomes, uncompressed),
        "pairs": [
            {"pair": list(pair), "share": round(times / num_segments, 4)}
            for pair, times in pairs.most_common(_MOST_SHARED)
        ],
        "groups": {key: _summary(outcomes, columns, places, token_bytes) for key, places in groups.items()},
        "samples": {name: [round(value, 6) for value in values] for name, values in columns.items()},
    }


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run's ``result``: all of its means, and quantiles in place of samples.

    ``conversations`` become a count per group and length. Of single conversations the divergences stay. What
    is None is left out.
    """
    kinds = Counter((each["group"], each["history_tokens"]) for each in result["conversations"])
    return {
        **result,
        "conversations": [
            {"group": group, "history_tokens": length, "count": count}
            for (group, length), count in kinds.items()
        ],
        "rows": [_row_summary(row) for row in result["rows"]],
    }


def interval(values: Sequence[float], sources: Sequence[str]) -> list[float] | None:
    """The 95% confidence interval of the mean of ``values``, by a bootstrap over their sources.

    Values of one source are drawn together. None if there is only one source.
    """
    by_source: dict[str, list[float]] = {}
    for value, of_source in zip(values, sources, strict=True):
        by_source.setdefault(of_source, []).append(value)
    if len(by_source) < 2:
        return None
    sums = np.array([sum(each) for each in by_source.values()])
    counts = np.array([len(each) for each in by_source.values()])

    def mean(sums: NDArray[Any], counts: NDArray[Any], axis: int) -> NDArray[Any]:
        means: NDArray[Any] = sums.sum(axis) / counts.sum(axis)
        return means

    # percentiles, because the other methods know no answer for values that are all equal
    found = bootstrap((sums, counts), mean, paired=True, vectorized=True, method="percentile", rng=0)
    return [float(found.confidence_interval.low), float(found.confidence_interval.high)]


def _columns(outcomes: Sequence[Outcome], uncompressed: Sequence[Samples]) -> dict[str, list[float]]:
    """Each measure's mean of each conversation, and of `nll` and `recall` its difference from full KV."""
    names = list(outcomes[0].samples)
    columns = {name: [float(outcome.samples[name].mean()) for outcome in outcomes] for name in names}
    for name in ("nll", "recall"):
        if name in names:
            true = [float(samples[name].mean()) for samples in uncompressed]
            columns[f"{name}_delta"] = [
                value - before for value, before in zip(columns[name], true, strict=True)
            ]
    expected = [outcome.expected_kl for outcome in outcomes if outcome.expected_kl is not None]
    if expected:
        # Above 1: the damage was larger than expected. It is as expected where everything is native.
        columns["kl_over_expected"] = [
            true / value if value else 1.0 for true, value in zip(columns["kl"], expected, strict=True)
        ]
    return {**columns, "num_bytes": [outcome.num_bytes for outcome in outcomes]}


def _summary(
    outcomes: Sequence[Outcome], columns: Mapping[str, list[float]], places: Sequence[int], token_bytes: int
) -> dict[str, Any]:
    """Means over the conversations at ``places``; bytes over all of them together.

    ``kl_p95``: of all tokens of these conversations. ``bits``: per element of the pool.
    """
    num_tokens = sum(outcomes[place].num_tokens for place in places)
    num_bytes = sum(outcomes[place].num_bytes for place in places)
    kl = torch.cat([outcomes[place].samples["kl"] for place in places])
    share = num_bytes / (num_tokens * token_bytes)
    return {
        "conversations": len(places),
        **{
            name: round(sum(values[place] for place in places) / len(places), 6)
            for name, values in columns.items()
            if name != "num_bytes"
        },
        "kl_p95": round(float(kl.quantile(0.95)), 6),
        "bytes_per_token": round(num_bytes / num_tokens, 2),
        "bits": round(POOL_BITS * share, 4),
        "ratio": round(1 / share, 4),
    }


def _intervals(
    columns: Mapping[str, list[float]], conversations: Sequence[Conversation]
) -> dict[str, list[float] | None]:
    sources = [each.source or f"conversation {place}" for place, each in enumerate(conversations)]
    return {
        name: interval(columns[name], sources)
        for name in ("kl", "nll_delta", "recall_delta")
        if name in columns
    }


def _answers(outcomes: Sequence[Outcome], uncompressed: Sequence[Samples]) -> dict[str, int]:
    """How many questions are answered with full KV and no more, and the other way round."""
    if "recall" not in uncompressed[0]:
        return {}
    before = torch.cat([samples["recall"] for samples in uncompressed])
    after = torch.cat([outcome.samples["recall"] for outcome in outcomes])
    return {
        "questions": len(before),
        "answers_lost": int((before > after).sum()),
        "answers_won": int((after > before).sum()),
    }


def _row_summary(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in row.items() if value is not None and name != "conversations"}
    kept["samples"] = {
        name: quantiles(values) for name, values in row["samples"].items() if name in _KEPT_SAMPLES
    }
    return kept


def _with_interval(name: str, form: str, factor: float = 1.0) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        ends = row["ci"].get(name)
        shown = cell(name, f"{{:{form}}}", factor)(row)
        return f"{shown} ({' to '.join(format(factor * end, form) for end in ends)})" if ends else shown

    return show


_COLUMNS: Columns = {
    "stored as": cell("name"),
    "bits": cell("bits", "{:.2f}"),
    "ratio to bf16": cell("ratio", "{:.2f}x"),
    "KL": _with_interval("kl", ".4f"),
    "95% KL": cell("kl_p95", "{:.4f}"),
    "NLL change": _with_interval("nll_delta", "+.4f"),
    "same top token": cell("top1", "{:.1%}"),
}

_OF_RECALL: Columns = {
    "recall": cell("recall", "{:.1%}"),
    "change in points": _with_interval("recall_delta", "+.1f", 100.0),
    "lost / won": lambda row: f"{row['answers_lost']} / {row['answers_won']}",
}


def quality_table(result: Result, path: Path | None) -> str:
    """Every row of one result: bits, ratio, and what it changes against full KV, with 95% intervals."""
    configuration, rows = result["configuration"], result["rows"]
    has_recall = "recall" in rows[0]
    lengths = sorted({each["history_tokens"] for each in result["conversations"]})
    part, late = "", ""
    if configuration.get("data"):
        part, late = f" (part {configuration['part']})", " after sessions of agents"
    questions = f", {rows[0]['questions']} questions{late}" if has_recall else ""
    notes = (
        f"{Path(configuration['model']).name}, suite {configuration['suite']}{part}, turns",
        f"{configuration['turns']}:",
        f"{sum(each['count'] for each in result['conversations'])} conversations of about",
        f"{' and '.join(map(str, lengths))} tokens{questions}. In brackets: 95% intervals, paired with full",
        f"KV, conversations drawn anew. {source(path)}",
    )
    columns = {**_COLUMNS, **_OF_RECALL} if has_recall else _COLUMNS
    return f"{table_of(columns, rows)}\n\n{' '.join(notes)}"
