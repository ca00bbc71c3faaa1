"""Sliding windows, in a pool of their own or in one of all tokens: conversations come back as if kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.server import ServerProcess
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    NUM_TURNS,
    POOL_TOKENS,
    STRICT,
    STRICT_ON_TWO_CORES,
    Answer,
    Played,
    abort_side_by_side,
    ask,
    assert_nothing_left_behind,
    assert_same,
    play,
    play_all,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
    wait_until,
    wait_until_idle,
)
from tests.support.server_plugin import LEFT_OUT_STATES, SPOILED_STATES, faulty_loads
from tests.support.tiny_model import build_window_model, build_window_pool_model

ONE_POOL = "--disable-hybrid-swa-memory"
NEVER_EVICTS = (
    *("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384"),
    "--enable-cache-report",
)
WINDOWS = (100, 700)
"""With the first all conversations are longer than that, with the second some are shorter."""
PROMPT, NEW_TOKENS = 500, 140
"""Of ``branch``: when its turn ends, the shorter window has left its prompt."""


@dataclass(frozen=True)
class Branched:
    """Answers to a conversation of two turns, to a prompt that leaves it behind its first turn, to one that
    has another answer there, and to one that leaves it in the first prompt."""

    first: Answer
    second: Answer
    from_turn: Answer
    from_prompt: Answer
    from_nothing: Answer

    def all(self) -> list[Answer]:
        return [self.first, self.second, self.from_turn, self.from_prompt, self.from_nothing]


def branch(server: ServerProcess, *, evict: bool) -> Branched:
    prompt = random_prompt("branch", PROMPT)
    first = ask(server, prompt, max_new_tokens=NEW_TOKENS)
    history = [*prompt, *first.output_ids, *random_prompt("second", 60)]
    second = ask(server, history, max_new_tokens=12)
    answers = []
    for num_shared in (PROMPT + NEW_TOKENS + 20, PROMPT + 20, PROMPT - 100):
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=("branch", num_shared))
        other = [*history[:num_shared], *random_prompt(("other", num_shared), 40)]
        answers.append(ask(server, other, max_new_tokens=12))
    return Branched(first, second, *answers)


@pytest.fixture(scope="module", params=WINDOWS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_window_pool_model(tmp_path_factory.mktemp("window-model") / "model", window=request.param)


@pytest.fixture(scope="module")
def kept(model: Path) -> Iterator[tuple[Played, Branched]]:
    """What a server answers that never evicts anything."""
    with ForkedServer(model, args=NEVER_EVICTS) as server:
        yield play_all(server, evict=False), branch(server, evict=False)


def serving(
    model: Path, args: tuple[str, ...] = (), env: dict[str, str] | None = None, **options: Any
) -> ForkedServer:
    all_args = (*small_krul_server_args(POOL_TOKENS, options), *args)
    return ForkedServer(model, args=all_args, env=STRICT if env is None else env)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serving(model) as server:
        yield server


@pytest.fixture(scope="module")
def played(server: ServerProcess) -> Played:
    return play_all(server, evict=True)


def test_the_engine_computes_what_transformers_does(model: Path, kept: tuple[Played, Branched]) -> None:
    """Or else all answers could be equally wrong."""
    from transformers import AutoModelForCausalLM

    prompt = random_prompt("conversation", 611)
    output = AutoModelForCausalLM.from_pretrained(model).generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    assert tuple(output[0, len(prompt) :].tolist()) == kept[0].turns[0].output_ids


def test_conversations_come_back_as_on_a_server_that_never_evicts(
    server: ServerProcess, played: Played, kept: tuple[Played, Branched]
) -> None:
    assert_same(kept[0].all(), played.all())
    assert len({answer.output_ids for answer in kept[0].turns}) == NUM_TURNS
    # The whole pages of the turn before; also behind what is on the device.
    assert [answer.host_tokens for answer in played.turns] == [0, 608, 656, 720, 768]
    assert (played.partial.device_tokens, played.partial.host_tokens) == (288, 608)
    assert_nothing_left_behind(server)
    stats = settled_stats(server)
    states, mode = stats["states"], stats["restore"]["mode"]
    assert states["restored"] == 8
    assert (states["dropped_turns"], states["failed_loads"]) == (0, 0)
    assert mode["planner"] == "full-load"
    assert "a pool of windows" in mode["why"]


def test_prompts_go_on_from_the_end_of_a_turn_or_of_its_prompt(
    server: ServerProcess, played: Played, kept: tuple[Played, Branched]
) -> None:
    branched = branch(server, evict=True)
    assert_same(kept[1].all(), branched.all())
    assert branched.from_turn.host_tokens == (PROMPT + NEW_TOKENS - 1) // 16 * 16
    assert branched.from_prompt.host_tokens == PROMPT // 16 * 16
    assert branched.from_nothing.host_tokens == 0


def test_aborts_leave_nothing(server: ServerProcess, played: Played) -> None:
    abort_side_by_side(server, 6, max_new_tokens=600)
    wait_until_idle(server)
    assert_nothing_left_behind(server)


@pytest.mark.parametrize(
    ("args", "env"), [((), STRICT), (("--tp", "2"), STRICT_ON_TWO_CORES)], ids=["one rank", "two ranks"]
)
def test_what_fails_to_load_is_computed(
    model: Path, kept: tuple[Played, Branched], args: tuple[str, ...], env: dict[str, str]
) -> None:
    """Every second load fails."""
    with serving(model, args, {**env, **faulty_loads("load-error")}) as server:
        played = play_all(server, evict=True)
        stats = settled_stats(server)
    assert_same(kept[0].all(), played.all())
    assert stats["restore"]["forward"]["rescued_requests"] > 0
    assert stats["states"]["restored"] > 0
    assert stats["num_leases"] == 0


def test_a_wrong_window_is_not_used(model: Path, kept: tuple[Played, Branched]) -> None:
    with serving(model, env={**STRICT, **SPOILED_STATES}) as server:
        turns = play(server, "conversation", evict=True)
        stats = settled_stats(server)
    assert_same(kept[0].turns, turns)
    assert (stats["states"]["restored"], stats["states"]["failed_loads"]) == (0, NUM_TURNS - 1)
    assert stats["restore"]["forward"]["rescued_requests"] == NUM_TURNS - 1


def test_without_their_windows_the_answers_would_be_others(
    model: Path, kept: tuple[Played, Branched]
) -> None:
    with serving(model, env={**STRICT, **LEFT_OUT_STATES}) as server:
        branched = branch(server, evict=True)
    right, wrong = kept[1].from_turn, branched.from_turn
    assert wrong.host_tokens > PROMPT
    assert max(abs(a - b) for a, b in zip(right.logprobs, wrong.logprobs, strict=True)) > 1e-2


def test_windows_come_back_from_the_disk_after_a_restart(
    model: Path, kept: tuple[Played, Branched], tmp_path: Path
) -> None:
    options = {"ssd_dir": str(tmp_path), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    prompt = random_prompt("branch", PROMPT)
    with serving(model, **options) as server:
        first = ask(server, prompt, max_new_tokens=NEW_TOKENS)
        # The turn's KV, its window and that of its prompt.
        wait_until(
            lambda: settled_stats(server)["tiers"][0]["written_segments"] >= 3,
            "a turn and its windows to be written",
        )
    history = [*prompt, *first.output_ids, *random_prompt("second", 60)]
    with serving(model, **options) as server:
        second = ask(server, history, max_new_tokens=12)
    assert_same(kept[1].all()[:2], [first, second])
    assert second.host_tokens == (PROMPT + NEW_TOKENS - 1) // 16 * 16


def test_one_pool_of_all_tokens_needs_no_windows(tmp_path: Path) -> None:
    """Prefixes come back whole, whatever the window has left."""
    model = build_window_model(tmp_path / "model", window=WINDOWS[-1])
    with ForkedServer(model, args=(*NEVER_EVICTS, ONE_POOL)) as server:
        kept = play_all(server, evict=False)
    with serving(model, (ONE_POOL,)) as server:
        restored = play_all(server, evict=True)
        assert_nothing_left_behind(server)
        stats = settled_stats(server)
    assert_same(kept.all(), restored.all())
    assert all(answer.host_tokens > 300 for answer in (*restored.turns[1:], *restored.together))
    assert stats["restore"]["mode"]["planner"] == "full-load"
    assert stats["restore"]["forward"]["head_tokens"] == 0
    assert stats["states"] is None
