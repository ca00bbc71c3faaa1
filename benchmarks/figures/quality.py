"""Figures of the quality benchmark: ``python -m benchmarks.figures.quality [--json F] [--folder D]``.

Draws quality against bytes, the compression map (the Krul paper's figure 20) and the I-R mass per layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import orjson

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "quality-cpu.json"
FIGURES = ROOT / "docs" / "figures"
KL_FLOOR = 1e-5
"""Smaller losses are drawn here: a logarithmic axis has no zero."""

_MARKERS = "osD^vP*X<>"


def quality_against_bytes(result: dict[str, Any], path: Path) -> None:
    """One panel per measure; each family's rows are joined by ascending bytes."""
    measures = [
        (name, label)
        for name, label in (
            ("recall", "recall (exact answer)"),
            ("score", "task score"),
            ("kl", "KL of next token [nats]"),
        )
        if name in result["rows"][0]
    ]
    figure, axes = plt.subplots(1, len(measures), figsize=(6.4 * len(measures), 4.8), squeeze=False)
    families = _families(result)
    for axis, (name, label) in zip(axes[0], measures, strict=True):
        for number, (family, rows) in enumerate(families.items()):
            values = [max(row[name], KL_FLOOR) if name == "kl" else row[name] for row in rows]
            axis.plot(
                [row["bytes_per_token"] for row in rows],
                values,
                _MARKERS[number % len(_MARKERS)],
                linestyle="-" if family == "budget" else ":",
                linewidth=1,
                markersize=5,
                color=f"C{number % 10}",
                label=family,
            )
        axis.set_xscale("log")
        axis.set_xlabel("stored bytes per token")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if name == "kl":
            axis.set_yscale("log")
    axes[0][-1].legend(fontsize=7, ncols=2)
    _save(figure, path)


def compression_map(result: dict[str, Any], path: Path, layer_ratio: float = 0.5) -> None:
    """How often each pair of layers was shared, one panel per family with pairs at ``layer_ratio``."""
    rows = [
        row
        for row in result["rows"]
        if row["pairs"] and row["region"] == "all" and _is_mapped(row, layer_ratio)
    ]
    if not rows:
        return
    num_layers = result["model"]["num_layers"]
    figure, axes = plt.subplots(1, len(rows), figsize=(2.8 * len(rows), 3.2), squeeze=False)
    for axis, row in zip(axes[0], rows, strict=True):
        shares = np.zeros((num_layers, num_layers))
        for entry in row["pairs"]:
            lower, upper = entry["pair"]
            shares[upper, lower] = entry["share"]
        image = axis.imshow(shares, vmin=0, vmax=1, cmap="Blues", origin="lower")
        axis.set_title(row["name"], fontsize=8)
        axis.set_xlabel("layer")
    axes[0][0].set_ylabel("shared with layer")
    figure.colorbar(image, ax=axes[0].tolist(), label="share of segments")
    _save(figure, path)


def initial_recent_mass(result: dict[str, Any], path: Path) -> None:
    """Attention on the first and last tenth of the tokens, per layer, with quartiles over conversations."""
    low, middle, high = (np.array(line) for line in result["attention"]["initial_recent_mass_quartiles"])
    layers = np.arange(len(middle))
    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    axis.bar(layers, middle, color="C0", alpha=0.7)
    axis.errorbar(layers, middle, yerr=(middle - low, high - middle), fmt="none", color="black", capsize=2)
    axis.set_xlabel("layer")
    axis.set_ylabel("attention on first and last 10%")
    axis.set_ylim(0, 1)
    _save(figure, path)


def _families(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    families: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(result["rows"], key=lambda row: float(row["bytes_per_token"])):
        if row.get("region", "all") == "all":
            families.setdefault(row["family"], []).append(row)
    return families


def _is_mapped(row: dict[str, Any], layer_ratio: float) -> bool:
    if row["layer_ratio"] is not None:
        return bool(row["layer_ratio"] == layer_ratio and row["precision"] == "native")
    return row["allowed"] is None


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw(result_path: Path, folder: Path) -> None:
    """Writes ``quality.png``, ``quality-pairs.png`` and ``quality-initial-recent.png`` into ``folder``."""
    result = orjson.loads(result_path.read_bytes())
    quality_against_bytes(result, folder / "quality.png")
    compression_map(result, folder / "quality-pairs.png")
    initial_recent_mass(result, folder / "quality-initial-recent.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULT, help="result of the benchmark")
    parser.add_argument("--folder", type=Path, default=FIGURES, help="folder of the figures")
    arguments = parser.parse_args()
    draw(arguments.json, arguments.folder)
