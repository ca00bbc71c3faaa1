"""What was measured under load: one row for each configuration, over all of its blocks."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.runner import Result
from benchmarks.serving.rows import tpot_s
from benchmarks.tables import Columns, Row, cell, machine, source, table_of
from benchmarks.tiers.timing import percentile
from demo.server import KrulState, stored_amounts
from krul_sglang.cli.timed_answer import TurnResult

_NOT_STORED = re.compile("(skipped|failed|dropped|refused|lost)_turns")
"""Counters of ``offload`` in ``/server_info``: each a number, or numbers by cause."""


@dataclass(frozen=True)
class Played:
    """All turns that a server answered, in ``seconds``, and what krul said of itself afterwards.

    ``possible_share``: of the returning turns' prompt tokens, what a cache without bounds would have had.
    ``when_answered`` and ``when_settled``: krul's counters after the last answer, and when its work was done.
    """

    turns: Sequence[TurnResult]
    seconds: float
    possible_share: float
    when_answered: Sequence[KrulState] = ()
    when_settled: Sequence[KrulState] = ()


def make_rows(played: Mapping[str, Sequence[Played]]) -> list[dict[str, Any]]:
    """Means over the blocks of each configuration, and the least and largest of each (``spread``).

    Answers are compared with those of the first block of ``device``, which itself is left out there.
    """
    control = next(iter(played.get("device", ())), None)
    rows = []
    for name, blocks in played.items():
        measured = [measure(each, None if each is control else control) for each in blocks]
        # Side by side: blocks of the same number ran one after the other.
        for own, other in zip(measured, map(measure, played.get("recompute", ())), strict=False):
            if name != "recompute":
                own["times_sooner_than_recompute"] = other["ttft_mean_s"] / own["ttft_mean_s"]
        rows.append(
            {
                "configuration": name,
                "blocks": len(blocks),
                **over_blocks(measured, statistics.fmean),
                "spread": over_blocks(measured, lambda values: [min(values), max(values)]),
            }
        )
    return rows


def measure(played: Played, control: Played | None = None) -> dict[str, Any]:
    """What one block of a configuration says: times and shares are of returning turns.

    ``first_turn_mean_s`` is of first turns, ``tpot_s`` and ``requests_per_s`` are of all. What krul counts is
    None in a server without it, and ``answers_equal`` without a control.
    """
    returning = [turn for turn in played.turns if turn.turn > 1]
    ttft_s = [turn.ttft_s for turn in returning]
    by_turn: dict[int, list[float]] = defaultdict(list)
    for turn in played.turns:
        by_turn[turn.turn].append(turn.ttft_s)
    states = played.when_settled
    causes = turns_not_stored(states) if states else None
    steps = [state["scheduler"]["step_ms"]["p99"] for state in played.when_answered if "scheduler" in state]
    return {
        "ttft_mean_s": statistics.fmean(ttft_s),
        **{f"ttft_p{share}_s": percentile(ttft_s, share / 100) for share in (50, 90, 99)},
        "ttft_by_turn_s": {turn: statistics.fmean(seconds) for turn, seconds in sorted(by_turn.items())},
        "times_sooner_than_recompute": None,
        "first_turn_mean_s": statistics.fmean(by_turn[1]),
        "tpot_s": tpot_s(played.turns),
        "requests_per_s": len(played.turns) / played.seconds,
        "found_share": found_share(returning),
        "possible_share": played.possible_share,
        "turns_skipped": None if causes is None else sum(causes.values()),
        "skipped_by_cause": causes,
        "answers_equal": None if control is None else answers_equal(played.turns, control.turns),
        "scheduler_p99_ms": max(steps, default=None),
        "host_bytes": stored_amounts(states).num_bytes if states else None,
    }


def found_share(turns: Sequence[TurnResult]) -> float:
    """Share of the prompts' tokens whose KV was on the device or on the host."""
    found = sum(turn.device_tokens + turn.host_tokens for turn in turns)
    return found / sum(turn.prompt_tokens for turn in turns)


def answers_equal(turns: Sequence[TurnResult], control: Sequence[TurnResult]) -> float | None:
    """Share of equal answers among returning turns that had the same prompt, earlier answers included.

    None if no prompt was the same.
    """
    own = {(turn.conversation, turn.turn): turn.answer for turn in turns}
    other = {(turn.conversation, turn.turn): turn.answer for turn in control}
    compared = [
        own[name, turn] == other[name, turn]
        for name, turn in own
        if turn > 1 and all(own[name, before] == other[name, before] for before in range(1, turn))
    ]
    return statistics.fmean(compared) if compared else None


def turns_not_stored(states: Sequence[KrulState]) -> dict[str, int]:
    """How many turns were not stored, by cause."""
    causes: dict[str, int] = defaultdict(int)
    for state in states:
        for name, value in state["offload"].items():
            if _NOT_STORED.fullmatch(name):
                for cause, number in (value if isinstance(value, dict) else {name: value}).items():
                    causes[cause.removesuffix("_turns")] += number
    return dict(causes)


def over_blocks(values: Sequence[Any], join: Callable[[list[float]], Any]) -> Any:
    """Joins the numbers of all blocks, key by key; None where no block has one."""
    there = [value for value in values if value is not None]
    if there and isinstance(there[0], dict):
        names = dict.fromkeys(name for value in there for name in value)
        return {name: over_blocks([value.get(name) for value in there], join) for name in names}
    return join(there) if there else None


def _cell(name: str, form: str, factor: float = 1.0, *, with_spread: bool = False) -> Callable[[Row], str]:
    """The mean over blocks, and the least and the largest of them if that is asked for."""
    number, _, unit = form.partition(" ")
    unit = f" {unit}" if unit else ""

    def show(row: Row) -> str:
        if row[name] is None:
            return "-"
        mean, least, largest = (number.format(each * factor) for each in (row[name], *row["spread"][name]))
        return f"{mean}{unit} ({least}-{largest})" if with_spread and row["blocks"] > 1 else f"{mean}{unit}"

    return show


COLUMNS: Columns = {
    "configuration": cell("configuration"),
    "TTFT mean": _cell("ttft_mean_s", "{:.2f} s", with_spread=True),
    "p50": _cell("ttft_p50_s", "{:.2f} s"),
    "p90": _cell("ttft_p90_s", "{:.2f} s"),
    "p99": _cell("ttft_p99_s", "{:.2f} s"),
    "times sooner than recompute": _cell("times_sooner_than_recompute", "{:.2f}", with_spread=True),
    "first turn": _cell("first_turn_mean_s", "{:.2f} s", with_spread=True),
    "TPOT": _cell("tpot_s", "{:.0f} ms", 1e3, with_spread=True),
    "requests/s": _cell("requests_per_s", "{:.2f}", with_spread=True),
    "found": _cell("found_share", "{:.1%}"),
    "possible": _cell("possible_share", "{:.1%}"),
    "not stored": _cell("turns_skipped", "{:g}"),
    "scheduler p99": _cell("scheduler_p99_ms", "{:.1f} ms"),
    "held": _cell("host_bytes", "{:.0f} MiB", 2**-20),
    "answers equal": _cell("answers_equal", "{:.0%}"),
}

IN_README = (
    *("configuration", "TTFT mean", "times sooner than recompute", "TPOT", "requests/s", "found"),
    "not stored",
)


def load_tables(result: Result, path: Path | None) -> str:
    """Users side by side: a table for each number of them and each dtype."""
    notes = (
        f"Users think {result['configuration'].get('think_time_s', 0):g} s in the mean, nothing is waited",
        "for, and options are krul's defaults. Means over blocks (least-largest); TTFT and found: of",
        "returning turns; possible: what a cache without bounds finds. device: a pool that holds all, with",
        "as many running requests as the small pool has room for. compressed: strategy = subspace, and host",
        f"memory for a tenth of all as native KV{_as_native(result)}; native and compressed-all-memory: for",
        "all.",
        machine(result, path),
    )
    return "\n\n".join((*(_load_table(result, load, COLUMNS) for load in result["loads"]), " ".join(notes)))


def load_summary(result: Result, path: Path | None) -> str:
    """The first of these tables, with fewer columns and without spreads."""
    columns = {head: partial(_without_spread, COLUMNS[head]) for head in IN_README}
    notes = (
        "TTFT: of returning turns. device: a pool that holds all. compressed: strategy = subspace, in a",
        f"tenth of the memory{_as_native(result)}. {source(path)}",
    )
    return f"{_load_table(result, result['loads'][0], columns)}\n\n{' '.join(notes)}"


def _as_native(result: Result) -> str:
    has_row = any(row["configuration"] == "native-tenth" for row in result["rows"])
    return ", as native-tenth" if has_row else ""


def _without_spread(show: Callable[[Row], str], row: Row) -> str:
    return show(row).split(" (")[0]


def _load_table(result: Result, load: Mapping[str, Any], columns: Columns) -> str:
    configuration = result["configuration"]
    rows = [row for row in result["rows"] if all(row[name] == load[name] for name in ("users", "dtype"))]
    heading = (
        f"**{Path(configuration['model_path']).name} in {load['dtype']}, {load['users']} users side by "
        f"side, {configuration['rounds']} turns each, {load['total_tokens']} tokens in all, a device "
        f"pool of {load['device_tokens']}:**"
    )
    return f"{heading}\n\n{table_of(columns, rows)}"
