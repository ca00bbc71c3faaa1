"""A client drops its oldest turns: those that it kept are restored at their new positions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.server import ServerProcess
from tests.support.daemon_process import running_daemon
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    PAGE_SIZE,
    STRICT,
    STRICT_ON_TWO_CORES,
    ask,
    assert_nothing_left_behind,
    krul_stats,
    push_out,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
)
from tests.support.tiny_model import build_tiny_model

POOL_TOKENS = 2048
SYSTEM = random_prompt("system", 72)
DROPPED = random_prompt("dropped", 333)
KEPT = random_prompt("kept", 700)
QUESTION = random_prompt("question", 40)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer: its keys and values depend on their token and position alone. So what is moved
    is what would be computed, and answers must be the same."""
    return build_tiny_model(tmp_path_factory.mktemp("one-layer"), num_layers=1, seed=3)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Path]:
    with running_daemon("--host-memory", "256MiB") as (runtime_dir, _):
        yield runtime_dir


@pytest.fixture(scope="module")
def server(one_layer: Path, daemon: Path) -> Iterator[ServerProcess]:
    options = {"endpoint": str(daemon), "host_memory": "auto", "truncation_reuse": True}
    args = small_krul_server_args(POOL_TOKENS, {**options, "planner": "full-load"})
    with ForkedServer(one_layer, args=args, env=STRICT) as running:
        yield running


def moved_tokens(server: ServerProcess, prompt: list[int], **fields: object) -> int:
    """How many tokens the response says were moved."""
    result = server.post_json("/generate", request_payload(prompt, max_new_tokens=1, **fields))
    return int((result["meta_info"].get("cached_tokens_details") or {}).get("moved", 0))


def test_kept_turns_come_back_at_their_new_positions(server: ServerProcess) -> None:
    prompt = [*SYSTEM, *KEPT, *QUESTION]
    push_out(server, num_tokens=POOL_TOKENS, seed="before")
    expected = ask(server, prompt, cache_salt="computed alone")
    assert (expected.device_tokens, expected.host_tokens) == (0, 0)
    ask(server, [*SYSTEM, *DROPPED, *KEPT], max_new_tokens=1)
    settled_stats(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="first")
    before = krul_stats(server)["restore"]["plans"]
    found = ask(server, prompt)
    after = settled_stats(server)["restore"]["plans"]
    assert found.host_tokens > 600
    assert after["moved_loads"] == before["moved_loads"] + 1
    assert after["moved_tokens"] > before["moved_tokens"]
    assert found.output_ids == expected.output_ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-4)

    # The next turn builds on it, and finds it again after everything has left the pool.
    history = [*prompt, *found.output_ids, *random_prompt("next", 30)]
    settled_stats(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="second")
    expected = ask(server, history, cache_salt="computed alone")
    again = ask(server, history)
    assert again.host_tokens > 700
    assert again.output_ids == expected.output_ids
    assert again.logprobs == pytest.approx(expected.logprobs, abs=2e-4)

    # And the client truncates once more.
    shorter = [*SYSTEM, *KEPT[200:], *QUESTION, *history[len(prompt) :], *random_prompt("last", 20)]
    settled_stats(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="third")
    expected = ask(server, shorter, cache_salt="computed alone")
    once_more = ask(server, shorter)
    assert once_more.host_tokens > 500
    assert once_more.output_ids == expected.output_ids
    assert once_more.logprobs == pytest.approx(expected.logprobs, abs=2e-4)
    assert_nothing_left_behind(server)


def test_the_response_says_what_was_moved(server: ServerProcess) -> None:
    system, dropped, kept = (random_prompt(("says", name), 300) for name in ("system", "dropped", "kept"))
    whole = [*system, *dropped, *kept, *QUESTION]
    assert moved_tokens(server, whole) == 0
    settled_stats(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="says")
    assert moved_tokens(server, whole) == 0
    settled_stats(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="says again")
    num_moved = moved_tokens(server, [*system[:100], *kept, *QUESTION])
    assert 0 < num_moved <= len(kept)


def test_tenants_never_find_each_others_runs(server: ServerProcess) -> None:
    whole = [*random_prompt("salted", 200), *random_prompt("salted, kept", 600)]
    ask(server, whole, cache_salt="a")
    settled_stats(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="salted")
    assert ask(server, whole[150:], cache_salt="b").host_tokens == 0
    assert ask(server, whole[150:]).host_tokens == 0
    assert ask(server, whole[150:], cache_salt="a").host_tokens > 400


def test_two_ranks_move_the_same_turns(one_layer: Path) -> None:
    options = {"host_memory": "128MiB", "truncation_reuse": True, "planner": "full-load"}
    args = (*small_krul_server_args(POOL_TOKENS, options), "--tp", "2")
    prompt = [*SYSTEM, *KEPT, *QUESTION]
    with ForkedServer(one_layer, args=args, env=STRICT_ON_TWO_CORES) as ranks:
        expected = ask(ranks, prompt, cache_salt="computed alone")
        ask(ranks, [*SYSTEM, *DROPPED, *KEPT], max_new_tokens=1)
        settled_stats(ranks)
        push_out(ranks, num_tokens=POOL_TOKENS, seed="two ranks")
        found = ask(ranks, prompt)
        assert found.host_tokens > 600
        assert settled_stats(ranks)["restore"]["plans"]["moved_loads"] == 1
        assert found.output_ids == expected.output_ids
        assert found.logprobs == pytest.approx(expected.logprobs, abs=2e-4)
        assert_nothing_left_behind(ranks)


def test_what_was_computed_on_moved_turns_is_never_taken_for_exact(
    server: ServerProcess, one_layer: Path, daemon: Path
) -> None:
    """A second server on the same daemon, without the option, finds what was computed of the prompt only."""
    system, dropped, kept = (random_prompt(("never", name), 480) for name in ("system", "dropped", "kept"))
    system = system[:100]
    ask(server, [*system, *dropped, *kept])
    settled_stats(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="never")
    prompt = [*system, *kept, *QUESTION]
    assert ask(server, prompt).host_tokens > 400
    settled_stats(server)
    args = small_krul_server_args(
        POOL_TOKENS, {"endpoint": str(daemon), "host_memory": "auto", "planner": "full-load"}
    )
    with ForkedServer(one_layer, args=args, env=STRICT) as exact:
        found = ask(exact, prompt, max_new_tokens=1).host_tokens
        # What a server has half stored when it ends stays reserved for some seconds.
        settled_stats(exact)
    # The true prefix, and the first tokens after it: those before the run and its first ones were computed.
    assert len(system) - PAGE_SIZE < found < len(system) + 250
    assert_nothing_left_behind(server)
