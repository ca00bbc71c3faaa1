"""A model whose heads cannot be proven: the server says so, and loads whole prefixes or computes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    NUM_TURNS,
    POOL_TOKENS,
    STRICT,
    STRICT_ON_TWO_CORES,
    Played,
    assert_same,
    play,
    play_all,
    settled_stats,
    small_krul_server_args,
    wait_until,
)
from tests.support.server_plugin import faulty_loads, spoiled_heads


@dataclass(frozen=True)
class Mode:
    """``rank``: the one whose heads are computed wrongly."""

    options: dict[str, Any]
    fault: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = tuple(STRICT.items())
    rank: int = 0


MODES = {
    "failing-loads-mixed-chunks": Mode(
        {}, "load-error", ("--chunked-prefill-size", "256", "--enable-mixed-chunk")
    ),
    "stuck-loads-tp2-of-which-one-is-wrong": Mode(
        {"planner": "full-load", "load_timeout": 0.5},
        "load-stall",
        ("--chunked-prefill-size", "512", "--tp", "2"),
        tuple(STRICT_ON_TWO_CORES.items()),
        rank=1,
    ),
}


@dataclass(frozen=True)
class Served:
    played: Played
    stats: dict[str, Any]
    log: str


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Served:
    mode = MODES[request.param]
    args = (*small_krul_server_args(POOL_TOKENS, mode.options), *mode.args)
    env = {**dict(mode.env), **spoiled_heads(mode.rank), **faulty_loads(mode.fault)}
    with ForkedServer(tiny_models["float32"], args=args, env=env) as server:
        played = play_all(server, evict=True)
        # A load that was given up while it was stuck keeps its lease until it wakes.
        wait_until(lambda: not settled_stats(server)["num_leases"], "leases of stuck loads")
        return Served(played, settled_stats(server), server.log_text())


def test_one_line_says_why_and_what_follows(served: Served) -> None:
    (line,) = (line for line in served.log.splitlines() if "cannot be recomputed" in line)
    assert "heads of LlamaForCausalLM" in line
    assert "differs by" in line
    assert 'planner = "full-load"' in line
    assert "loaded whole" in line
    assert "Traceback" not in served.log.split("injected at")[0]


def test_the_server_says_how_it_restores(served: Served) -> None:
    restore = served.stats["restore"]
    assert restore["mode"]["planner"] == "full-load"
    assert "heads of LlamaForCausalLM cannot be recomputed" in restore["mode"]["why"]
    assert restore["proof"] is None


def test_every_answer_is_that_of_a_server_that_never_evicted(kept: Played, served: Served) -> None:
    """A request that SGLang ends with an error would have raised."""
    assert_same(kept.all(), served.played.all())


def test_prefixes_came_whole_from_the_host(served: Served) -> None:
    for answer in [*served.played.turns[1:], *served.played.together]:
        assert (answer.device_tokens, answer.host_tokens > 300) == (0, True)
    restore = served.stats["restore"]
    assert restore["plans"]["loads"] > 0
    assert restore["plans"]["head_tokens"] == restore["forward"]["head_tokens"] == 0
    assert served.stats["load"]["num_bytes"] > 0


def test_loads_that_failed_were_computed(served: Served) -> None:
    forward = served.stats["restore"]["forward"]
    assert 0 < forward["rescued_requests"] < served.stats["restore"]["plans"]["loads"]
    assert forward["rescued_tokens"] > 512
    assert forward["lost_requests"] == 0


def test_what_is_computed_sooner_is_not_loaded(kept: Played, tiny_models: dict[str, Path]) -> None:
    """Through a link that takes seconds for each prefix."""
    args = small_krul_server_args(POOL_TOKENS, {"link_mbs": 0.5})
    with ForkedServer(tiny_models["float32"], args=args, env={**STRICT, **spoiled_heads(0)}) as server:
        turns = play(server, "conversation", evict=True)
        restore = settled_stats(server)["restore"]
    assert_same(kept.turns, turns)
    assert [answer.host_tokens for answer in turns] == [0] * NUM_TURNS
    assert (restore["plans"]["loads"], restore["plans"]["refused"]) == (0, NUM_TURNS - 1)
