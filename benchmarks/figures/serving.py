"""Draws ``docs/figures/serving.png``: ``python -m benchmarks.figures.serving [--json F] [--png F]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures import draw_from_command_line

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "serving-cpu.json"
FIGURE = ROOT / "docs" / "figures" / "serving.png"

_MAX_WIDTH = 0.12
"""Largest distance of two servers' points of one round, on an axis where rounds are 1 apart."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Median and quartiles of the time to the first token by round, or of all returning turns at once."""
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    width = min(_MAX_WIDTH, 0.8 / len(result["rows"]))
    for place, row in enumerate(result["rows"]):
        by_round = row.get("ttft_by_round") or {"returning": row["ttft_samples_s"]}
        middle = (len(result["rows"]) - 1) / 2
        x = [number + (place - middle) * width for number in range(len(by_round))]
        medians = [1e3 * each["median"] for each in by_round.values()]
        below = [1e3 * (each["median"] - each["q25"]) for each in by_round.values()]
        above = [1e3 * (each["q75"] - each["median"]) for each in by_round.values()]
        axis.errorbar(x, medians, (below, above), fmt="o", capsize=3, label=row["configuration"])
        axis.set_xticks(range(len(by_round)), [f"turn {number}" for number in by_round])
    axis.set_ylim(bottom=0)
    axis.set_ylabel("time to the first token [ms]")
    axis.legend()
    axis.grid(axis="y", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    draw_from_command_line(draw, RESULT, FIGURE, __doc__)
