"""Models with recurrent layers: conversations come back at boundaries, as on a server that never evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from demo.server import ServerError, ServerProcess
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    NGRAM,
    NUM_TURNS,
    POOL_TOKENS,
    STRICT,
    STRICT_ON_TWO_CORES,
    Answer,
    Played,
    abort_side_by_side,
    ask,
    ask_again,
    assert_aborts_leave_nothing,
    assert_nothing_left_behind,
    assert_same,
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
from tests.support.tiny_model import (
    build_delta_rule_model,
    build_hybrid_model,
    build_mamba_model,
    build_mtp_model,
)

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


LARGER_PAGES = ("--page-size", "16", "--chunked-prefill-size", "256")
TREES = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "4")
MTP = (
    *("--speculative-algorithm", "NEXTN"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
DRAFTING = {
    "NGRAM, delta rule": (build_delta_rule_model, (*ARGS, *TREES)),
    "NGRAM, Mamba-2": (build_mamba_model, (*ARGS, *TREES)),
    "MTP, delta rule": (build_mtp_model, (*ARGS, *MTP)),
    "MTP, delta rule, states amid prompts": (build_mtp_model, (*LARGER_PAGES, *MTP)),
}


def ask_with_overshoot(server: ServerProcess) -> list[Answer]:
    """A prompt again, with another salt. Its answer is drafted, and ends before what is accepted does."""
    prompt = random_prompt("overshoot", FIRST_TURN)
    answers = [ask(server, prompt, max_new_tokens=10, cache_salt=salt) for salt in ("one", "other")]
    push_out(server, num_tokens=POOL_TOKENS, seed="overshoot")
    history = [*prompt, *answers[1].output_ids, *random_prompt("behind", 20)]
    return [*answers, ask(server, history, max_new_tokens=10, cache_salt="other")]


@pytest.mark.parametrize(("build_model", "args"), DRAFTING.values(), ids=DRAFTING)
def test_states_are_those_of_boundaries_also_where_drafts_were_accepted(
    build_model: Callable[[Path], Path],
    args: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(*EXACT)
    model = build_model(tmp_path / "model")
    never_evicts = ("--dtype", "float32", "--max-total-tokens", "16384", "--enable-cache-report")
    undrafted = args[: args.index("--speculative-algorithm")]
    with ForkedServer(model, args=(*never_evicts, *undrafted)) as server:
        kept, overshot = play_all(server, evict=False), ask_with_overshoot(server)
    for fails in (False, True):
        env = {**STRICT, **(faulty_loads("load-error") if fails else {})}
        with ForkedServer(model, args=(*small_krul_server_args(POOL_TOKENS, {}), *args), env=env) as server:
            played = play_all(server, evict=True)
            again = ask_again(server, played.turns, evict=True)
            overshot_again = ask_with_overshoot(server)
            stats = settled_stats(server)
            assert_aborts_leave_nothing(server, can_fail=fails)
        assert_close(kept.all(), played.all())
        assert [answer.output_ids for answer in again] == [answer.output_ids for answer in kept.turns]
        assert_close(overshot, overshot_again)
        assert sum(answer.num_accepted for answer in again) > 4 * NUM_TURNS
        assert stats["states"]["restored"] > 5
        assert (stats["restore"]["forward"]["rescued_requests"] > 0) == fails
        if not fails:
            assert min(answer.host_tokens for answer in (*played.turns[1:], *again[1:])) > 500
        if not fails and "NGRAM" in args:
            # What was accepted behind the answer's end has changed its state: that of the prompt is the last.
            assert overshot_again[2].host_tokens == FIRST_TURN


def test_drafts_that_part_are_refused_where_sglang_takes_them_for_a_chain(model: Path) -> None:
    is_of_convolutions = "Lfm2" in (model / "config.json").read_text()
    breadth = "4" if is_of_convolutions else "1"
    with pytest.raises(ServerError, match="if each draft followed the one before it"):  # noqa: SIM117
        with serving(model, (*NGRAM, "--speculative-ngram-max-bfs-breadth", breadth)):
            pass
