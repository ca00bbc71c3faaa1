"""Figures of the restore benchmark.

Draws the time to the first token of every method (the Krul paper's figures 13 and 15), against the length of
the history (figure 17), and what ran when in some restores (figure 12).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures.charts import save
from benchmarks.restore.rows import Row, drawn_timelines, longest, settings, tier_name

_STAGE_COLOURS = {"head": "C0", "own": "C2", "load": "C1"}
_STAGE_NAMES = {"head": "head recomputed", "own": "own forward", "load": "tail loaded"}
_MIN_LENGTHS = 3
"""Settings with fewer lengths of the history are not drawn against it."""


def bars(result: dict[str, Any], path: Path) -> None:
    """One panel per shape and tier: medians, from minimum to 90th percentile, and what was predicted."""
    by_setting = settings(result["rows"])
    figure, axes = _grid(by_setting)
    for (shape, tier), of_setting in by_setting.items():
        axis = axes[shape, tier]
        rows = longest(of_setting)
        median_ms = [1000 * row["ttft_s"]["median"] for row in rows]
        spread_ms = [
            [abs(1000 * row["ttft_s"][name] - median) for row, median in zip(rows, median_ms, strict=True)]
            for name in ("min", "p90")
        ]
        places = range(len(rows))
        colours = [f"C{place}" for place in places]
        axis.bar(places, median_ms, yerr=spread_ms, color=colours, alpha=0.8, capsize=2)
        axis.plot(places, [1000 * row["predicted_s"] for row in rows], "k_", markersize=11, label="predicted")
        axis.set_title(f"{shape}, {tier}, {rows[0]['history_tokens']} tokens", fontsize=8)
        axis.set_xticks(places, [row["method"] for row in rows], rotation=60, ha="right", fontsize=6)
        axis.grid(axis="y", alpha=0.3)
        axis.set_yscale("log")
    first = next(iter(axes.values()))
    first.set_ylabel("time to first token [ms]")
    first.legend(fontsize=7)
    figure.tight_layout()
    save(figure, path, dpi=150, bbox_inches="tight")


def against_history(result: dict[str, Any], path: Path) -> None:
    """One panel per shape and tier with enough lengths; one line per method."""
    by_setting = {
        key: rows
        for key, rows in settings(result["rows"]).items()
        if len({row["history_tokens"] for row in rows}) >= _MIN_LENGTHS
    }
    if not by_setting:
        return
    # Files from before the local search was the planner call it "optimal".
    planned = {
        method["name"] for method in result["methods"] if method["planner"] in ("local-search", "optimal")
    }
    figure, axes = _grid(by_setting)
    for (shape, tier), rows in by_setting.items():
        axis = axes[shape, tier]
        for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
            of_method = [row for row in rows if row["method"] == method]
            axis.plot(
                [row["history_tokens"] for row in of_method],
                [1000 * row["ttft_s"]["median"] for row in of_method],
                "o-" if method in planned else "s:",
                markersize=3,
                linewidth=1,
                color=f"C{number}",
                label=method,
            )
        axis.set_title(f"{shape}, {tier}", fontsize=8)
        axis.set_xlabel("tokens of history")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.3)
    first = next(iter(axes.values()))
    first.set_ylabel("time to first token [ms]")
    first.legend(fontsize=6)
    figure.tight_layout()
    save(figure, path, dpi=150, bbox_inches="tight")


def timelines(result: dict[str, Any], path: Path) -> None:
    """Compute and load stream of restores in the first setting with a limited tier, one panel per method."""
    rows = drawn_timelines(result["rows"])
    if not rows:
        return
    figure, axes = plt.subplots(len(rows), 1, figsize=(9, 1.25 * len(rows) + 0.6), sharex=True, squeeze=False)
    for axis, row in zip(axes[:, 0], rows, strict=True):
        for stage, lane in (("head", 1), ("own", 1), ("load", 0)):
            for layer, (start_s, end_s) in enumerate(row["timeline"][stage]):
                axis.barh(
                    lane,
                    1000 * (end_s - start_s),
                    left=1000 * start_s,
                    height=0.8,
                    color=_STAGE_COLOURS[stage],
                    alpha=0.55 if layer % 2 else 0.85,
                    label=_STAGE_NAMES[stage] if layer == 0 else None,
                )
        axis.set_yticks([0, 1], ["load", "compute"], fontsize=7)
        axis.set_title(row["method"], fontsize=8, loc="left", pad=2)
        axis.axvline(1000 * row["timeline"]["ttft_s"], color="black", linewidth=0.8)
    first = rows[0]
    axes[-1][0].set_xlabel(
        f"ms since the turn arrived; the line is the first token ({first['shape']}, {tier_name(first)}, "
        f"{first['history_tokens']} tokens of history)",
        fontsize=8,
    )
    handles: dict[str, Any] = {}
    for axis in axes[:, 0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), fontsize=7, loc="upper right", ncols=3)
    figure.tight_layout()
    save(figure, path, dpi=150, bbox_inches="tight")


def _grid(by_setting: Mapping[tuple[str, str], list[Row]]) -> tuple[Any, dict[tuple[str, str], Any]]:
    """A figure with a line per shape and a column per tier, and the axis of each setting."""
    shapes = list(dict.fromkeys(shape for shape, _ in by_setting))
    tiers = list(dict.fromkeys(tier for _, tier in by_setting))
    size = (3.4 * len(tiers), 3.0 * len(shapes))
    figure, axes = plt.subplots(len(shapes), len(tiers), figsize=size, squeeze=False)
    placed = {key: axes[shapes.index(key[0])][tiers.index(key[1])] for key in by_setting}
    for axis in set(axes.flat) - set(placed.values()):
        axis.set_visible(False)
    return figure, placed


def draw(result: dict[str, Any], folder: Path) -> None:
    """Writes ``restore-ttft.png``, ``restore-history.png`` and ``restore-timeline.png`` into ``folder``."""
    bars(result, folder / "restore-ttft.png")
    against_history(result, folder / "restore-history.png")
    timelines(result, folder / "restore-timeline.png")
