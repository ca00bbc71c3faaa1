"""The table of eviction policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.pages import RESULTS, ROOT

POLICY_RESULT = RESULTS / "policy-cpu.json"


def policy_table(result: Mapping[str, Any]) -> str:
    """Hits and saved seconds by DRAM and by users, a column for each policy."""
    rows = result["rows"]
    names = list(dict.fromkeys(row["policy"] for row in rows))
    lines = [f"| users | DRAM | {' | '.join(names)} |", "|---:|---:|" + "---:|" * len(names)]
    configuration = result["configuration"]
    for row in rows:
        if row["policy"] == names[0] and row["part"] != "queue":
            same = [each for each in rows if _setting(each) == _setting(row)]
            cells = [f"{each['hit_rate']:.1%}, {each['saved']:.1%}" for each in same]
            users = row.get("users", configuration["users"])
            lines.append(f"| {users} | {row['share']:.0%} | {' | '.join(cells)} |")
    source = POLICY_RESULT.relative_to(ROOT)
    cost = configuration["cost"]
    notes = (
        "Share of prompt tokens found in DRAM, then share of the seconds of computing that this saves.",
        f"{configuration['sessions']} sessions of coding agents, {configuration['requests']} requests;",
        f"a replay has {configuration['turns']} turns, or ten for each user.",
        "DRAM: of all that was ever asked for. Bytes per token differ between conversations by up to",
        f"{configuration['size_spread']:g} either way. Computing a token takes",
        f"{cost['token_s'] * 1e6:g} us, and",
        f"{cost['position_s'] * 1e9:g} ns more for each token before it. Source: [`{source}`]({source}).",
    )
    return "\n".join([*lines, "", " ".join(notes)])


def queue_table(result: Mapping[str, Any]) -> str:
    """What it is worth to hold what waiting requests will use."""
    rows = [row for row in result["rows"] if row["part"] == "queue"]
    lines = [
        "| policy | looked up when it starts | held from its arrival on |",
        "|---|---:|---:|",
    ]
    for name in dict.fromkeys(row["policy"] for row in rows):
        cells = [f"{row['hit_rate']:.1%}, {row['saved']:.1%}" for row in rows if row["policy"] == name]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    configuration = result["configuration"]
    notes = (
        f"{configuration['users']} users, DRAM {configuration['share_of_many']:.0%}, a server that answers",
        f"{configuration['slots']} requests at once, each for as long as it was recorded to take.",
    )
    return "\n".join([*lines, "", " ".join(notes)])


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("part", "users", "share"))
