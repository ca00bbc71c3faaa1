"""``krul-sglang trace``: the last restores of a running server, as a table, a Chrome trace and a figure.

The trace opens in Perfetto (https://ui.perfetto.dev) and in chrome://tracing: a process for each
data-parallel rank, in it a row for each stream. Restores follow each other with a gap in between, because the
server does not keep when they happened.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from krul_backend.atomic_file import replacing
from krul_sglang.cli.server_client import CannotRunError, open_client, request, states_with_krul
from krul_sglang.traced_restore import RESTORES, Part, TracedRestore

_LOAD_STREAM = 1
_COMPUTE_STREAM = 2
_STREAM_NAMES = {_LOAD_STREAM: "load stream", _COMPUTE_STREAM: "compute stream"}
_GAP_SHARE = 0.1
_COLUMNS = (
    "restore",
    "prefix tokens",
    "head tokens (first/last layer)",
    "planned ms",
    "measured ms",
    "load busy",
    "compute busy",
)
_COLORS = {"load": "tab:blue", "head": "tab:orange", "own layers": "tab:green", "wait": "lightgray"}
_LABELLED_SHARE = 0.02
"""A layer's number is written into bars that take at least this share of the picture's width."""


def fetch_restores(url: str, *, api_key: str | None = None, timeout_s: float = 30.0) -> list[TracedRestore]:
    """Fetch the last restores of the server at ``url``, rank by rank, the latest of a rank last.

    Raises:
        CannotRunError: the server cannot be reached, runs without krul or with another version of it, or has
            not restored anything yet.
    """
    with open_client(url, api_key=api_key, timeout_s=timeout_s) as client:
        states = states_with_krul(client, request(client, "GET", "/server_info"))
    restores: list[TracedRestore] = []
    try:
        for rank, state in enumerate(states):
            for value in state[RESTORES]:
                restores.append(TracedRestore.parse(value, index=len(restores), rank=rank))
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRunError(
            f"the server at {url} runs another version of krul-sglang: it tells of restores in another way "
            f"({error!r})"
        ) from None
    if not restores:
        raise CannotRunError(
            f"the server at {url} has not restored anything yet: that happens when a conversation returns "
            "after its prefix has left the device pool"
        )
    return restores


def chrome_trace(restores: Sequence[TracedRestore]) -> dict[str, Any]:
    """The restores in Chrome's JSON trace format, times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank in sorted({restore.rank for restore in restores}):
        events += _names(rank)
        offset_s = 0.0
        for restore in restores:
            if restore.rank == rank:
                events += _events(restore, offset_s)
                offset_s += (1 + _GAP_SHARE) * _last_s(restore)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw_restore(restore: TracedRestore, path: Path) -> None:
    """Write a PNG with matplotlib: both streams over time, and below what each layer recomputes and loads.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    # Without pyplot no display and no global state is needed.
    from matplotlib.figure import Figure

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


def format_table(restores: Sequence[TracedRestore]) -> str:
    """A table with one line for each restore, notes at the end of a line; then how good the plans were."""
    rows = [_COLUMNS, *(_row(restore) for restore in restores)]
    widths = [max(map(len, column)) for column in zip(*(row[: len(_COLUMNS)] for row in rows), strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, *row[len(widths) :]]))
    errors = [
        abs(restore.end_s / restore.planned_s - 1)
        for restore in restores
        if restore.planned_s > 0 and not (restore.is_mixed or restore.was_rescued)
    ]
    if errors:
        lines.append(
            f"measured is off from planned by {statistics.median(errors):.0%} in the median, "
            f"{max(errors):.0%} at most"
        )
    return "\n".join(lines)


def _row(restore: TracedRestore) -> tuple[str, ...]:
    notes = []
    if len(restore.requests) > 1:
        notes.append(f"{len(restore.requests)} requests")
    if restore.is_mixed:
        notes.append("beside requests with nothing to restore")
    if restore.was_rescued:
        notes.append("the load failed, all was computed")
    cells = (
        str(restore.index),
        str(restore.prefix_tokens),
        f"{restore.head_tokens(0)} / {restore.head_tokens(restore.num_layers - 1)}",
        f"{1e3 * restore.planned_s:.1f}",
        f"{1e3 * restore.end_s:.1f}",
        f"{restore.load_busy:.0%}",
        f"{restore.compute_busy:.0%}",
    )
    return (*cells, "; ".join(notes)) if notes else cells


def _names(rank: int) -> list[dict[str, Any]]:
    """Metadata events that name the processes and rows, and order the rows."""
    events = [_metadata("process_name", rank, 0, name=f"rank {rank}")]
    for stream, name in _STREAM_NAMES.items():
        events.append(_metadata("thread_name", rank, stream, name=name))
        events.append(_metadata("thread_sort_index", rank, stream, sort_index=stream))
    return events


def _metadata(kind: str, rank: int, stream: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": stream, "args": args}


def _events(restore: TracedRestore, offset_s: float) -> list[dict[str, Any]]:
    about = {"restore": restore.index, "rid": ", ".join(restore.rids)}
    # All layers of one chunk are recomputed before those of the next.
    num_chunks = Counter(part.layer for part in restore.heads)
    seen: Counter[int] = Counter()
    events = [
        {
            "name": f"restore {restore.index}: {restore.prefix_tokens} tokens",
            "ph": "i",
            "s": "p",
            "pid": restore.rank,
            "tid": _COMPUTE_STREAM,
            "ts": _microseconds(offset_s),
            "args": {
                **about,
                "planned_ms": 1e3 * restore.planned_s,
                "measured_ms": 1e3 * restore.end_s,
                "is_mixed": restore.is_mixed,
                "was_rescued": restore.was_rescued,
            },
        }
    ]

    def add(stream: int, name: str, part: Part, **args: Any) -> None:
        begin = _microseconds(offset_s + part.begin_s)
        events.append(
            {
                "name": name,
                "cat": _STREAM_NAMES[stream],
                "ph": "X",
                "pid": restore.rank,
                "tid": stream,
                "ts": begin,
                # From rounded times, so that neighbours of one row never overlap.
                "dur": max(0.0, round(_microseconds(offset_s + part.end_s) - begin, 3)),
                "args": {**about, "layer": part.layer, **args},
            }
        )

    for part in restore.loads:
        add(_LOAD_STREAM, f"load {part.layer}", part, tokens_loaded=restore.tail_tokens(part.layer))
    for part in restore.heads:
        seen[part.layer] += 1
        add(
            _COMPUTE_STREAM,
            f"head {part.layer}",
            part,
            tokens_recomputed=restore.head_tokens(part.layer),
            chunk=f"{seen[part.layer]} of {num_chunks[part.layer]}",
        )
    for part in restore.waits:
        add(_COMPUTE_STREAM, "wait", part)
    for part in restore.own:
        add(_COMPUTE_STREAM, f"own {part.layer}", part)
    return events


def _last_s(restore: TracedRestore) -> float:
    parts = (*restore.loads, *restore.heads, *restore.waits, *restore.own)
    return max(restore.end_s, *(part.end_s for part in parts)) if parts else restore.end_s


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _middle_ms(part: Part) -> float:
    return 1e3 * (part.begin_s + part.end_s) / 2
