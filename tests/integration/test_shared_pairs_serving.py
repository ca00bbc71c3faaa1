"""Shared pairs on a real server: they come back, nothing is encoded twice, nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from demo.server import ServerProcess
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    PAGE_SIZE,
    STRICT,
    ask,
    assert_nothing_left_behind,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
)

POOL_TOKENS = 4096
TOKEN_BYTES = 4096  # 4 layers x 2 KV heads x 64 channels x (K, V) x 4 bytes


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    # Loaded whole, whatever that costs here: this is about what is stored.
    options = {"strategy": "krul", "gamma": 0, "r_l": 0.5, "precision": "int4", "planner": "full-load"}
    args = small_krul_server_args(POOL_TOKENS, options)
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT) as running:
        yield running


def test_ten_turns_encode_every_page_once(server: ServerProcess) -> None:
    history = random_prompt("ten turns", 300)
    num_encoded = settled_stats(server)["offload"]["tokens"]
    num_stored = 0
    for turn in range(10):
        answer = ask(server, history)
        if turn:
            assert answer.host_tokens == num_stored
        # The last output token has no KV yet.
        num_pages = (len(history) + len(answer.output_ids) - 1) // PAGE_SIZE
        added = num_pages * PAGE_SIZE - num_stored
        num_stored += added
        history += [*answer.output_ids, *random_prompt(("more", turn), 40)]
        stats = settled_stats(server)
        assert stats["offload"]["tokens"] - num_encoded == added
        push_out(server, num_tokens=POOL_TOKENS, seed=("ten", turn))
        num_encoded = settled_stats(server)["offload"]["tokens"]


def test_what_was_chosen_can_be_seen(server: ServerProcess) -> None:
    ask(server, random_prompt("seen", 500))
    stats = settled_stats(server)
    compression = stats["compression"]
    assert set(compression["precisions"]) == {"int4"}
    # Half of four layers: one pair in every turn whose attention was observed.
    assert 0 < sum(compression["pairs"].values()) <= compression["turns"]
    assert stats["stored_bytes"] < stats["stored_tokens"] * TOKEN_BYTES / 5


def test_a_restored_conversation_gives_the_same_answer_every_time(server: ServerProcess) -> None:
    prompt = random_prompt("again", 700)
    ask(server, prompt)
    answers = []
    for repeat in range(2):
        push_out(server, num_tokens=POOL_TOKENS, seed=("again", repeat))
        answers.append(ask(server, prompt))
    assert answers[0].host_tokens == answers[1].host_tokens > 600
    assert answers[0].output_ids == answers[1].output_ids
    assert answers[0].logprobs == answers[1].logprobs


def test_fifty_conversations_of_six_turns_leave_nothing_behind(server: ServerProcess) -> None:
    before = settled_stats(server)
    histories = [random_prompt(("many", number), 100 + 7 * number) for number in range(50)]

    def take_turn(number: int) -> int:
        history = histories[number]
        answer = ask(server, history, max_new_tokens=8)
        history += [*answer.output_ids, *random_prompt(("many", number, len(history)), 20 + number % 13)]
        return answer.host_tokens

    restored = 0
    with ThreadPoolExecutor(max_workers=8) as workers:
        for _ in range(6):
            restored += sum(workers.map(take_turn, range(50)))
    after = settled_stats(server)
    assert after["offload"]["turns"] - before["offload"]["turns"] == 300
    assert restored == after["load"]["tokens"] - before["load"]["tokens"]
    # Fifty conversations do not fit into the pool, so nearly every later turn comes from the host.
    assert restored > 30_000
    assert_nothing_left_behind(server)
