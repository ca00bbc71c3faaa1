"""Draws ``docs/figures/truncation.png``: ``python -m benchmarks.figures.truncation [--json F] [--png F]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import draw_from_command_line

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "truncation-quality-cpu.json"
FIGURE = ROOT / "docs" / "figures" / "truncation.png"


def draw(result: dict[str, Any], path: Path) -> None:
    """What truncated prompts lose by how many of the kept tokens are computed again."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    moved = [row for row in result["rows"] if row["method"] == "moved"]
    for axis, suite, name, factor, title in (
        (axes[0], "recall", "recall", -100.0, "points of recall lost, facts of a chat"),
        (axes[1], "recall", "nll", 1.0, "nats more per token of the right answer"),
        (axes[2], "agent", "nll", 1.0, "nats more per token of what followed, agents"),
    ):
        rows = [row for row in moved if row["suite"] == suite]
        if rows:
            _draw_line(axis, rows, f"{name}_delta", factor)
        axis.set(title=title, xlabel="first kept tokens that are recomputed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_line(axis: Axes, rows: list[dict[str, Any]], name: str, factor: float) -> None:
    recomputed = [row["recomputed_tokens"] for row in rows]
    values = [factor * row[name] for row in rows]
    bounds = [sorted(factor * each for each in row[f"{name}_ci"]) for row in rows]
    axis.plot(recomputed, values, "o-")
    axis.fill_between(recomputed, [low for low, _ in bounds], [high for _, high in bounds], alpha=0.2)
    axis.axhline(0, color="k", linewidth=0.8)
    axis.set_xticks(recomputed)
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    draw_from_command_line(draw, RESULT, FIGURE, __doc__)
