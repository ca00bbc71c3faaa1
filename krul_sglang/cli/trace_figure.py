"""Draws a restore. Only this module needs matplotlib, which is not installed with krul-sglang."""

from __future__ import annotations

from pathlib import Path

from krul_backend.atomic_file import replacing
from krul_sglang.cli.server_client import CannotRunError
from krul_sglang.traced_restore import Part, TracedRestore

_COLORS = {"load": "tab:blue", "head": "tab:orange", "own layers": "tab:green", "wait": "lightgray"}
_LABELLED_SHARE = 0.02
"""A layer's number is written into bars that take at least this share of the picture's width."""


def draw_restore(restore: TracedRestore, path: Path) -> None:
    """Write a PNG: both streams over time, and below what each layer recomputes and loads.

    Raises:
        CannotRunError: matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    try:
        # Without pyplot no display and no global state is needed.
        from matplotlib.figure import Figure
    except ImportError:
        raise CannotRunError(
            "--gantt needs matplotlib, which is not installed: pip install matplotlib"
        ) from None

    figure = Figure(figsize=(11, 5), layout="constrained")
    streams, layers = figure.subplots(2, 1, height_ratios=(1, 1.2))
    bars = (
        (1, "load", restore.loads),
        (0, "head", restore.heads),
        (0, "own layers", restore.own),
        (0, "wait", restore.waits),
    )
    for row, name, parts in bars:
        spans = [(1e3 * part.begin_s, 1e3 * part.seconds) for part in parts]
        streams.broken_barh(
            spans, (row - 0.4, 0.8), color=_COLORS[name], edgecolor="white", linewidth=0.5, label=name
        )
        for part in parts if name != "wait" else ():
            if part.seconds >= _LABELLED_SHARE * restore.end_s:
                streams.text(_middle_ms(part), row, str(part.layer), ha="center", va="center", fontsize=7)
    if restore.planned_s > 0:
        streams.axvline(1e3 * restore.planned_s, color="black", linestyle=":", label="planned end")
    streams.set_yticks([0, 1], ["compute stream", "load stream"])
    streams.set_xlim(left=0)
    streams.set_xlabel("ms")
    streams.legend(fontsize=8, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    numbers = range(restore.num_layers)
    recomputed = [restore.head_tokens(layer) for layer in numbers]
    loaded = [restore.tail_tokens(layer) for layer in numbers]
    layers.bar(numbers, recomputed, color=_COLORS["head"], label="recomputed")
    layers.bar(numbers, loaded, bottom=recomputed, color=_COLORS["load"], label="loaded")
    layers.set_xlabel("layer (numbers in the bars above)")
    layers.set_ylabel("tokens, as planned")
    layers.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    figure.suptitle(
        f"restore {restore.index}: {restore.prefix_tokens} tokens in {1e3 * restore.end_s:.1f} ms"
        + (", load failed" if restore.was_rescued else "")
    )
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _middle_ms(part: Part) -> float:
    return 1e3 * (part.begin_s + part.end_s) / 2
