"""Models with recurrent layers: conversations come back at boundaries, as on a server that never evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks.serving.divergence import Predictions, divergences, predictions
from demo.server import ServerError, ServerProcess
from krul_sglang.learning.command import learn_to_files
from krul_sglang.models.checkpoint import Checkpoint
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
    bases_server_args,
    play,
    play_all,
    push_out,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
    wait_until,
    wait_until_idle,
)
from tests.support.server_plugin import LEFT_OUT_STATES, SPOILED_STATES, faulty_loads
from tests.support.tiny_model import build_delta_rule_model, build_hybrid_model, build_mamba_model

# SGLang keeps no states amid prompts here, and so takes no larger pages and no overlap. Prompts are cut alike
# everywhere: short convolutions make much of a rounding.
ARGS = ("--page-size", "1", "--disable-overlap-schedule", "--chunked-prefill-size", "256")
EXACT = ("SGLANG_MAMBA_CONV_DTYPE", "float32")
"""In bfloat16, as by default, where a prompt is cut would change logprobs by some 1e-3; so by 5e-6."""
FIRST_TURN, NEW_TOKENS = 500, 12
BOUNDARY = FIRST_TURN + NEW_TOKENS - 1
"""Of ``branch``: the last token of a turn is computed by the next one."""


RECURRENT = {"delta rule": build_delta_rule_model, "Mamba-2": build_mamba_model}


@pytest.fixture(scope="module", params=["convolutions", *RECURRENT])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("hybrid-model") / "model"
    if request.param == "convolutions":
        yield build_hybrid_model(path)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*EXACT)
        yield RECURRENT[request.param](path)


def assert_close(expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
    """As ``assert_same``, where prompts are computed in other pieces. Without krul these logprobs differ by
    5e-4 between two sizes of chunks."""
    for wanted, found in zip(expected, actual, strict=True):
        assert found.output_ids == wanted.output_ids
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=5e-3)


@dataclass(frozen=True)
class Branched:
    """Answers to a conversation of two turns, to a prompt that leaves it in its second turn, to one that has
    another answer in its first, and to one that leaves it in the first prompt."""

    first: Answer
    second: Answer
    from_second: Answer
    from_prompt: Answer
    from_first: Answer

    def all(self) -> list[Answer]:
        return [self.first, self.second, self.from_second, self.from_prompt, self.from_first]


def branch(server: ServerProcess, *, evict: bool) -> Branched:
    prompt = random_prompt("branch", FIRST_TURN)
    first = ask(server, prompt, max_new_tokens=NEW_TOKENS)
    history = [*prompt, *first.output_ids, *random_prompt("second", 60)]
    second = ask(server, history, max_new_tokens=NEW_TOKENS)
    answers = []
    for num_shared in (BOUNDARY + 30, FIRST_TURN, FIRST_TURN - 100):
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=("branch", num_shared))
        other = [*history[:num_shared], *random_prompt(("other", num_shared), 40)]
        answers.append(ask(server, other, max_new_tokens=NEW_TOKENS))
    return Branched(first, second, *answers)


@pytest.fixture(scope="module")
def kept(model: Path) -> Iterator[tuple[Played, Branched]]:
    """What a server answers that never evicts anything."""
    args = ("--dtype", "float32", "--max-total-tokens", "16384", "--enable-cache-report", *ARGS)
    with ForkedServer(model, args=args) as server:
        yield play_all(server, evict=False), branch(server, evict=False)


def serving(
    model: Path, args: tuple[str, ...] = (), env: dict[str, str] | None = None, **options: Any
) -> ForkedServer:
    all_args = (*small_krul_server_args(POOL_TOKENS, options), *ARGS, *args)
    return ForkedServer(model, args=all_args, env=STRICT if env is None else env)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serving(model) as server:
        yield server


@pytest.fixture(scope="module")
def played(server: ServerProcess) -> Played:
    return play_all(server, evict=True)


def test_every_turn_answers_as_on_a_server_that_never_evicted(
    kept: tuple[Played, Branched], played: Played
) -> None:
    assert_same(kept[0].all(), played.all())
    assert len({answer.output_ids for answer in kept[0].turns}) == NUM_TURNS


def test_the_engine_computes_what_transformers_does(model: Path, kept: tuple[Played, Branched]) -> None:
    """Or else all answers could be equally wrong."""
    from transformers import AutoModelForCausalLM

    prompt = random_prompt("conversation", 611)
    output = AutoModelForCausalLM.from_pretrained(model).generate(
        torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None
    )
    assert tuple(output[0, len(prompt) :].tolist()) == kept[0].turns[0].output_ids


def test_returning_turns_came_from_the_host(server: ServerProcess, played: Played) -> None:
    """Each up to the end of the turn before; also behind what is on the device."""
    assert [answer.host_tokens for answer in played.turns] == [0, 622, 671, 720, 769]
    assert (played.partial.device_tokens, played.partial.host_tokens) == (300, 600)
    assert [answer.host_tokens for answer in played.together] == [400, 530, 660]
    stats = settled_stats(server)
    states = stats["states"]
    assert states["restored"] == 8
    assert states["num_bytes"] == states["stored"] * states["state_bytes"]
    assert (states["dropped_turns"], states["failed_loads"]) == (0, 0)
    assert stats["restore"]["mode"]["planner"] == "full-load"
    assert "recurrent layers" in stats["restore"]["mode"]["why"]


def test_prompts_that_part_in_a_turn_go_on_from_an_earlier_boundary(
    server: ServerProcess, played: Played, kept: tuple[Played, Branched]
) -> None:
    branched = branch(server, evict=True)
    assert_same(kept[1].all(), branched.all())
    assert branched.from_second.host_tokens == BOUNDARY
    assert branched.from_prompt.host_tokens == FIRST_TURN
    assert branched.from_first.host_tokens == 0


def test_aborts_leave_nothing(server: ServerProcess, played: Played) -> None:
    prompt = random_prompt("disconnect", 600)
    expected = ask(server, prompt)
    push_out(server, num_tokens=POOL_TOKENS, seed="disconnect")
    payload = request_payload([*prompt, *expected.output_ids], max_new_tokens=1000, stream=True)
    with httpx.stream("POST", f"{server.url}/generate", json=payload, timeout=60, trust_env=False) as reply:
        next(reply.iter_lines())
    abort_side_by_side(server, 6, max_new_tokens=600)
    wait_until_idle(server)
    assert_nothing_left_behind(server)


def test_states_come_back_from_the_disk_after_a_restart(
    model: Path, kept: tuple[Played, Branched], tmp_path: Path
) -> None:
    options = {"ssd_dir": str(tmp_path), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    prompt = random_prompt("branch", FIRST_TURN)
    with serving(model, **options) as server:
        first = ask(server, prompt, max_new_tokens=NEW_TOKENS)
        # The turn's KV, its state and that of its prompt.
        wait_until(
            lambda: settled_stats(server)["tiers"][0]["written_segments"] >= 3,
            "a turn and its states to be written",
        )
    history = [*prompt, *first.output_ids, *random_prompt("second", 60)]
    with serving(model, **options) as server:
        second = ask(server, history, max_new_tokens=NEW_TOKENS)
        # The state was on its way before its load was planned.
        wait_until(lambda: settled_stats(server)["hints"] > 0, "a state to be brought ahead")
    assert_close(kept[1].all()[:2], [first, second])
    assert second.host_tokens == BOUNDARY


def test_a_wrong_state_is_computed_again(model: Path, kept: tuple[Played, Branched]) -> None:
    with serving(model, env={**STRICT, **SPOILED_STATES}) as server:
        turns = play(server, "conversation", evict=True)
        stats = settled_stats(server)
    assert_close(kept[0].turns, turns)
    assert (stats["states"]["restored"], stats["states"]["failed_loads"]) == (0, NUM_TURNS - 1)
    assert stats["restore"]["forward"]["rescued_requests"] == NUM_TURNS - 1
    assert stats["corrupted_segments"] == NUM_TURNS - 1


def ask_right_behind_a_turn(server: ServerProcess) -> Answer:
    """Two tokens are computed: convolutions remember little more than that of what was before."""
    prompt = random_prompt("behind", FIRST_TURN)
    first = ask(server, prompt, max_new_tokens=NEW_TOKENS)
    push_out(server, num_tokens=POOL_TOKENS, seed="behind")
    return ask(server, [*prompt, *first.output_ids, 7], max_new_tokens=NEW_TOKENS)


def test_without_their_states_the_answers_would_be_others(model: Path, server: ServerProcess) -> None:
    right = ask_right_behind_a_turn(server)
    with serving(model, env={**STRICT, **LEFT_OUT_STATES}) as without:
        wrong = ask_right_behind_a_turn(without)
    assert right.host_tokens == wrong.host_tokens == BOUNDARY
    assert max(abs(a - b) for a, b in zip(right.logprobs, wrong.logprobs, strict=True)) > 1e-2


@pytest.mark.parametrize(
    ("args", "env"), [((), STRICT), (("--tp", "2"), STRICT_ON_TWO_CORES)], ids=["one rank", "two ranks"]
)
def test_failed_loads_are_computed_from_the_state_before(
    model: Path, kept: tuple[Played, Branched], args: tuple[str, ...], env: dict[str, str]
) -> None:
    """Every second load fails; on one server that of a prefix whose beginning is on the device."""
    with serving(model, args, {**env, **faulty_loads("load-error")}) as server:
        played = play_all(server, evict=True)
        stats = settled_stats(server)
    assert_close(kept[0].all(), played.all())
    assert stats["restore"]["forward"]["rescued_requests"] > 0
    assert stats["states"]["restored"] > 0
    assert stats["num_leases"] == 0


@pytest.mark.parametrize("build_model", RECURRENT.values(), ids=RECURRENT)
def test_states_amid_prompts_allow_larger_pages_and_overlap(
    build_model: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's default: it keeps copies of states (``extra_buffer``), in a prompt at a multiple of 64 tokens.

    What lies behind the last one is not stored.
    """
    monkeypatch.setenv(*EXACT)
    model = build_model(tmp_path / "model")
    args = ("--page-size", "16", "--chunked-prefill-size", "256")
    never_evicts = ("--dtype", "float32", "--max-total-tokens", "16384", "--enable-cache-report", *args)
    with ForkedServer(model, args=never_evicts) as server:
        kept, expected = play_all(server, evict=False), branch(server, evict=False)
    with ForkedServer(model, args=(*small_krul_server_args(POOL_TOKENS, {}), *args), env=STRICT) as server:
        assert server.get_json("/server_info")["mamba_radix_cache_strategy"] == "extra_buffer"
        played, branched = play_all(server, evict=True), branch(server, evict=True)
        stats = settled_stats(server)
    assert_same(kept.all(), played.all())
    assert_close(expected.all(), branched.all())
    assert [answer.host_tokens for answer in played.turns] == [0, 576, 640, 704, 768]
    assert branched.from_prompt.host_tokens == FIRST_TURN // 64 * 64
    assert stats["states"]["restored"] >= 8
    assert (stats["states"]["failed_loads"], stats["num_leases"]) == (0, 0)


ERROR_BUDGET, NUM_ADDED = 0.01, 64
KV_BYTES = 2 * 2 * 2 * 64 * 4
"""Of a token: two layers, two heads of 64 with key and value, in float32."""


@dataclass(frozen=True)
class StoredInBases:
    """``computed``: what is predicted at the tokens that follow turns while their KV is on the device.
    ``decoded``: the same when it has left and come back. ``restarted``: on a server that finds on the disk
    what the first one stored, and spoils the states that it stores itself."""

    computed: list[tuple[int, Predictions]]
    decoded: list[tuple[int, Predictions]]
    stats: dict[str, Any]
    restarted: list[tuple[int, Predictions]]
    spoiled: tuple[Answer, Answer]
    restarted_stats: dict[str, Any]


def predicted(server: ServerProcess, histories: Sequence[list[int]]) -> list[tuple[int, Predictions]]:
    """Of each conversation the tokens that came from the host, and what is predicted at those it adds."""
    wanted = {"logprob_start_len": BOUNDARY, "top_logprobs_num": 512, "max_new_tokens": 1}
    said = [server.post_json("/generate", request_payload(ids, **wanted)) for ids in histories]
    return [
        (each["meta_info"]["cached_tokens_details"]["host"], predictions(each, with_output=True))
        for each in said
    ]


@pytest.fixture(scope="module")
def in_bases(model: Path, tmp_path_factory: pytest.TempPathFactory) -> StoredInBases:
    cache_dir = tmp_path_factory.mktemp("krul-cache")
    list(learn_to_files(Checkpoint(str(model)), None, num_pieces=4, cache_dir=cache_dir))
    disk = {"ssd_dir": str(cache_dir / "ssd"), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    args = bases_server_args(POOL_TOKENS, cache_dir, error_budget=ERROR_BUDGET, relearn=False, **disk)
    prompts = [random_prompt(("in bases", number), FIRST_TURN) for number in range(4)]
    with ForkedServer(model, args=(*args, *ARGS), env=STRICT) as server:
        histories = [
            [*prompt, *ask(server, prompt, max_new_tokens=NEW_TOKENS).output_ids] for prompt in prompts
        ]
        stats = settled_stats(server)
        histories = [[*history, *random_prompt("added", NUM_ADDED)] for history in histories]
        computed = predicted(server, histories)
        push_out(server, num_tokens=POOL_TOKENS, seed="in bases")
        decoded = predicted(server, histories)
        wait_until(
            lambda: settled_stats(server)["tiers"][0]["written_segments"] >= stats["committed_segments"],
            "turns and their states to be written",
        )
        assert_nothing_left_behind(server)
    with ForkedServer(model, args=(*args, *ARGS), env={**STRICT, **SPOILED_STATES}) as server:
        restarted = predicted(server, histories)
        prompt = random_prompt("spoiled", FIRST_TURN)
        prompt += [*ask(server, prompt).output_ids, *random_prompt("second", 60)]
        kept = ask(server, prompt)
        push_out(server, num_tokens=POOL_TOKENS, seed="spoiled")
        spoiled = kept, ask(server, prompt)
        restarted_stats = settled_stats(server)
    return StoredInBases(computed, decoded, stats, restarted, spoiled, restarted_stats)


def test_kv_comes_back_from_bases_within_its_budget(in_bases: StoredInBases) -> None:
    """And what is predicted behind it depends on the true states."""
    lost = []
    for (before, true), (after, found) in zip(in_bases.computed, in_bases.decoded, strict=True):
        assert (before, after) == (0, BOUNDARY)
        assert len(true.logprobs) == NUM_ADDED + 1
        lost.append(divergences(true, found).mean())
    assert ERROR_BUDGET / 3 < sum(lost) / len(lost) < 1.5 * ERROR_BUDGET


def test_kv_takes_fewer_bytes_in_bases_and_states_as_many(in_bases: StoredInBases) -> None:
    stats = in_bases.stats
    states, offload, budget = stats["states"], stats["offload"], stats["compression"]["budget"]
    assert states["num_bytes"] == states["stored"] * states["state_bytes"]
    assert offload["num_bytes"] < offload["tokens"] * KV_BYTES / 16
    assert stats["compression"]["subspace_turns"] >= 4
    assert (budget["probes"], budget["unrecorded_turns"]) == (0, 0)


def test_a_restarted_server_decodes_the_same_in_bases(in_bases: StoredInBases) -> None:
    for (_, found), (num_tokens, again) in zip(in_bases.decoded, in_bases.restarted, strict=True):
        assert num_tokens == BOUNDARY
        assert divergences(found, again).mean() < 1e-5


def test_kv_in_bases_is_of_no_use_without_its_state(in_bases: StoredInBases) -> None:
    kept, computed = in_bases.spoiled
    assert_close([kept], [computed])
    states = in_bases.restarted_stats["states"]
    assert (states["restored"], states["failed_loads"]) == (len(in_bases.restarted), 1)
    assert in_bases.restarted_stats["restore"]["forward"]["rescued_requests"] == 1


def test_pairs_of_layers_are_refused(model: Path) -> None:
    with pytest.raises(ServerError, match="hybrid model"), serving(model, strategy="krul"):
        pass
