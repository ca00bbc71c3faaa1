"""Draws ``docs/figures/simulate.png``: ``python -m benchmarks.figures.simulate [--json F] [--png F]``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from benchmarks.figures import draw_from_command_line

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "simulate.json"
FIGURE = ROOT / "docs" / "figures" / "simulate.png"

_COLORS = {"recompute": "#f4a582", "both": "#b8e186", "load": "#92c5de"}
_LABELS = {"recompute": "recompute alone", "both": "both together", "load": "load alone"}


def draw(result: dict[str, Any], path: Path) -> None:
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
    handles = [Patch(color=color, label=_LABELS[name]) for name, color in _COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle(
        "Restoring a history before 128 new tokens (computed): what ends first, and how many times\n"
        "sooner the planned restore ends than the better of recompute alone and load alone"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_panel(axis: Axes, panel: dict[str, Any]) -> None:
    rates, lengths = panel["rates_gb_s"], panel["history_tokens"]
    ways = list(_COLORS)
    image = np.array([[ways.index(won) for won in line] for line in panel["winner"]])
    for y, x in np.argwhere(image == ways.index("both")):
        axis.text(x, y, f"{panel['gain'][y][x]:.2f}", ha="center", va="center", fontsize=7)
    colors = ListedColormap(list(_COLORS.values()))
    axis.imshow(image, cmap=colors, vmin=-0.5, vmax=len(ways) - 0.5, origin="lower", aspect="auto")
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axis.set_yticks(range(len(lengths)), [f"{length // 1024}k" for length in lengths])
    axis.set(xlabel="rate of the link [GB/s]", ylabel="history [tokens]")


if __name__ == "__main__":
    draw_from_command_line(draw, RESULT, FIGURE, __doc__)
