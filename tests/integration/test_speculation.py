"""N-gram speculation: what returns is restored, drafts are accepted, and greedy answers are those without."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    NGRAM,
    POOL_TOKENS,
    STRICT,
    Answer,
    Drafted,
    Played,
    ask,
    ask_again,
    assert_aborts_leave_nothing,
    assert_same,
    play_all,
    random_prompt,
    settled_stats,
    small_krul_server_args,
)
from tests.support.server_plugin import WITH_PLUGIN, faulty_loads

TOKEN_BYTES = 4096  # 4 layers x 2 KV heads x 64 channels x (K, V) x 4 bytes
CHAIN = ("--speculative-ngram-max-bfs-breadth", "1")
"""SGLang takes no other breadth with pages of several tokens."""


@dataclass(frozen=True)
class Mode:
    """``fails``: every second load is made to fail."""

    options: dict[str, Any]
    args: tuple[str, ...]
    fails: bool = False


MODES = {
    "page-1-broad-trees-random-heads": Mode({"planner": "random"}, ("--page-size", "1")),
    "page-16-whole-loads": Mode({"planner": "full-load"}, CHAIN),
    "page-16-failing-loads": Mode({"planner": "random"}, CHAIN, fails=True),
}


@dataclass(frozen=True)
class Restored:
    """``again``: the turns of the first conversation, asked once more: now their answers can be drafted.
    ``last_stored``: what was stored of ``last_turn``."""

    mode: Mode
    played: Played
    again: list[Drafted]
    last_turn: Answer
    last_stored: dict[str, int]
    stats: dict[str, Any]


@pytest.fixture(scope="module")
def speculated(tiny_models: dict[str, Path]) -> Played:
    """What a server with speculation and without krul answers."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    with ForkedServer(tiny_models["float32"], args=(*args, *NGRAM, *CHAIN)) as server:
        played = play_all(server, evict=False)
        assert min(answer.num_accepted for answer in ask_again(server, played.turns, evict=False)) > 5
        return played


@pytest.fixture(scope="module", params=MODES)
def restored(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Restored:
    mode = MODES[request.param]
    args = (*small_krul_server_args(POOL_TOKENS, mode.options), *NGRAM, *mode.args)
    env = faulty_loads("load-error") if mode.fails else WITH_PLUGIN
    with ForkedServer(tiny_models["float32"], args=args, env={**STRICT, **env}) as server:
        played = play_all(server, evict=True)
        again = ask_again(server, played.turns, evict=True)
        before = settled_stats(server)["offload"]
        last_turn = ask(server, random_prompt("last", 333), max_new_tokens=10)
        stats = settled_stats(server)
        assert_aborts_leave_nothing(server, can_fail=mode.fails)
        return Restored(
            mode,
            played,
            again,
            last_turn,
            {name: stats["offload"][name] - before[name] for name in ("tokens", "num_bytes")},
            stats,
        )


def test_control_speculation_changes_no_token(kept: Played, speculated: Played) -> None:
    assert_same(kept.all(), speculated.all())


def test_every_answer_is_that_of_servers_without_krul_and_without_speculation(
    kept: Played, speculated: Played, restored: Restored
) -> None:
    assert_same(kept.all(), restored.played.all())
    assert_same(speculated.all(), restored.played.all())


def test_turns_came_from_the_host(restored: Restored) -> None:
    for answer in [*restored.played.turns[1:], *restored.played.together]:
        assert (answer.device_tokens, answer.host_tokens > 300) == (0, True)


def test_drafts_are_accepted_after_a_restore_and_change_nothing(kept: Played, restored: Restored) -> None:
    """Of 12 tokens the prompt's forward gives the first, and each one that verifies its last."""
    assert [answer.output_ids for answer in restored.again] == [answer.output_ids for answer in kept.turns]
    for answer in restored.again:
        assert answer.host_tokens > 500
        assert answer.num_accepted > 5


def test_nothing_of_what_was_drafted_is_stored(restored: Restored) -> None:
    """333 tokens have KV, and all of the answer's 10 but the newest, or, if it was drafted, all."""
    num_tokens = restored.last_stored["tokens"]
    if restored.mode.args == CHAIN:
        assert num_tokens == 336
    else:
        # With pages of one token the first one may have been stored before.
        cached = restored.last_turn.device_tokens + restored.last_turn.host_tokens
        assert num_tokens + cached in (342, 343)
    if restored.mode.options["planner"] == "full-load":
        assert restored.last_stored["num_bytes"] == num_tokens * TOKEN_BYTES


def test_failed_loads_were_computed_and_nobody_noticed(restored: Restored) -> None:
    restore = restored.stats["restore"]
    assert restore["plans"]["loads"] > 0
    assert (restore["forward"]["rescued_requests"] > 0) == restored.mode.fails
    assert restore["forward"]["lost_requests"] == 0
