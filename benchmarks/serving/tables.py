"""Tables of what real servers were seen to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.runner import Result
from benchmarks.serving import divergence
from benchmarks.tables import Columns, Row, cell, machine, mib, model, ms, quartiles, table_of


def found_on(row: Row) -> str:
    """What each tier had of returning prompts."""
    return " ".join(f"{tier} {rate:.0%}" for tier, rate in row["hit_rate_by_tier"].items() if rate) or "-"


COLUMNS: Columns = {
    "configuration": cell("configuration"),
    "TTFT p50": cell("p50_ttft_s", ms),
    "p90": cell("p90_ttft_s", ms),
    "times sooner than recompute": cell("times_sooner_than_recompute", quartiles),
    "times of device": cell("times_of_device", quartiles),
    "first turn": cell("first_turn_p50_s", ms),
    "first turn, times of recompute": cell("first_turn_times_of_recompute", quartiles),
    "TPOT": cell("tpot_s", ms),
    "TPOT, times of recompute": cell("tpot_times_of_recompute", quartiles),
    "found on": found_on,
    "stored": cell("bytes_stored", mib),
    "answers equal": cell("answers_equal", "{:.0%}"),
}


def rows_table(columns: Columns, result: Result, path: Path) -> str:
    """The rows of a result between the heading and the notes that all tables of servers have."""
    return shown(result, table_of(columns, result["rows"]), path)


def lengths_table(result: Result, path: Path) -> str:
    """Returning turns of krul's servers by the length of their prompt: where nothing is gained."""
    columns: Columns = {
        "prompt of a returning turn": lambda row: f"{row['up_to'] // 2 + 1} to {row['up_to']} tokens",
        "server": cell("configuration"),
        "turns": cell("turns"),
        "restored": cell("restored", "{:.0%}"),
        "times sooner than recompute": cell("times_sooner_than_recompute", quartiles),
        "smallest": cell("times_sooner_than_recompute", "{[min]:.2f}"),
    }
    groups = [
        {"configuration": row["configuration"], **group}
        for row in result["rows"]
        if row["bytes_stored"] is not None
        for group in row["by_prompt_tokens"]
    ]
    return shown(result, table_of(columns, groups, left=(0, 1)), path)


def turns_table(result: Result, path: Path) -> str:
    """What restored turns predict against a server that never evicts, by the number of the turn; and how far
    whole conversations of each length are over the budget."""
    configuration, rows = result["configuration"], result["rows"]
    budgets = [f"{name} {each:g} nats" for name, each in result["error_budgets"].items() if each is not None]
    given = configuration["krul_options"] | configuration["compressed_options"]
    unlisted = max(row["unlisted"] for row in rows)
    notes = (
        f"A turn adds about {rows[0]['new_tokens']:.0f} tokens, an answer of at most",
        f"{configuration['max_tokens']} among them. KL: in nats, mean over these tokens, a lower bound:",
        f"each server lists its {result['top_tokens']} most likely tokens, and all that only one or none",
        f"lists count as one. The reference leaves {unlisted:.1%} of the probability out, or less.",
        f"Budget: {', '.join(budgets) or 'none'}; kept if the median conversation is within it, and 95%",
        f"within {divergence.P95_OVER_BUDGET:g} times it. restored: share of the history that came from",
        "the host (not: conversations of which at most half did); expected: by the server itself.",
        f"Small pool: {configuration['device_tokens']} tokens. {_options(given)}. Whole conversations:",
        f"mean over all tokens that returning turns add. {machine(result, path)}",
    )
    tables = table_of(divergence.COLUMNS, rows), table_of(_WHOLE, result["whole_conversations"])
    return "\n\n".join((_heading(result), *tables, " ".join(notes)))


_WHOLE: Columns = {
    "whole conversations": cell("configuration"),
    "longest history": lambda row: "all" if row["up_to"] is None else f"up to {row['up_to']}",
    "conversations": cell("conversations"),
    "KL, median": cell("kl_median", "{:.5f}"),
    "95%": cell("kl_p95", "{:.5f}"),
    "largest": cell("kl_max", "{:.5f}"),
    "over 1x, 2x, 3x of the budget": cell(
        "over", lambda over: ", ".join(f"{share:.0%}" for share in over.values()) or "-"
    ),
}


def shown(result: Result, rows: str, path: Path) -> str:
    """A table between its heading and its notes."""
    configuration, first = result["configuration"], result["rows"][0]
    waited = "waited for" if configuration["settles"] else "not waited for"
    notes = (
        f"{first['returning_turns']} returning turns; ratios are of the same turn, median (quartiles).",
        f"Small pool: {configuration['device_tokens']} tokens; all conversations: at most",
        f"{configuration['total_tokens']}. compressed: {_options(configuration['compressed_options'])}.",
        f"What a server does after an answer was {waited}.",
        f"A cache without bounds would find {first['theoretical_hit_rate']:.0%}",
        f"of the returning turns' tokens. {machine(result, path)}",
    )
    return f"{_heading(result)}\n\n{rows}\n\n{' '.join(notes)}"


def _heading(result: Result) -> str:
    configuration = result["configuration"]
    rate = configuration.get("rate")
    lengths = ", ".join(map(str, configuration["history_tokens"]))
    load = "one request at a time" if rate is None else f"{rate:g} arrivals per second in a round"
    if configuration.get("rotates"):
        pause_s = configuration.get("think_time_s")
        after = f"{pause_s:g} s after" if pause_s else "when"
        load = f"each asked again {after} it was answered"
    for place, name in (("host", "host memory"), ("ssd", "an SSD")):
        if configuration.get(f"{place}_share") is not None:
            load += f", {name} for {configuration[f'{place}_share']:.0%} of them as native KV"
    if configuration.get("host_memory") is not None:
        load += f", {configuration['host_memory']} of host memory"
    if configuration.get("ssd_read_mbs") is not None:
        load += f", an SSD that reads {configuration['ssd_read_mbs']:g} MB/s"
    return (
        f"**{model(result)}, {configuration['users']} conversations of about "
        f"{lengths} tokens, {configuration['rounds']} turns each, {load}:**"
    )


def _options(given: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in given.items())
