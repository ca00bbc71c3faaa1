"""Eight users side by side in a pool for four of them, and a flood of aborted requests."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import ServerProcess
from krul_sglang.learning.command import learn_to_files
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    PAGE_SIZE,
    STRICT,
    Answer,
    ask,
    assert_nothing_left_behind,
    assert_same,
    bases_server_args,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
)

POOL_TOKENS = 2000
NUM_USERS = 8
NUM_TURNS = 4
THOUGHT_S = 1.0
LEAST_FOUND = 0.8
"""Of what could be found. On a machine with other load an answer of the daemon may come too late now and
then, and computing so small a model again is hardly worth a wait."""


def converse(server: ServerProcess, user: int, most_s: float = 0.0) -> list[Answer]:
    """Before each turn the user thinks, for ``most_s`` seconds at most."""
    history = random_prompt(("busy", user), 350)
    answers: list[Answer] = []
    for turn in range(NUM_TURNS):
        time.sleep(most_s * random.Random(f"{user} {turn}").random())
        answers.append(ask(server, history, max_new_tokens=24))
        history += [*answers[-1].output_ids, *random_prompt(("turn", user, turn), 40)]
    return answers


def side_by_side(server: ServerProcess) -> list[list[Answer]]:
    with ThreadPoolExecutor(NUM_USERS) as users:
        return list(users.map(lambda user: converse(server, user, THOUGHT_S), range(NUM_USERS)))


def found_share(conversations: list[list[Answer]]) -> float:
    """Tokens that returning turns found on the device or the host, of all that earlier turns had computed."""
    # The last token of an answer is not computed.
    possible = NUM_USERS * sum(
        (350 + turn * (24 + 40) + 23) // PAGE_SIZE * PAGE_SIZE for turn in range(NUM_TURNS - 1)
    )
    found = sum(
        answer.device_tokens + answer.host_tokens for answers in conversations for answer in answers[1:]
    )
    return found / possible


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    args = small_krul_server_args(POOL_TOKENS, {})
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT) as running:
        yield running


def test_eight_users_find_what_they_said_and_hear_what_a_control_answers(
    server: ServerProcess, tiny_models: dict[str, Path]
) -> None:
    conversations = side_by_side(server)
    assert found_share(conversations) > LEAST_FOUND
    assert settled_stats(server)["load"]["tokens"] > 0
    assert_nothing_left_behind(server)
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384")
    with ForkedServer(tiny_models["float32"], args=args) as control:
        for user, answers in enumerate(conversations):
            assert_same(converse(control, user), answers)


def test_a_flood_of_aborted_requests_leaves_nothing_locked(server: ServerProcess) -> None:
    def abandon(number: int) -> None:
        """Hang up after a moment: while the request waits, loads, is computed or answered."""
        prompt = random_prompt(("busy", number % NUM_USERS), 350)
        payload = request_payload(prompt, max_new_tokens=200, stream=True)
        patience_s = random.Random(number).uniform(0.02, 1.0)
        try:
            with httpx.stream(
                "POST", f"{server.url}/generate", json=payload, timeout=patience_s, trust_env=False
            ) as reply:
                next(reply.iter_lines())
        except httpx.TimeoutException:
            pass

    with ThreadPoolExecutor(16) as floods:
        list(floods.map(abandon, range(200)))
    wait_until_nothing_runs(server)
    assert_nothing_left_behind(server)
    # All of the pool can be had.
    answer = ask(server, random_prompt("all", POOL_TOKENS - 3 * PAGE_SIZE), max_new_tokens=4)
    assert len(answer.output_ids) == 4


def wait_until_nothing_runs(server: ServerProcess) -> None:
    """A request that nobody waits for any more is aborted a moment later."""
    deadline_s = time.monotonic() + 60
    while (stats := settled_stats(server))["num_leases"] or stats["waiting_leases"]:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.1)


@pytest.mark.parametrize("host_memory", ["256MiB", "4MiB"])
def test_eight_users_find_what_was_compressed(
    tiny_models: dict[str, Path], tmp_path: Path, host_memory: str
) -> None:
    """Also in a quarter of the memory that their KV takes as it is: exact copies wait for room there."""
    lines = learn_to_files(
        Checkpoint(str(tiny_models["float32"])), None, num_pieces=4, tp_size=1, cache_dir=tmp_path
    )
    assert any(line.startswith("wrote ") for line in lines)
    options: dict[str, Any] = {"host_memory": host_memory, "probe_share": 0}
    args = bases_server_args(POOL_TOKENS, tmp_path, error_budget=4, **options)
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT) as server:
        conversations = side_by_side(server)
        stats = settled_stats(server)
        assert stats["compression"]["subspace_turns"] > 0.5 * NUM_USERS * NUM_TURNS
        assert found_share(conversations) > LEAST_FOUND, stats["restore"]["plans"]
        assert_nothing_left_behind(server)
