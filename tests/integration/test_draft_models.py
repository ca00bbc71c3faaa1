"""Speculation with a draft model: its KV comes back, and greedy answers are those without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from krul_sglang.demo.server import ServerProcess
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    STRICT_ON_TWO_CORES,
    Played,
    abort_side_by_side,
    assert_nothing_left_behind,
    assert_same,
    play_all,
    push_out,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
    wait_until,
)
from tests.support.server_plugin import LEFT_OUT_DRAFTS, WITH_PLUGIN, faulty_loads
from tests.support.tiny_model import build_tiny_model

NUM_TURNS = 4
NUM_STEPS = 3


@dataclass(frozen=True)
class Mode:
    """``draft``: the target itself, whose drafts are nearly always right, or a ``small`` model of another
    shape. ``fails``: every second load is made to fail."""

    options: dict[str, Any]
    page_size: int = 16
    draft: str = "target"
    env: dict[str, str] = field(default_factory=lambda: STRICT | WITH_PLUGIN)
    fails: bool = False
    args: tuple[str, ...] = ()


MODES = {
    "page-1-random-heads": Mode({"planner": "random"}, page_size=1),
    "page-16-whole-loads": Mode({"planner": "full-load"}),
    "page-16-failing-loads": Mode({"planner": "random"}, env=STRICT | faulty_loads("load-error"), fails=True),
    "page-16-small-draft": Mode({"planner": "random"}, draft="small"),
    "page-16-two-ranks": Mode(
        {"planner": "random"}, env=STRICT_ON_TWO_CORES | WITH_PLUGIN, args=("--tp", "2")
    ),
}


@dataclass(frozen=True)
class Drafted:
    """An answer that ``num_forwards`` verified, and of which so many tokens were drafted."""

    output_ids: tuple[int, ...]
    host_tokens: int
    num_forwards: int
    num_accepted: int


@dataclass(frozen=True)
class Restored:
    mode: Mode
    played: Played
    turns: list[Drafted]
    stats: dict[str, Any]


@pytest.fixture(scope="module")
def drafts(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of draft models, by the name that modes have for them."""
    small = tmp_path_factory.mktemp("draft") / "small"
    build_tiny_model(small, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, hidden_size=64, seed=1)
    return {"target": tiny_models["float32"], "small": small}


def speculation_args(draft: Path) -> tuple[str, ...]:
    return (
        *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", str(NUM_STEPS), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(NUM_STEPS + 1)),
    )


def krul_server(tiny_models: dict[str, Path], drafts: dict[str, Path], mode: Mode) -> ForkedServer:
    args = (
        *small_krul_server_args(POOL_TOKENS, mode.options),
        *("--page-size", str(mode.page_size)),
        *speculation_args(drafts[mode.draft]),
        *mode.args,
    )
    return ForkedServer(tiny_models["float32"], args=args, env=mode.env)


def play_turns(server: ServerProcess, *, evict: bool) -> list[Drafted]:
    """A conversation whose answers are long enough to see how many drafts are accepted."""
    turns: list[Drafted] = []
    history = random_prompt("drafted", 611)
    for number in range(NUM_TURNS):
        result = server.post_json("/generate", request_payload(history, max_new_tokens=40))
        meta = result["meta_info"]
        host_tokens = (meta.get("cached_tokens_details") or {"host": 0})["host"]
        counts = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        turns.append(Drafted(tuple(result["output_ids"]), host_tokens, *counts))
        history = [*history, *result["output_ids"], *random_prompt(("drafted", number), 37)]
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=("drafted", number))
    return turns


def accept_length(turns: Sequence[Drafted]) -> float:
    """Mean number of tokens that a forward brings, over the turns that come after the first one."""
    return 1 + sum(turn.num_accepted for turn in turns[1:]) / sum(turn.num_forwards for turn in turns[1:])


@pytest.fixture(scope="module")
def never_left(tiny_models: dict[str, Path]) -> dict[int, list[Drafted]]:
    """On servers without krul, from whose devices nothing is evicted, by the size of their pages."""
    turns = {}
    for page_size in (1, 16):
        args = ("--dtype", "float32", "--page-size", str(page_size), "--max-total-tokens", "16384")
        draft = speculation_args(tiny_models["float32"])
        with ForkedServer(tiny_models["float32"], args=(*args, *draft)) as server:
            turns[page_size] = play_turns(server, evict=False)
    return turns


@pytest.fixture(scope="module", params=MODES)
def restored(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], drafts: dict[str, Path]
) -> Restored:
    mode = MODES[request.param]
    with krul_server(tiny_models, drafts, mode) as server:
        turns = play_turns(server, evict=True)
        played = play_all(server, evict=True)
        stats = settled_stats(server)
        abort_side_by_side(server, 4, max_new_tokens=1000)
        wait_until(lambda: not settled_stats(server)["num_leases"], "leases of aborted requests")
        if not mode.fails:
            assert_nothing_left_behind(server)
        return Restored(mode, played, turns, stats)


def test_every_answer_is_that_of_servers_without_krul_and_without_speculation(
    kept: Played, never_left: dict[int, list[Drafted]], restored: Restored
) -> None:
    assert_same(kept.all(), restored.played.all())
    for turns in never_left.values():
        assert [turn.output_ids for turn in restored.turns] == [turn.output_ids for turn in turns]


def test_as_many_drafts_are_accepted_as_if_nothing_had_left(
    never_left: dict[int, list[Drafted]], restored: Restored
) -> None:
    assert all(turn.host_tokens > 500 for turn in restored.turns[1:])
    if restored.mode.fails or restored.mode.draft == "small":
        return
    expected = accept_length(never_left[restored.mode.page_size])
    assert expected > 2.5
    assert accept_length(restored.turns) == pytest.approx(expected, rel=0.02)


def test_control_without_draft_kv_fewer_drafts_are_accepted(
    tiny_models: dict[str, Path], drafts: dict[str, Path], never_left: dict[int, list[Drafted]]
) -> None:
    mode = Mode({"planner": "full-load"}, env=STRICT | LEFT_OUT_DRAFTS)
    with krul_server(tiny_models, drafts, mode) as server:
        turns = play_turns(server, evict=True)
        stats = settled_stats(server)["draft"]
    assert [turn.output_ids for turn in turns] == [turn.output_ids for turn in never_left[16]]
    assert accept_length(turns) < 0.75 * accept_length(never_left[16])
    assert (stats["restored_tokens"], stats["missing_tokens"] > 1500) == (0, True)


def test_draft_kv_comes_back_with_the_target_s(restored: Restored) -> None:
    draft, loaded = restored.stats["draft"], restored.stats["load"]["tokens"]
    assert draft["failed_loads"] == 0
    assert draft["after_restores"]["turns"] >= NUM_TURNS - 1
    if restored.mode.fails:
        # What the target alone computed again has no draft KV, and none is stored of what follows.
        assert draft["missing_tokens"] > 500
        assert draft["dropped_turns"] > 0
        assert draft["stored_tokens"] < restored.stats["offload"]["tokens"]
    else:
        assert (draft["restored_tokens"], draft["missing_tokens"]) == (loaded, 0)
        assert draft["dropped_turns"] == 0
        assert draft["stored_tokens"] == restored.stats["offload"]["tokens"]


def test_failed_loads_were_computed_and_nobody_noticed(restored: Restored) -> None:
    forward = restored.stats["restore"]["forward"]
    assert (forward["rescued_requests"] > 0) == restored.mode.fails
    assert forward["lost_requests"] == 0
