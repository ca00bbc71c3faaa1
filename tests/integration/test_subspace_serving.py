"""Shared subspaces on real servers: turns stay in their budget, facts are recalled, ranks stay in step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import krul_sglang
from benchmarks.serving.configuration import Configuration
from benchmarks.serving.divergence import ComparedTurn, Predictions, ask_and_compare, divergences, predictions
from benchmarks.serving.servers import Server
from demo.app import BUNDLED_CONVERSATIONS
from demo.conversations import Conversation, load_conversations
from demo.player import Player
from demo.server import ServerProcess
from demo.sizing import load_token_encoder
from krul_sglang.config import KrulConfig
from krul_sglang.engine.budget.correction import HISTORIES_TO_LOOSEN, kind_of_text
from krul_sglang.learning.command import NUM_PIECES, cut_pieces, learn_to_files, own_texts
from krul_sglang.models.checkpoint import Checkpoint
from krul_sglang.models.find import REFERENCE_MODEL
from tests.support.faulty_server import FAULTS
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    STRICT,
    STRICT_ON_TWO_CORES,
    ask,
    assert_nothing_left_behind,
    bases_server_args,
    krul_stats,
    play_chats,
    push_out,
    random_prompt,
    recall_facts,
    request_payload,
    settled_stats,
    wait_for_probes,
)
from tests.support.tiny_model import build_tiny_model

POOL_TOKENS = 4096
ERROR_BUDGET = 0.05
TOKEN_BYTES = 12 * 2 * 64 * 2 * 4  # layers x KV heads x channels x (K, V) x bytes of float32
TINY_TOKEN_BYTES = 4 * 2 * 64 * 2 * 4


def learn(
    model: Path, cache_dir: Path, tp_size: int = 1, num_pieces: int = 4, texts: Sequence[Path] = ()
) -> None:
    """Learn bases, from little text, which is fast, to where a server with this cache looks for them."""
    lines = learn_to_files(
        Checkpoint(str(model)), None, num_pieces=num_pieces, tp_size=tp_size, cache_dir=cache_dir, texts=texts
    )
    assert sum(line.startswith("wrote ") for line in lines) == tp_size


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    cache_dir = tmp_path_factory.mktemp("krul-cache")
    learn(REFERENCE_MODEL, cache_dir)
    args = bases_server_args(POOL_TOKENS, cache_dir, error_budget=ERROR_BUDGET, probe_share=1)
    with ForkedServer(REFERENCE_MODEL, args=args, env=STRICT) as running:
        yield running


def test_a_conversation_has_one_budget_however_often_it_returns(server: ServerProcess) -> None:
    """Each turn starts from what the segments that came back lossy cost now, and adds its own damage.

    Probes move the factor that all expected damage is multiplied by, so damage is compared without it.
    """
    # Bases from so little text may expect far less damage of random tokens than there is. Then what the first
    # probes find leaves nothing for later turns.
    num_probes = 0
    for number in range(6):
        ask(server, random_prompt(("probed", number), 320))
        num_probes = wait_for_probes(server, num_probes)
    history = random_prompt("one budget", 320)
    spent, num_tokens = 0.0, 0
    for turn in range(4):
        before = settled_stats(server)
        num_stored = before["offload"]["tokens"]
        answer = ask(server, history)
        assert turn == 0 or answer.host_tokens > 300
        stats = settled_stats(server)
        num_new = stats["offload"]["tokens"] - num_stored
        # What earlier turns cost is shared among more tokens.
        spent *= num_tokens / (num_tokens + num_new)
        num_tokens += num_new
        budget = stats["compression"]["budget"]
        factor = budget["last_factor"]
        assert budget["last_spent"] / factor == pytest.approx(spent)
        assert budget["last_damage"] > 0
        spent += budget["last_damage"] / factor
        # A turn gets nine tenths of what is left, and its step is chosen by a sample of its tokens.
        assert 0.8 * ERROR_BUDGET / 1.3 < spent * factor <= 1.3 * ERROR_BUDGET
        history += [*answer.output_ids, *random_prompt(("more", turn), 64)]
        push_out(server, num_tokens=POOL_TOKENS, seed=("one budget", turn))
    assert_nothing_left_behind(server)


def test_an_idle_server_measures_what_compression_costs(server: ServerProcess) -> None:
    conversations = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=4, turns=2)
    num_probes = krul_stats(server)["compression"]["budget"]["probes"]
    for conversation in conversations:
        with Player(server.url, max_tokens=48) as player:
            list(play_chats(player, [conversation]))
        num_probes = wait_for_probes(server, num_probes)
        budget = krul_stats(server)["compression"]["budget"]
        assert 0 < budget["last_kl"] < math.inf
        assert 0 < budget["last_expected"] < 2 * ERROR_BUDGET


def test_facts_are_recalled_from_compressed_history(server: ServerProcess) -> None:
    right, num_asked = recall_facts(server, num_conversations=10)
    assert len(right) > num_asked // 3
    # The same bound as for the lossless server (test_bundled_model.py).
    assert sum(right) / len(right) > 0.8
    stats = settled_stats(server)
    assert stats["compression"]["subspace_turns"] > 0.8 * stats["compression"]["turns"]
    assert stats["stored_bytes"] < stats["stored_tokens"] * TOKEN_BYTES / 10
    assert_nothing_left_behind(server)


def test_what_memory_nothing_else_needs_keeps_comes_back_as_it_was(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Two ranks keep native copies of their heads, until turns of others need the memory."""
    learn(tiny_models["float32"], tmp_path, tp_size=2)
    options = {
        "probe_share": 0,
        "host_memory": "16MiB",
        # What was used longest ago leaves first, however often it was used.
        "eviction": "lru",
        "fast_copies": "auto",
    }
    args = (*bases_server_args(2048, tmp_path, error_budget=4, **options), "--tp", "2")
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT_ON_TWO_CORES) as server:
        history = random_prompt("kept twice", 320)
        computed = ask(server, history)
        push_out(server, num_tokens=2048, seed="leaves the device")
        stats = settled_stats(server)
        assert stats["compression"]["subspace_turns"] == stats["compression"]["turns"]
        # The store counts both ranks, the offloader its own.
        assert stats["fast_copy_bytes"] == 2 * stats["offload"]["fast_copy_bytes"]
        assert stats["fast_copy_bytes"] > 4 * stats["stored_bytes"]
        exact = ask(server, history)
        assert exact.host_tokens > 300
        assert exact.output_ids == computed.output_ids
        assert exact.logprobs == pytest.approx(computed.logprobs, abs=1e-3)
        for others in range(3):
            push_out(server, num_tokens=2048, seed=others)
        stats = settled_stats(server)
        assert stats["fast_copy_bytes"] < 2 * stats["offload"]["fast_copy_bytes"]
        assert stats["evicted_segments"] == 0
        decoded = ask(server, history)
        assert decoded.host_tokens > 300
        assert decoded.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-4)
        assert_nothing_left_behind(server)


def test_two_ranks_choose_probe_and_restore_together(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    learn(tiny_models["float32"], tmp_path, tp_size=2)
    # The bases know little of random tokens: they are off by almost a nat, and a small budget leaves them
    # native.
    args = (*bases_server_args(2048, tmp_path, error_budget=4, probe_share=1), "--tp", "2")
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT_ON_TWO_CORES) as server:
        history = random_prompt("two ranks", 500)
        for turn in range(3):
            answer = ask(server, history)
            assert turn == 0 or answer.host_tokens > 480
            # What is kept for a probe stays on the device until the server has been idle. Later turns are not
            # probed: what came back is no truth.
            settled_stats(server)
            wait_for_probes(server, 0)
            history += [*answer.output_ids, *random_prompt(("question", turn), 37)]
            push_out(server, num_tokens=2048, seed=turn)
        stats = settled_stats(server)
        assert stats["compression"]["subspace_turns"] == stats["compression"]["turns"]
        assert math.isfinite(stats["compression"]["budget"]["last_kl"])
        # Of one rank: half of the heads.
        assert stats["stored_bytes"] < stats["stored_tokens"] * TINY_TOKEN_BYTES / 2 / 4
        assert_nothing_left_behind(server)


DIVERGENCE_POOL = 1024
"""Tokens of a pool that holds two of the conversations that are compared, but not all of them."""
LOSSY = 1e-6
"""A divergence above what rounding leaves, in nats."""


@pytest.fixture(scope="module")
def learned_from_chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory with bases of two ranks, from the chats that come with the program, without its
    source: so chats are familiar, whatever the source says."""
    cache_dir = tmp_path_factory.mktemp("krul-cache")
    chats = Path(krul_sglang.__file__).parent / "assets" / "chats.json"
    learn(REFERENCE_MODEL, cache_dir, tp_size=2, num_pieces=NUM_PIECES, texts=[chats])
    return cache_dir


@pytest.fixture(scope="module")
def learned_from_other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, from source that does not change: each change of this program's draws other bases, which lose
    more of the chats that are compared or less."""
    cache_dir, spec = tmp_path_factory.mktemp("krul-cache"), find_spec("sglang.srt.managers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    texts = sorted(Path(spec.submodule_search_locations[0]).glob("*.py"))
    learn(REFERENCE_MODEL, cache_dir, tp_size=2, num_pieces=NUM_PIECES, texts=texts)
    return cache_dir


@pytest.fixture(scope="module")
def control() -> Iterator[ServerProcess]:
    """It never evicts anything."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384")
    with ForkedServer(REFERENCE_MODEL, args=args) as running:
        yield running


def two_ranks(cache_dir: Path, error_budget: float) -> ForkedServer:
    """They probe each turn whose KV is exact. What comes back from the host is always decoded."""
    options = {"error_budget": error_budget, "probe_share": 1, "relearn": False}
    args = (*bases_server_args(DIVERGENCE_POOL, cache_dir, **options), "--tp", "2")
    return ForkedServer(REFERENCE_MODEL, args=args, env=STRICT_ON_TWO_CORES)


def restored_turns(
    control: ServerProcess, server: ServerProcess, conversations: Sequence[Conversation]
) -> list[ComparedTurn]:
    """Turns that came back from the host, with their divergence from what the control predicts there."""
    encode, _ = load_token_encoder(str(REFERENCE_MODEL))
    servers = [Server("device", 0, None, control), Server("compressed", 0, {}, server)]
    configuration = Configuration(
        str(REFERENCE_MODEL), tuple(each.name for each in servers), client="divergence", max_tokens=8
    )
    compared = ask_and_compare(servers, configuration, conversations, encode, lambda line: None)
    return [turn for turn in compared["compressed"] if turn.is_restored]


def probe_chats(server: ServerProcess, conversations: Sequence[Conversation]) -> None:
    """Let a server measure what compression costs the first turns of conversations."""
    encode, _ = load_token_encoder(str(REFERENCE_MODEL))
    for conversation in conversations:
        ask(server, encode(conversation.messages(1, {})), max_new_tokens=8)
        settled_stats(server)


def test_what_two_ranks_restore_diverges_by_less_than_the_default_budget(
    control: ServerProcess, learned_from_other_text: Path
) -> None:
    """The whole divergence of both ranks' errors together, after few chats were probed. The reference model
    loses more of its own kind of text than its bases expect, until probes have shown it."""
    chats = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=14, turns=4)
    with two_ranks(learned_from_other_text, KrulConfig().error_budget) as server:
        probe_chats(server, chats[6:])
        restored = restored_turns(control, server, chats[:6])
        assert len(restored) >= 12
        divergence = [turn.kl for turn in restored]
        assert sum(kl > LOSSY for kl in divergence) > len(restored) / 2
        assert LOSSY < statistics.fmean(divergence) < KrulConfig().error_budget
        assert_nothing_left_behind(server)


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_decoded_wrong_is_far_over_the_budget(
    control: ServerProcess, tmp_path: Path, fault: str
) -> None:
    """The other tests would show a fault by what they measure. The server's own probes do, too."""
    chats = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=6, turns=2)
    learn(REFERENCE_MODEL, tmp_path)
    args = bases_server_args(DIVERGENCE_POOL, tmp_path, error_budget=ERROR_BUDGET, probe_share=1)
    server = ForkedServer(REFERENCE_MODEL, args=args, env={**STRICT, "FAULT": fault})
    server.command[server.command.index("sglang.launch_server")] = "tests.support.faulty_server"
    with server:
        restored = restored_turns(control, server, chats)
        assert restored
        assert restored[0].kl > 3 * ERROR_BUDGET
        budget = settled_stats(server)["compression"]["budget"]
        assert budget["correction"]["varied"]["factor"] > 3
        assert_nothing_left_behind(server)


def test_a_predictable_history_that_is_probed_again_and_again_does_not_loosen_the_budget_of_chats(
    control: ServerProcess, learned_from_chats: Path
) -> None:
    """Text that repeats loses less than chats do. If each probe of it counted, chats would be taken to lose a
    fraction of what they do."""
    chats = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=21, turns=3)
    encode, _ = load_token_encoder(str(REFERENCE_MODEL))
    text = encode(chats[20].messages(2, {1: "I will remember that."}))
    predictable = (3 * text)[:960]
    assert kind_of_text(np.array(predictable)) == "varied", "it would not count for chats"
    with two_ranks(learned_from_chats, ERROR_BUDGET) as server:

        def factor() -> float:
            of_kinds = krul_stats(server)["compression"]["budget"]["correction"]
            return float(of_kinds["varied"]["factor"])

        probe_chats(server, chats[12:18])
        before = factor()
        num_probes = krul_stats(server)["compression"]["budget"]["probes"]
        for _ in range(HISTORIES_TO_LOOSEN + 1):
            ask(server, predictable, max_new_tokens=8)
            num_probes = wait_for_probes(server, num_probes)
            budget = krul_stats(server)["compression"]["budget"]
            # It says that less is lost than the factor does.
            assert budget["last_kl"] < budget["last_expected"]
        assert factor() >= before > 1.0
        restored = restored_turns(control, server, chats[:6])
        assert len(restored) >= 8
        assert LOSSY < statistics.fmean(turn.kl for turn in restored) < ERROR_BUDGET
        assert_nothing_left_behind(server)


def test_a_history_of_more_than_8192_tokens_comes_back_from_bases(tmp_path: Path) -> None:
    """All of it, and what is predicted after it has changed by less than the budget."""
    model = build_tiny_model(tmp_path / "long", max_positions=16384)
    learn(model, tmp_path)
    num_history, pool_tokens, error_budget = 8400, 9216, 0.1
    (ids,) = cut_pieces(AutoTokenizer.from_pretrained(model), own_texts(), num_history + 64, 1)
    wanted = {"logprob_start_len": num_history - 1, "top_logprobs_num": 512, "max_new_tokens": 1}
    args = bases_server_args(pool_tokens, tmp_path, error_budget=error_budget, relearn=False)

    def ask_all(server: ServerProcess) -> tuple[dict[str, int], Predictions]:
        said = server.post_json("/generate", request_payload(ids, **wanted))
        found = said["meta_info"]["cached_tokens_details"] or {}
        return found, predictions(said, with_output=True)

    with ForkedServer(model, args=args, env=STRICT) as server:
        num_compressed = settled_stats(server)["compression"]["subspace_turns"]
        found, computed = ask_all(server)
        assert found == {}
        assert settled_stats(server)["compression"]["subspace_turns"] == num_compressed + 1
        push_out(server, num_tokens=pool_tokens, seed="long")
        found, restored = ask_all(server)
        assert found == {"device": 0, "host": num_history // 16 * 16 - 16}
        assert LOSSY < divergences(computed, restored).mean() < error_budget
        assert_nothing_left_behind(server)
