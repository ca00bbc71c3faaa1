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
from matplotlib.ticker import MaxNLocator

from benchmarks.quality.result import is_mapped

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "quality-cpu.json"
FIGURES = ROOT / "docs" / "figures"
KL_FLOOR = 1e-5
"""Smaller losses are drawn here: a logarithmic axis has no zero."""

_MARKERS = {"native": "o", "int8": "s", "int4": "^", "int2": "v", None: "D"}
_MEASURES = {
    "recall": "recall (exact answer)",
    "score": "task score",
    "nll": "loss of the answer [nats]",
    "kl": "KL of next token [nats]",
}
_LOGARITHMIC = ("nll", "kl")


def quality_against_bytes(result: dict[str, Any], path: Path) -> None:
    """One panel per measure: a colour per family, a marker per precision; one precision's rows are joined."""
    names = [name for name in _MEASURES if name in result["rows"][0]]
    figure, axes = plt.subplots(1, len(names), figsize=(5.6 * len(names), 4.8), squeeze=False)
    lines = _lines(result)
    families = list(dict.fromkeys(family for family, _ in lines))
    for axis, name in zip(axes[0], names, strict=True):
        for (family, precision), rows in lines.items():
            axis.plot(
                [row["bytes_per_token"] for row in rows],
                [max(row[name], KL_FLOOR) if name in _LOGARITHMIC else row[name] for row in rows],
                _MARKERS[precision],
                linestyle="-" if family == "budget" else ":",
                linewidth=1,
                markersize=5,
                color=plt.get_cmap("tab20")(families.index(family) % 20),
                label=family if precision in (None, rows[0]["family"], "native") else None,
            )
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_xlabel("stored bytes per token")
        axis.set_ylabel(_MEASURES[name])
        axis.grid(alpha=0.3)
        if name in _LOGARITHMIC:
            axis.set_yscale("log")
    axes[0][0].legend(fontsize=7, ncols=2)
    _save(figure, path)


def compression_map(result: dict[str, Any], path: Path) -> None:
    """How often each pair of layers was shared, one panel per family with pairs."""
    rows = [row for row in result["rows"] if is_mapped(row)]
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
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
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


def _lines(result: dict[str, Any]) -> dict[tuple[str, str | None], list[dict[str, Any]]]:
    """Rows by family and precision, ascending by bytes, without the split ones and restricted budgets."""
    lines: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in sorted(result["rows"], key=lambda row: float(row["bytes_per_token"])):
        if row.get("region", "all") == "all" and row.get("allowed") is None:
            lines.setdefault((row["family"], row.get("precision")), []).append(row)
    return lines


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def draw(result_path: Path, folder: Path) -> None:
    """Writes ``quality.png``, ``quality-pairs.png`` and ``quality-initial-recent.png`` into ``folder``."""
    result = orjson.loads(result_path.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    quality_against_bytes(result, folder / "quality.png")
    compression_map(result, folder / "quality-pairs.png")
    initial_recent_mass(result, folder / "quality-initial-recent.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULT, help="result of the benchmark")
    parser.add_argument("--folder", type=Path, default=FIGURES, help="folder of the figures")
    arguments = parser.parse_args()
    draw(arguments.json, arguments.folder)
