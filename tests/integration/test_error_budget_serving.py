"""The error budget on real servers: probes teach it, facts are still recalled, ranks stay in step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from krul_sglang.cli.app import BUNDLED_CONVERSATIONS
from krul_sglang.demo.conversations import load_conversations
from krul_sglang.demo.player import Player
from krul_sglang.demo.server import ServerProcess
from krul_sglang.models.find import REFERENCE_MODEL
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    STRICT,
    ask,
    assert_nothing_left_behind,
    krul_stats,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
    wait_for_probes,
)

POOL_TOKENS = 4096
ERROR_BUDGET = 0.05
TOKEN_BYTES = 12 * 2 * 64 * 2 * 4  # layers x KV heads x channels x (K, V) x bytes of float32


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("krul-cache")


@pytest.fixture(scope="module")
def server(cache_dir: Path) -> Iterator[ServerProcess]:
    options = {
        "strategy": "budget",
        "error_budget": ERROR_BUDGET,
        "probe_share": 1,
        "cache_dir": str(cache_dir),
        "planner": "full-load",
    }
    with ForkedServer(
        REFERENCE_MODEL, args=small_krul_server_args(POOL_TOKENS, options), env=STRICT
    ) as running:
        yield running


def test_an_idle_server_learns_what_compression_costs(server: ServerProcess, cache_dir: Path) -> None:
    conversations = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=8, turns=2)
    num_probes = 0
    with Player(server.url, max_tokens=48) as player:
        for conversation in conversations:
            list(player.play([conversation], None))
            num_probes = wait_for_probes(server, num_probes)
    assert num_probes >= 16
    (path,) = (cache_dir / "sensitivity").glob("*.json")
    table = json.loads(path.read_text())
    known = [entry["num_probes"] > 0 for kind in table["sensitivities"].values() for entry in kind]
    assert sum(known) >= 8
    budget = krul_stats(server)["compression"]["budget"]
    assert 0 <= budget["last_kl"] < 10


def test_a_conversation_has_one_budget_however_often_it_returns(server: ServerProcess) -> None:
    """Each turn starts from what the segments that came back lossy cost, and measures what it adds."""
    history = random_prompt("one budget", 320)
    costs: list[float] = []
    for turn in range(4):
        answer = ask(server, history)
        assert turn == 0 or answer.host_tokens > 300
        budget = settled_stats(server)["compression"]["budget"]
        assert budget["last_spent"] == pytest.approx(sum(costs))
        assert budget["last_damage"] > 0
        costs.append(budget["last_damage"])
        assert sum(costs) <= ERROR_BUDGET
        history += [*answer.output_ids, *random_prompt(("more", turn), 64)]
        push_out(server, num_tokens=POOL_TOKENS, seed=("one budget", turn))
    assert_nothing_left_behind(server)


def test_facts_are_recalled_from_compressed_history(server: ServerProcess) -> None:
    conversations = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=10, turns=None)
    expected = {
        (conversation.conversation_id, number): turn.expected
        for conversation in conversations
        for number, turn in enumerate(conversation.turns, start=1)
        if number > 1 and turn.expected is not None
    }
    with Player(server.url, max_tokens=48) as player:
        results = {(turn.conversation, turn.turn): turn for turn in player.play(conversations, None)}
    restored = [key for key in expected if results[key].host_tokens > results[key].prompt_tokens // 2]
    assert len(restored) > len(expected) // 3
    right = [expected[key] in results[key].answer for key in restored]
    # The same bound as for the lossless server (test_bundled_model.py).
    assert sum(right) / len(right) > 0.8
    stats = settled_stats(server)
    assert stats["stored_bytes"] < stats["stored_tokens"] * TOKEN_BYTES / 4
    assert len(stats["compression"]["precisions"]) > 1
    assert_nothing_left_behind(server)


def test_two_ranks_choose_probe_and_restore_together(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    options = {
        "strategy": "budget",
        "probe_share": 1,
        "cache_dir": str(tmp_path),
        "planner": "full-load",
    }
    args = (*small_krul_server_args(2048, options), "--tp", "2")
    env = {**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with ForkedServer(tiny_models["float32"], args=args, env=env) as server:
        history = random_prompt("two ranks", 500)
        num_probes = 0
        for turn in range(3):
            answer = ask(server, history)
            assert turn == 0 or answer.host_tokens > 480
            num_probes = wait_for_probes(server, num_probes)
            history += [*answer.output_ids, *random_prompt(("question", turn), 37)]
            push_out(server, num_tokens=2048, seed=turn)
        stats = settled_stats(server)
        assert stats["stored_bytes"] < stats["stored_tokens"] * 2048  # of one rank: half of the heads
        assert_nothing_left_behind(server)
