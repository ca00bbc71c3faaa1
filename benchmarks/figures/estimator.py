"""Draws ``docs/figures/estimator.png``: ``python -m benchmarks.figures.estimator [--json F] [--png F]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import draw_from_command_line

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "estimator-cpu.json"
FIGURE = ROOT / "docs" / "figures" / "estimator.png"

_GOALS = {"spearman": 0.95, "overlap": 0.9}
_LABELS = {"spearman": "rank correlation of distances", "overlap": "same pairs chosen"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Accuracy by rows kept, cost of a prompt and cost of a decode step, side by side."""
    figure, (accuracy, prefill, decode) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    _draw_accuracy(accuracy, result["summary"]["accuracy"])
    _draw_prefill(prefill, result["cost"]["prefill"])
    _draw_decode(decode, result["cost"]["decode"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_accuracy(axes: Axes, summary: list[dict[str, Any]]) -> None:
    sampled = [row for row in summary if row["estimator"].startswith("sampled-")]
    counts = [int(row["estimator"].removeprefix("sampled-")) for row in sampled]
    for color, measure in enumerate(_GOALS):
        values = [row[measure] for row in sampled]
        low, high = [value["q25"] for value in values], [value["q75"] for value in values]
        axes.plot(counts, [value["mean"] for value in values], f"C{color}o-", label=_LABELS[measure])
        axes.fill_between(counts, low, high, color=f"C{color}", alpha=0.2)
        axes.axhline(_GOALS[measure], color=f"C{color}", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set(xlabel="rows kept", ylim=(0, 1.02), title="sampled against exact\n(mean, quartiles, goals)")
    axes.legend(loc="lower right")


def _draw_prefill(axes: Axes, rows: list[dict[str, Any]]) -> None:
    tokens = [row["num_tokens"] for row in rows]
    for name in ("exact", "heterogeneous", "sampled"):
        axes.plot(tokens, [row["ratios_to_forward"][f"{name}_ratio"] for row in rows], "o-", label=name)
    _token_axis(axes, tokens)
    axes.set(ylabel="time / time of the forward", title="cost of a prompt\n(add + finish)")
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_decode(axes: Axes, rows: list[dict[str, Any]]) -> None:
    tokens = [row["num_tokens"] for row in rows]
    for name in ("exact", "heterogeneous", "sampled"):
        axes.plot(tokens, [row["tpot_ratio"][name] for row in rows], "o-", label=name)
    _token_axis(axes, tokens)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(ylabel="time / time without an estimator", title="decode step")
    axes.legend()


def _token_axis(axes: Axes, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens")


if __name__ == "__main__":
    draw_from_command_line(draw, RESULT, FIGURE, __doc__)
