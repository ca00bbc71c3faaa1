"""The tables of truncated prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from benchmarks.pages import RESULTS, source, table

QUALITY_RESULT = RESULTS / "truncation-quality-cpu.json"
SERVING_RESULT = RESULTS / "truncation-serving-cpu.json"


def truncation_quality_table(result: Mapping[str, Any]) -> str:
    """What is lost by KV that was computed with the dropped turns."""
    heads = "suite", "KV of the kept turns", "first tokens recomputed", "recall", "points lost", "NLL", "KL"
    rows = []
    for row in result["rows"]:
        recomputed = row["recomputed_tokens"]
        nll = f"{row['nll']:.3f}" if recomputed is None else _with_interval(row, "nll", 1.0, "+.3f")
        which = row["suite"], row["method"], "all" if recomputed is None else recomputed
        rows.append((*which, *_recall(row), nll, f"{row['kl']:.4f}"))
    chats, *_ = result["rows"]
    notes = (
        f"{result['model']} in float32. Recall: the right word is the most likely one of its category, of",
        f"{chats['questions']} questions about {chats['conversations']} chats of",
        f"{chats['whole_tokens']:.0f} tokens, of which {chats['kept_tokens']:.0f} are kept.",
        "NLL: of the right words, or of what really followed in an agent's session. Differences from",
        "recompute with their 95% intervals; KL: from recompute, in nats.",
        source(QUALITY_RESULT),
    )
    return f"{table(heads, rows, left=(0, 1))}\n\n{' '.join(notes)}"


def truncation_serving_table(result: Mapping[str, Any]) -> str:
    """How much sooner truncated prompts are answered."""
    heads = "server", "TTFT p50", "share of recompute", "tokens moved"
    rows = [
        (
            row["server"],
            f"{1e3 * row['ttft_s']['median']:.0f} ms",
            "{median:.0%} ({q25:.0%}-{q75:.0%})".format(**row["share_of_recompute"]),
            f"{row['moved_tokens']:.0f} of {row['prompt_tokens']:.0f}",
        )
        for row in result["servers"]
    ]
    (first, *_) = result["servers"]
    notes = (
        f"{result['model']}, {first['ttft_s']['n']} chats whose older half was dropped, one request at a",
        "time; nothing is on the device. Medians, with quartiles of the ratios.",
        f"Machine: {result['machine']['cores']} cores. {source(SERVING_RESULT)}",
    )
    return f"{table(heads, rows)}\n\n{' '.join(notes)}"


def truncation_tables() -> dict[str, str]:
    """The tables of the kept results, by the names of their places; what was not measured is empty."""
    made = {QUALITY_RESULT: truncation_quality_table, SERVING_RESULT: truncation_serving_table}
    return {
        path.stem.removesuffix("-cpu"): table(orjson.loads(path.read_bytes())) if path.exists() else ""
        for path, table in made.items()
    }


def _recall(row: Mapping[str, Any]) -> tuple[str, str]:
    if "recall" not in row:
        return "-", "-"
    lost = "-" if row["recomputed_tokens"] is None else _with_interval(row, "recall", -100.0, ".1f")
    return f"{row['recall']:.1%}", lost


def _with_interval(row: Mapping[str, Any], name: str, factor: float, form: str) -> str:
    low, high = sorted(factor * each for each in row[f"{name}_delta_ci"])
    return f"{factor * row[f'{name}_delta']:{form}} ({low:{form}} to {high:{form}})"
