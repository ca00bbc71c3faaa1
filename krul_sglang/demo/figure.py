"""Draws the demo's result. Needs matplotlib, which is not installed with krul-sglang."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from krul_backend.atomic_file import replacing

_BARS = (
    ("recompute", "recompute (evicted)", "tab:orange"),
    ("krul", "krul (evicted, restored from host memory)", "tab:green"),
    ("device", "device hit (never evicted)", "tab:blue"),
)
_BAR_WIDTH = 0.27


def draw_demo(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: the median time to the first token of each turn, with quartiles.

    Above the bars of krul stands how many times sooner it is than ``recompute``. ``result`` is what
    ``DemoResult.to_json`` gives.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    # Without pyplot no display and no global state is needed.
    from matplotlib.figure import Figure

    rounds = [each for each in result["rounds"] if each["turn"] is not None]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for place, (server, label, colour) in enumerate(_BARS):
        times = [each["ttft_s"][server] for each in rounds]
        medians = [time["median"] for time in times]
        spread = [
            [time["median"] - time["q25"] for time in times],
            [time["q75"] - time["median"] for time in times],
        ]
        places = [number + (place - 1) * _BAR_WIDTH for number in range(len(rounds))]
        axis.bar(places, medians, _BAR_WIDTH, yerr=spread, label=label, color=colour, capsize=3)
        if server == "krul":
            for x, time, each in zip(places, times, rounds, strict=True):
                ratio = f"{each['speedup']['median']:.1f}x"
                axis.annotate(
                    ratio, (x, time["q75"]), (0, 3), textcoords="offset points", ha="center", weight="bold"
                )
    names = [_name(each) for each in rounds]
    axis.set_xticks(range(len(rounds)), names)
    axis.set_ylabel("time to first token [s]")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.margins(y=0.12)
    figure.legend(loc="outside upper center", ncols=len(_BARS), fontsize=9, frameon=False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)


def _name(each: Mapping[str, Any]) -> str:
    tokens = round(each["prompt_tokens"] / each["num_turns"])
    share = each["restored_tokens"] / each["prompt_tokens"]
    return f"turn {each['turn']}\n{tokens} tokens,\n{share:.0%} from krul"
