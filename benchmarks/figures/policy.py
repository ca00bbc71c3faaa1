"""Draws ``docs/figures/policy.png``: ``python -m benchmarks.figures.policy [--json F] [--png F]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.figures import draw_from_command_line

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "policy-cpu.json"
FIGURE = ROOT / "docs" / "figures" / "policy.png"

_STYLES = {"value": "o-", "belady": "k--"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Hit rates and saved seconds by DRAM, and hit rates by users: a line for each policy."""
    configuration = result["configuration"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    by_dram = [row for row in result["rows"] if row["part"] == "dram"]
    by_users = [row for row in result["rows"] if row["part"] == "users"]
    _draw_lines(axes[0], by_dram, "share", "hit_rate")
    _draw_lines(axes[1], by_dram, "share", "saved")
    _draw_lines(axes[2], by_users, "users", "hit_rate")
    for axis in axes[:2]:
        axis.set(xscale="log", xlabel=f"DRAM / working set, {configuration['users']} users")
        axis.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes[0].set_title("prompt tokens found in DRAM")
    axes[1].set_title("seconds of computing saved")
    axes[2].set_title("prompt tokens found in DRAM")
    axes[2].set(xscale="log", xlabel=f"users, DRAM {configuration['share_of_many']:.0%} of the working set")
    axes[2].set_xticks(sorted({row["users"] for row in by_users}))
    axes[2].xaxis.set_major_formatter("{x:.0f}")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_lines(axis: Axes, rows: list[dict[str, Any]], x: str, y: str) -> None:
    for name in dict.fromkeys(row["policy"] for row in rows):
        of_policy = sorted((row[x], row[y]) for row in rows if row["policy"] == name)
        axis.plot(*zip(*of_policy, strict=True), _STYLES.get(name, "s:"), markersize=3, label=name)
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    draw_from_command_line(draw, RESULT, FIGURE, __doc__)
