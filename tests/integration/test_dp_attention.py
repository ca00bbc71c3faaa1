"""DP attention: a conversation comes back on the rank that it lands on, and no rank waits in vain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.divergence import divergences, predictions
from demo.server import ServerProcess, krul_states, wait_for_saves
from krul_sglang.learning.command import learn_to_files
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    MTP,
    PAGE_SIZE,
    POOL_TOKENS,
    STRICT_ON_TWO_CORES,
    Answer,
    ask,
    assert_aborts_leave_nothing,
    assert_same,
    bases_server_args,
    push_out,
    random_prompt,
    request_payload,
    small_krul_server_args,
    wait_until,
    wait_until_written,
)
from tests.support.server_plugin import WITH_PLUGIN, faulty_loads
from tests.support.tiny_model import build_latent_model, build_tiny_model

DP_ATTENTION = ("--tp", "2", "--dp-size", "2", "--enable-dp-attention")
IN_PAIRS = ("--tp", "4", "--attn-dp-size", "2")
"""Two ranks share the heads of each request."""
PAIRS_ON_TWO_CORES = {**STRICT_ON_TWO_CORES, "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}
RANKS_OF_TURNS = (0, 0, 1, 0)
"""The data-parallel rank that each turn of a conversation lands on."""
TOGETHER = tuple(random_prompt(("together", rank), 500 + 70 * rank) for rank in range(2))
LONG = random_prompt("long", 40)


@dataclass(frozen=True)
class Mode:
    """``fault``: see ``faulty_loads``. ``num_sharing``: ranks that share the heads of a request. ``drafts``:
    a layer of the model's own predicts ahead."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    fault: str | None = None
    num_sharing: int = 1
    drafts: bool = False


MODES = {
    "experts": Mode("experts"),
    "latent": Mode("latent"),
    "latent-drafting": Mode("latent", drafts=True),
    "experts-in-pairs-failing-loads": Mode("experts", fault="load-error", num_sharing=2),
    "experts-stuck-loads": Mode("experts", {"load_timeout": 0.5}, "load-stall"),
}


@dataclass(frozen=True)
class Played:
    """``together``: answers of both ranks at once, each to a prompt that the other had seen. ``beside``: of a
    rank that restores while the other decodes ``long``."""

    turns: list[Answer]
    together: list[Answer]
    beside: Answer
    long: Answer

    def all(self) -> list[Answer]:
        return [*self.turns, *self.together, self.beside, self.long]


def play(server: ServerProcess, *, has_ranks: bool) -> Played:
    """A conversation that changes its rank, two that return at once, and one that returns beside another.

    A rank that has seen a prompt before has lost it from its pool. Without ranks, nothing is lost.
    """

    def ask_rank(rank: int, prompt: list[int], num_new: int = 12) -> Answer:
        routed = {"routed_dp_rank": rank} if has_ranks else {}
        answer = ask(server, prompt, max_new_tokens=num_new, **routed)
        wait_for_saves(server)
        return answer

    def evict(rank: int, seed: object) -> None:
        if has_ranks:
            push_out(server, num_tokens=POOL_TOKENS, seed=seed, routed_dp_rank=rank)

    turns: list[Answer] = []
    history = random_prompt("conversation", 611)
    for turn, rank in enumerate(RANKS_OF_TURNS):
        if rank in RANKS_OF_TURNS[:turn]:
            evict(rank, turn)
        turns.append(ask_rank(rank, history))
        history = [*history, *turns[-1].output_ids, *random_prompt(("turn", turn), 37)]
    for rank, prompt in enumerate(TOGETHER):
        ask_rank(rank, prompt, 1)
    again = [[*prompt, *prompt[:19]] for prompt in TOGETHER]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda rank: ask_rank(1 - rank, again[rank]), range(2)))
        evict(0, "beside")
        long = pool.submit(ask_rank, 1, LONG, 60)
        beside = ask_rank(0, [*again[0], *again[0][:23]])
        return Played(turns, together, beside, long.result())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "experts": build_tiny_model(root / "experts", num_kv_heads=4, num_experts=4),
        "latent": build_latent_model(root / "latent", q_lora_rank=96, num_experts=4, predicts_ahead=True),
    }


@pytest.fixture(scope="module")
def kept(models: dict[str, Path]) -> dict[str, Played]:
    """What a server of a single rank answers that never evicts anything."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    played = {}
    for name, model in models.items():
        with ForkedServer(model, args=args) as server:
            played[name] = play(server, has_ranks=False)
    return played


@dataclass(frozen=True)
class Served:
    """``states``: krul's counters of each rank."""

    mode: Mode
    kept: Played
    played: Played
    states: list[dict[str, Any]]
    log: str


@pytest.fixture(
    scope="module",
    params=["experts", "experts-in-pairs-failing-loads", "latent-drafting"]
    + [pytest.param(name, marks=pytest.mark.long) for name in ("latent", "experts-stuck-loads")],
)
def served(request: pytest.FixtureRequest, models: dict[str, Path], kept: dict[str, Played]) -> Served:
    mode = MODES[request.param]
    is_alone = mode.num_sharing == 1
    args = (*small_krul_server_args(POOL_TOKENS, mode.options), *(DP_ATTENTION if is_alone else IN_PAIRS))
    args += MTP if mode.drafts else ()
    plugin = WITH_PLUGIN if mode.fault is None else faulty_loads(mode.fault)
    env = (STRICT_ON_TWO_CORES if is_alone else PAIRS_ON_TWO_CORES) | plugin
    with ForkedServer(models[mode.model], args=args, env=env) as server:
        played = play(server, has_ranks=True)
        # A load that was given up while it was stuck keeps its lease until it wakes.
        wait_until(lambda: not leases(wait_for_saves(server)), "leases of stuck loads")
        if mode.fault is None:
            assert_aborts_leave_nothing(server, can_fail=False)
        return Served(mode, kept[mode.model], played, wait_for_saves(server), server.log_text())


def leases(states: list[dict[str, Any]]) -> int:
    return sum(int(state["num_leases"] + state["waiting_leases"]) for state in states)


def test_every_answer_is_that_of_a_server_that_never_evicted(served: Served) -> None:
    assert_same(served.kept.all(), served.played.all())
    assert len({answer.output_ids for answer in served.kept.all()}) == len(served.kept.all())


def test_what_returns_comes_from_the_host_on_either_rank(served: Served) -> None:
    later = [*served.played.turns[1:], *served.played.together, served.played.beside]
    assert [answer.device_tokens for answer in later] == [0] * len(later)
    came = [answer.host_tokens > 400 for answer in later]
    assert any(came) if served.mode.fault else all(came)


def test_prefixes_are_loaded_whole_and_one_line_says_why(served: Served) -> None:
    for state in served.states:
        assert state["restore"]["mode"]["planner"] == "full-load"
        assert "DP attention" in state["restore"]["mode"]["why"]
        assert state["restore"]["forward"]["head_tokens"] == 0
    (line,) = (line for line in served.log.splitlines() if "cannot be recomputed" in line)
    assert "loaded whole" in line
    assert "Traceback" not in served.log.split("injected at")[0]


def test_a_load_that_fails_is_computed_with_its_prompt(served: Served) -> None:
    forwards = [state["restore"]["forward"] for state in served.states]
    failed = sum(forward["rescued_requests"] for forward in forwards)
    loads = sum(state["restore"]["plans"]["loads"] for state in served.states)
    assert 0 < failed < loads if served.mode.fault else failed == 0
    assert sum(forward["lost_requests"] for forward in forwards) == 0
    computed = [answer for answer in served.played.all() if not answer.host_tokens]
    # Beside these the first turn, and what was never stored.
    assert len(computed) == 2 + failed


def test_drafts_come_back_with_what_they_follow(served: Served) -> None:
    drafts = [state["draft"] for state in served.states]
    if not served.mode.drafts:
        assert drafts == [None, None]
        return
    loaded = [state["load"]["tokens"] for state in served.states]
    assert [draft["restored_tokens"] for draft in drafts] == loaded
    assert all(draft["missing_tokens"] == draft["failed_loads"] == 0 for draft in drafts)
    assert all(draft["after_restores"]["accepted"] > draft["after_restores"]["forwards"] for draft in drafts)


def test_ranks_of_one_host_share_a_daemon_and_what_it_keeps(served: Served) -> None:
    assert len(served.states) == 2
    assert len({state["daemon"]["endpoint"] for state in served.states}) == 1
    assert served.log.count("keeps stored KV") == 1
    assert {(state["tp_rank"], state["tp_size"]) for state in served.states} == {(0, served.mode.num_sharing)}
    # Both have loaded, so one of them what the other had stored: see ``RANKS_OF_TURNS``.
    assert all(state["load"]["requests"] > 0 for state in served.states)


def test_turns_come_back_from_bases_on_the_other_rank(models: dict[str, Path], tmp_path: Path) -> None:
    assert list(learn_to_files(Checkpoint(str(models["latent"])), None, num_pieces=4, cache_dir=tmp_path))
    args = (*bases_server_args(POOL_TOKENS, tmp_path, error_budget=0.01, relearn=False), *DP_ATTENTION, *MTP)
    wanted = {"logprob_start_len": 500, "top_logprobs_num": 512, "max_new_tokens": 1}
    prompts = [random_prompt(("in bases", number), 500) for number in range(3)]
    with ForkedServer(models["latent"], args=args, env=STRICT_ON_TWO_CORES) as server:

        def ask_rank(rank: int, ids: list[int]) -> Any:
            said = server.post_json("/generate", request_payload(ids, **wanted, routed_dp_rank=rank))
            wait_for_saves(server)
            return said

        for prompt in prompts:
            ask_rank(0, prompt)
        histories = [[*prompt, *random_prompt("added", 64)] for prompt in prompts]
        computed, decoded = ([ask_rank(rank, history) for history in histories] for rank in range(2))
        states = wait_for_saves(server)
        assert_aborts_leave_nothing(server, can_fail=False)
    from_host = [said["meta_info"]["cached_tokens_details"]["host"] for said in (*computed, *decoded)]
    assert from_host == 3 * [0] + 3 * [496]
    pairs = [
        [predictions(said, with_output=True) for said in pair] for pair in zip(computed, decoded, strict=True)
    ]
    assert 1e-5 < sum(divergences(*pair).mean() for pair in pairs) / 3 < 0.015
    offloads, compressions = ([state[name] for state in states] for name in ("offload", "compression"))
    num_bytes, tokens = (sum(offload[name] for offload in offloads) for name in ("num_bytes", "tokens"))
    assert num_bytes * PAGE_SIZE < tokens * offloads[0]["page_bytes"] / 3
    assert sum(compression["subspace_turns"] for compression in compressions) >= 3
    assert [compression["budget"]["probes"] for compression in compressions] == [0, 0]


def test_a_single_rank_finds_what_two_have_stored(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"ssd_dir": str(tmp_path), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    args = small_krul_server_args(POOL_TOKENS, options)
    prompt = random_prompt("two ranks", 500)
    with ForkedServer(models["experts"], args=(*args, *DP_ATTENTION), env=STRICT_ON_TWO_CORES) as server:
        first = ask(server, prompt, routed_dp_rank=1)
        wait_until_written(server)
        assert len(krul_states(server.server_info())) == 2
    with ForkedServer(models["experts"], args=args) as server:
        again = ask(server, prompt)
    assert again.host_tokens > 400
    assert_same([first], [again])
