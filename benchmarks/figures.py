"""``python -m benchmarks.figures NAME``: draws a figure of the documentation from the result that is kept.

A function is given the result and the path of the PNG file. Only this module needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import orjson
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from benchmarks.tables import RESULTS, ROOT
from krul_sglang.cli.trace import draw_restore
from krul_sglang.traced_restore import TracedRestore

KL_FLOOR = 1e-6
"""Smaller losses are drawn here: a logarithmic axis has no zero."""

BLOCK_FORMAT_RATIO = 16 / 4.5
"""Of formats with 4 bits per element and a scale of 8 bits per 16 elements, or one of 16 bits per 32."""

_MARKERS = {"native": "o", "int8": "s", "int4": "^", "int2": "v", None: "D"}


def draw_quality(result: dict[str, Any], path: Path) -> None:
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
    save(figure, path, dpi=150, bbox_inches="tight")


_MAX_WIDTH = 0.12
"""Largest distance of two servers' points of one round, on an axis where rounds are 1 apart."""


def draw_serving(result: dict[str, Any], path: Path) -> None:
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
    save(figure, path, dpi=120)


def draw_load(result: dict[str, Any], path: Path) -> None:
    """Mean time to the first token of returning turns by turn, with the range of the blocks, of 8 users."""
    users = 8 if any(load["users"] == 8 for load in result["loads"]) else result["loads"][0]["users"]
    dtypes = [load["dtype"] for load in result["loads"] if load["users"] == users]
    size = (2 + 5 * len(dtypes), 4.3)
    figure, axes = plt.subplots(1, len(dtypes), figsize=size, layout="constrained", squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        rows = [row for row in result["rows"] if (row["users"], row["dtype"]) == (users, dtype)]
        for place, row in enumerate(rows):
            means = {int(turn): mean for turn, mean in row["ttft_by_turn_s"].items() if int(turn) > 1}
            spread = [row["spread"]["ttft_by_turn_s"][str(turn)] for turn in means]
            y = np.array(list(means.values()))
            ends = np.abs(np.array(spread).T - y)
            x = np.array(list(means)) + (place - (len(rows) - 1) / 2) * 0.04
            axis.errorbar(x, y, ends, fmt="o-", markersize=4, capsize=2, label=row["configuration"])
            axis.set_xticks(list(means), [f"turn {turn}" for turn in means])
        axis.set(title=f"{users} users side by side, {dtype}", ylabel="mean time to the first token [s]")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    save(figure, path, dpi=120)


_WINNER_COLORS = {"recompute": "#f4a582", "both": "#b8e186", "load": "#92c5de"}
_WINNERS = {"recompute": "recompute alone", "both": "both together", "load": "load alone"}


def draw_simulate(result: dict[str, Any], path: Path) -> None:
    """Who wins by rate of the link and length of the history: a panel per model and codec."""
    panels = result["map"]
    models = list(dict.fromkeys(panel["model"] for panel in panels))
    codecs = list(dict.fromkeys(panel["codec"] for panel in panels))
    figure, axes = plt.subplots(
        len(models), len(codecs), figsize=(13, 4 * len(models)), layout="constrained", squeeze=False
    )
    for panel in panels:
        axis = axes[models.index(panel["model"]), codecs.index(panel["codec"])]
        _draw_panel(axis, panel)
        axis.set_title(f"{panel['model']}, {panel['codec']}, {panel['hardware']}")
    handles = [Patch(color=color, label=_WINNERS[name]) for name, color in _WINNER_COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        "Restoring a history before 128 new tokens (computed): what ends first, and how many times\n"
        "sooner the planned restore ends than the better of recompute alone and load alone"
    )
    save(figure, path, dpi=120)


def _draw_panel(axis: Axes, panel: dict[str, Any]) -> None:
    rates, lengths = panel["rates_gb_s"], panel["history_tokens"]
    ways = list(_WINNER_COLORS)
    image = np.array([[ways.index(won) for won in line] for line in panel["winner"]])
    for y, x in np.argwhere(image == ways.index("both")):
        axis.text(x, y, f"{panel['gain'][y][x]:.2f}", ha="center", va="center", fontsize=7)
    colors = ListedColormap(list(_WINNER_COLORS.values()))
    axis.imshow(image, cmap=colors, vmin=-0.5, vmax=len(ways) - 0.5, origin="lower", aspect="auto")
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axis.set_yticks(range(len(lengths)), [f"{length // 1024}k" for length in lengths])
    axis.set(xlabel="rate of the link [GB/s]", ylabel="history [tokens]")


def save(figure: Any, path: Path, **options: Any) -> None:
    """Write and close a figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **options)
    plt.close(figure)


def draw_overlap(result: Mapping[str, Any], path: Path) -> None:
    """One restore on a server: when heads were computed and tails loaded, and what of each layer."""
    draw_restore(TracedRestore.parse(result["restore"], index=0, rank=0), path)


FIGURES = ROOT / "docs" / "figures"
DRAWN = {
    "load": (draw_load, "load-cpu.json"),
    "multiturn": (draw_serving, "multiturn-cpu.json"),
    "overlap": (draw_overlap, "overlap-cpu.json"),
    "quality": (draw_quality, "quality-agent-cpu.json"),
    "serving": (draw_serving, "serving-cpu.json"),
    "simulate": (draw_simulate, "simulate.json"),
}
"""What draws each figure, and from which result."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=DRAWN)
    parser.add_argument("--json", type=Path, help="another result")
    parser.add_argument("--png", type=Path, help="another file")
    given = parser.parse_args()
    draw, result = DRAWN[given.name]
    path = RESULTS / result if given.json is None else given.json
    png = FIGURES / f"{given.name}.png" if given.png is None else given.png
    draw(orjson.loads(path.read_bytes()), png)


if __name__ == "__main__":
    main()
