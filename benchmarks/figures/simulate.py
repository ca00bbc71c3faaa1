"""Draws ``docs/figures/simulate.png``: ``python -m benchmarks.figures.simulate [--json F] [--png F]``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import orjson
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "simulate.json"
FIGURE = ROOT / "docs" / "figures" / "simulate.png"

_COLORS = {"recompute": "#f4a582", "both": "#b8e186", "load": "#92c5de"}
_LABELS = {"recompute": "recompute alone", "both": "both together", "load": "load alone"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Who wins by rate of the link and length of the history: a panel per model and codec."""
    cells = result["map"]
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    codecs = list(dict.fromkeys(cell["codec"] for cell in cells))
    figure, axes = plt.subplots(
        len(models), len(codecs), figsize=(13, 4 * len(models)), layout="constrained", squeeze=False
    )
    for line, model in zip(axes, models, strict=True):
        for axis, codec in zip(line, codecs, strict=True):
            chosen = [cell for cell in cells if (cell["model"], cell["codec"]) == (model, codec)]
            _draw_panel(axis, chosen)
            axis.set_title(f"{model}, {codec}, {chosen[0]['hardware']}")
    handles = [Patch(color=color, label=_LABELS[name]) for name, color in _COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        "Restoring a history before 128 new tokens (computed): what ends first, and how many times\n"
        "sooner the optimal plan ends than the better of recompute alone and load alone"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_panel(axis: Axes, cells: list[dict[str, Any]]) -> None:
    rates = sorted({cell["rate_gb_s"] for cell in cells})
    lengths = sorted({cell["history_tokens"] for cell in cells})
    ways = list(_COLORS)
    image = np.zeros((len(lengths), len(rates)))
    for cell in cells:
        x, y = rates.index(cell["rate_gb_s"]), lengths.index(cell["history_tokens"])
        image[y, x] = ways.index(cell["winner"])
        if cell["winner"] == "both":
            axis.text(x, y, f"{cell['gain']:.2f}", ha="center", va="center", fontsize=7)
    colors = ListedColormap(list(_COLORS.values()))
    axis.imshow(image, cmap=colors, vmin=-0.5, vmax=len(ways) - 0.5, origin="lower", aspect="auto")
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axis.set_yticks(range(len(lengths)), [f"{length // 1024}k" for length in lengths])
    axis.set(xlabel="rate of the link [GB/s]", ylabel="history [tokens]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--png", type=Path, default=FIGURE)
    arguments = parser.parse_args()
    draw(orjson.loads(arguments.json.read_bytes()), arguments.png)


if __name__ == "__main__":
    main()
