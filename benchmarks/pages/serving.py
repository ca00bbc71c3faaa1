"""Tables of what real servers were seen to do, one from each result file of ``benchmarks.serving``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from benchmarks import multiturn, overlap
from benchmarks.load import rows as load_rows
from benchmarks.pages import RESULTS, source, table
from benchmarks.serving import divergence
from benchmarks.serving.rows import COLUMNS, ratio_cell, table_cells

SERVING_RESULTS = (
    RESULTS / "serving-cpu.json",
    RESULTS / "serving-3000-cpu.json",
)
"""By the length of the history; those that were measured are shown."""
SERVING_LENGTHS_RESULT = RESULTS / "serving-lengths-cpu.json"
SERVING_TURNS_RESULT = RESULTS / "serving-turns-cpu.json"
MULTITURN_RESULT = RESULTS / "multiturn-cpu.json"
SLOW_DISK_RESULT = RESULTS / "multiturn-slow-disk-cpu.json"
LOAD_RESULT = RESULTS / "load-cpu.json"
HINTS_RESULT = RESULTS / "multiturn-hints-cpu.json"
OVERLAP_RESULT = RESULTS / "overlap-cpu.json"


def serving_table(results: dict[Path, dict[str, Any]]) -> str:
    """Returning turns by the servers that were asked, a table for each length of the history."""
    return "\n\n".join(
        _shown(result, table(COLUMNS, map(table_cells, result["rows"])), path)
        for path, result in results.items()
    )


def serving_lengths_table(result: dict[str, Any]) -> str:
    """Returning turns of krul's servers by the length of their prompt: where nothing is gained."""
    heads = (
        "prompt of a returning turn",
        "server",
        "turns",
        "restored",
        "times sooner than recompute",
        "smallest",
    )
    rows = []
    for row in result["rows"]:
        for group in row["by_prompt_tokens"] if row["bytes_stored"] is not None else ():
            ratio = group["times_sooner_than_recompute"]
            tokens = f"{group['up_to'] // 2 + 1} to {group['up_to']} tokens"
            found = f"{group['restored']:.0%}", ratio_cell(ratio), f"{ratio['min']:.2f}"
            rows.append((tokens, row["configuration"], group["turns"], *found))
    return _shown(result, table(heads, rows, left=(0, 1)), SERVING_LENGTHS_RESULT)


def multiturn_table(path: Path, result: dict[str, Any]) -> str:
    """Returning turns of many conversations, in DRAM and a disk that do not hold them."""
    return _shown(result, table(multiturn.COLUMNS, map(multiturn.table_cells, result["rows"])), path)


LOAD_SUMMARY = (
    *("configuration", "TTFT mean", "times sooner than recompute", "TPOT", "requests/s", "found"),
    "not stored",
)


def load_tables(
    result: dict[str, Any], columns: Sequence[str] = load_rows.COLUMNS, most: int | None = None
) -> str:
    """Users side by side: a table for each number of them and each dtype, of the first ``most`` of these."""
    configuration, machine = result["configuration"], result["machine"]
    tables = []
    for load in result["loads"][:most]:
        rows = [row for row in result["rows"] if all(row[name] == load[name] for name in ("users", "dtype"))]
        heading = (
            f"**{Path(configuration['model_path']).name} in {load['dtype']}, {load['users']} users side by "
            f"side, {configuration['rounds']} turns each, {load['total_tokens']} tokens in all, a device "
            f"pool of {load['device_tokens']}:**"
        )
        cells = [dict(zip(load_rows.COLUMNS, load_rows.table_cells(row), strict=True)) for row in rows]
        if most is not None:
            # Without spreads.
            cells = [{name: cell.split(" (")[0] for name, cell in row.items()} for row in cells]
        tables.append(f"{heading}\n\n{table(columns, ([row[name] for name in columns] for row in cells))}")
    if most is not None:
        notes: tuple[str, ...] = (
            "TTFT: of returning turns. device: a pool that holds all. compressed: strategy = subspace, in a",
            f"tenth of the memory. {source(LOAD_RESULT)}",
        )
        return "\n\n".join((*tables, " ".join(notes)))
    notes = (
        f"Users think {configuration.get('think_time_s', 0):g} s in the mean, nothing is waited for, and",
        "options are krul's defaults. Means over blocks (least-largest); TTFT and found: of returning turns;",
        "possible: what a cache without bounds finds. device: a pool that holds all, with as many running",
        "requests as the small pool has room for. compressed: strategy = subspace, and host memory for a",
        "tenth of all as native KV; native and compressed-all-memory: for all.",
        f"Machine: {machine['cpu']}, {machine['cores']} cores; SGLang {result['versions']['sglang']};",
        f"{result['duration_s'] / 60:.0f} minutes. {source(LOAD_RESULT)}",
    )
    return "\n\n".join((*tables, " ".join(notes)))


def serving_turns_table(result: dict[str, Any]) -> str:
    """What restored turns predict against a server that never evicts, by the number of the turn."""
    rows = table(divergence.COLUMNS, map(divergence.table_cells, result["rows"]))
    return f"{_serving_heading(result)}\n\n{rows}\n\n{_turns_notes(result)}"


def _turns_notes(result: dict[str, Any]) -> str:
    configuration, machine, rows = result["configuration"], result["machine"], result["rows"]
    budgets = [f"{name} {each:g} nats" for name, each in result["error_budgets"].items() if each is not None]
    options = [
        f"{name} = {value}"
        for given in (configuration["krul_options"], configuration["compressed_options"])
        for name, value in given.items()
    ]
    unlisted = max(row["unlisted"] for row in rows)
    return " ".join(
        (
            f"A turn adds about {rows[0]['new_tokens']:.0f} tokens, an answer of at most",
            f"{configuration['max_tokens']} among them. KL: in nats, mean over these tokens, a lower bound:",
            f"each server lists its {result['top_tokens']} most likely tokens, and all that only one or none",
            f"lists count as one. The reference leaves {unlisted:.1%} of the probability out, or less.",
            f"Budget: {', '.join(budgets) or 'none'}; kept if the median conversation is within it, and 95%",
            f"within {divergence.P95_OVER_BUDGET:g} times it. restored: share of the history that came from",
            "the host (not: conversations of which at most half did); expected: by the server itself.",
            f"Small pool: {configuration['device_tokens']} tokens. {', '.join(options)}.",
            f"Machine: {machine['cpu']}, {machine['cores']} cores; SGLang {result['versions']['sglang']};",
            f"{result['duration_s'] / 60:.0f} minutes. {source(SERVING_TURNS_RESULT)}",
        )
    )


def _shown(result: dict[str, Any], rows: str, path: Path) -> str:
    """A table between the heading and the notes that all of these tables have."""
    return f"{_serving_heading(result)}\n\n{rows}\n\n{_serving_notes(path, result)}"


def _serving_heading(result: dict[str, Any]) -> str:
    configuration = result["configuration"]
    model, rate = Path(configuration["model_path"]).name, configuration.get("rate")
    lengths = ", ".join(map(str, configuration["history_tokens"]))
    load = "one request at a time" if rate is None else f"{rate:g} arrivals per second in a round"
    if configuration.get("rotates"):
        pause_s = configuration.get("think_time_s")
        after = f"{pause_s:g} s after" if pause_s else "when"
        load = f"each asked again {after} it was answered"
    for place in ("host", "ssd"):
        if configuration.get(f"{place}_share") is not None:
            name = {"host": "host memory", "ssd": "an SSD"}[place]
            load += f", {name} for {configuration[f'{place}_share']:.0%} of them as native KV"
    if configuration.get("host_memory") is not None:
        load += f", {configuration['host_memory']} of host memory"
    if configuration.get("ssd_read_mbs") is not None:
        load += f", an SSD that reads {configuration['ssd_read_mbs']:g} MB/s"
    return (
        f"**{model} in {configuration['dtype']}, {configuration['users']} conversations of about "
        f"{lengths} tokens, {configuration['rounds']} turns each, {load}:**"
    )


def _serving_notes(path: Path, result: dict[str, Any]) -> str:
    configuration, rows, machine = result["configuration"], result["rows"], result["machine"]
    options = ", ".join(f"{name} = {value}" for name, value in configuration["compressed_options"].items())
    waited = "waited for" if configuration["settles"] else "not waited for"
    return " ".join(
        (
            f"{rows[0]['returning_turns']} returning turns; ratios are of the same turn, median (quartiles).",
            f"Small pool: {configuration['device_tokens']} tokens; all conversations: at most",
            f"{configuration['total_tokens']}. compressed: {options}.",
            f"What a server does after an answer was {waited}.",
            f"A cache without bounds would find {rows[0]['theoretical_hit_rate']:.0%}",
            "of the returning turns' tokens.",
            f"Machine: {machine['cpu']}, {machine['cores']} cores; SGLang {result['versions']['sglang']};",
            f"{result['duration_s'] / 60:.0f} minutes. {source(path)}",
        )
    )


def serving_tables() -> dict[str, str]:
    """The tables of the kept results, by the names of their places; what was not measured is empty."""
    serving = {path: orjson.loads(path.read_bytes()) for path in SERVING_RESULTS if path.exists()}
    others: dict[str, tuple[Path, Callable[[dict[str, Any]], str]]] = {
        "serving-lengths": (SERVING_LENGTHS_RESULT, serving_lengths_table),
        "serving-turns": (SERVING_TURNS_RESULT, serving_turns_table),
        "load": (LOAD_RESULT, load_tables),
        "load-summary": (LOAD_RESULT, partial(load_tables, columns=LOAD_SUMMARY, most=1)),
        "overlap": (OVERLAP_RESULT, partial(overlap.overlap_tables, path=OVERLAP_RESULT)),
        "overlap-summary": (OVERLAP_RESULT, partial(overlap.overlap_summary, path=OVERLAP_RESULT)),
        "multiturn": (MULTITURN_RESULT, partial(multiturn_table, MULTITURN_RESULT)),
        "multiturn-slow-disk": (SLOW_DISK_RESULT, partial(multiturn_table, SLOW_DISK_RESULT)),
        "multiturn-hints": (HINTS_RESULT, partial(multiturn_table, HINTS_RESULT)),
    }
    return {
        "serving": serving_table(serving),
        **{
            name: table(orjson.loads(path.read_bytes())) if path.exists() else ""
            for name, (path, table) in others.items()
        },
    }
