"""Reads krul's counters from a running server, and waits until it has saved what it was asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from krul_sglang.demo.server import ServerProcess

KrulState = dict[str, Any]
"""krul's counters of one data-parallel replica, those of its rank 0."""

_POLL_INTERVAL_S = 0.02


@dataclass(frozen=True)
class StoredAmounts:
    """The bytes that krul stores on all ranks together, and the number of tokens whose KV they are."""

    num_bytes: int
    num_tokens: int


def krul_states(server_info: Mapping[str, Any]) -> list[KrulState]:
    """krul's counters in SGLang's ``/server_info``: one entry per data-parallel replica."""
    return [state["krul"] for state in server_info["internal_states"] if "krul" in state]


def stored_amounts(states: Sequence[KrulState]) -> StoredAmounts:
    """The amounts that are stored; every other rank of a replica holds as much as its rank 0."""
    return StoredAmounts(
        num_bytes=sum(state["stored_bytes"] * state["tp_size"] for state in states),
        num_tokens=sum(state["stored_tokens"] for state in states),
    )


def wait_for_saves(server: ServerProcess, *, timeout_s: float = 60.0) -> list[KrulState]:
    """Wait until a server with krul has nothing more to do for the requests that it answered.

    Turns are saved on every tier, loads have ended, and no probe runs. Returns the
    counters then.

    Raises:
        ServerError: the server does not answer, or is not done in ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while any(_num_pending(state) for state in krul_states(server.server_info())):
        if time.monotonic() > deadline:
            raise server.error(f"krul was still saving or loading after {timeout_s:.0f} s")
        time.sleep(_POLL_INTERVAL_S)
    # An idle scheduler probes when everything is saved, and answers when that has ended.
    return krul_states(server.server_info())


def _num_pending(state: KrulState) -> int:
    queued = sum(tier["queued_segments"] for tier in state["tiers"])
    return int(state["offload"]["pending"] + state["load"]["pending"] + queued)
