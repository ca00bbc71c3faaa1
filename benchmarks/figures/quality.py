"""Draws loss against compression: ``python -m benchmarks.figures.quality [--json F] [--png F]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures import draw_from_command_line

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "quality-agent-cpu.json"
FIGURE = ROOT / "docs" / "figures" / "quality.png"

KL_FLOOR = 1e-6
"""Smaller losses are drawn here: a logarithmic axis has no zero."""

BLOCK_FORMAT_RATIO = 16 / 4.5
"""Of formats with 4 bits per element and a scale of 8 bits per 16 elements, or one of 16 bits per 32."""

_MARKERS = {"native": "o", "int8": "s", "int4": "^", "int2": "v", None: "D"}


def quality(result: dict[str, Any], path: Path) -> None:
    """KL against ratio: a colour per family, a marker per precision; one precision's rows are joined."""
    figure, axis = plt.subplots(figsize=(8, 5.2))
    lines: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in sorted(result["rows"], key=lambda row: float(row["ratio"])):
        lines.setdefault((row["family"], row.get("precision")), []).append(row)
    families = list(dict.fromkeys(family for family, _ in lines))
    named: set[str] = set()
    for (family, precision), rows in lines.items():
        points = [max(row["kl"], KL_FLOOR) for row in rows]
        intervals = [
            row.get("ci", {}).get("kl") or (point, point) for row, point in zip(rows, points, strict=True)
        ]
        axis.errorbar(
            [row["ratio"] for row in rows],
            points,
            yerr=[
                [max(0.0, point - low) for point, (low, _) in zip(points, intervals, strict=True)],
                [max(0.0, high - point) for point, (_, high) in zip(points, intervals, strict=True)],
            ],
            marker=_MARKERS[precision],
            linestyle=":",
            linewidth=1,
            markersize=5,
            color=plt.get_cmap("tab20")(families.index(family) % 20),
            label=None if family in named else family,
        )
        named.add(family)
    axis.axvline(BLOCK_FORMAT_RATIO, color="gray", linestyle="--", linewidth=1)
    axis.text(BLOCK_FORMAT_RATIO, 0.01, " 4.5 bits", transform=axis.get_xaxis_transform(), color="gray")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.set_xlabel("bytes in the pool / bytes stored")
    axis.set_ylabel("KL of the next token [nats]")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    draw_from_command_line(quality, RESULT, FIGURE, __doc__)
