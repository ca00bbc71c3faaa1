"""Models with recurrent layers, or windows in a pool of their own: conversations come back at boundaries, as
on a server that never evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
    LOGPROBS_WITHIN,
    MTP,
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
from tests.support.tiny_model import (
    build_delta_rule_model,
    build_eagle_pair,
    build_granite_model,
    build_hybrid_model,
    build_kimi_model,
    build_mamba_model,
    build_mtp_model,
    build_parallel_model,
    build_window_pool_model,
)

PROMPT, NEW_TOKENS = 500, 12
"""Of ``branch``, and of all turns but its first."""
# Prompts are cut alike everywhere: short convolutions make much of a rounding.
CHUNKS = ("--chunked-prefill-size", "256")

WINDOWS = "a pool of windows"


@dataclass(frozen=True)
class Family:
    """Models whose boundaries lie at multiples of ``unit`` tokens, on servers with ``args``.

    The first turn of ``branch`` has ``num_answered`` new tokens. Where prompts are computed in other pieces,
    logprobs differ by no more than ``within``: for a recurrence by 5e-4 between two sizes of chunks, without
    krul.
    """

    build: Callable[[Path], Path]
    unit: int = 1
    num_answered: int = NEW_TOKENS
    # SGLang keeps no states amid prompts here, and so takes no larger pages and no overlap.
    args: tuple[str, ...] = ("--page-size", "1", "--disable-overlap-schedule", *CHUNKS)
    # In bfloat16, as by default, where a prompt is cut would change logprobs by some 1e-3; so by 5e-6.
    env: Mapping[str, str] = field(default_factory=lambda: {"SGLANG_MAMBA_CONV_DTYPE": "float32"})
    within: float = 5e-3
    strategy: str = "no_buffer"
    name: str = "recurrent layers"

    @property
    def turn(self) -> int:
        """Tokens of ``branch``'s first turn: the last one is computed by the next turn."""
        return PROMPT + self.num_answered - 1

    def whole(self, num_tokens: int) -> int:
        return num_tokens // self.unit * self.unit


def _windows(window: int) -> Family:
    """When a turn of ``branch`` ends, the shorter window has left its prompt."""
    build = partial(build_window_pool_model, window=window)
    return Family(build, 16, 140, ("--page-size", "16"), {}, LOGPROBS_WITHIN, "auto", WINDOWS)


def _with_buffer(build: Callable[[Path], Path], *args: str, strategy: str = "extra_buffer") -> Family:
    """SGLang's default: it keeps copies of states, in a prompt at a multiple of 64 tokens.

    What lies behind the last one is not stored. So pages may be larger, and there is overlap.
    """
    return Family(build, 64, args=("--page-size", "16", *CHUNKS, *args), strategy=strategy)


def _lazily(build: Callable[[Path], Path]) -> Family:
    """As ``_with_buffer``: SGLang has the second of a request's two copies only while it makes one."""
    strategy = "extra_buffer_lazy"
    return _with_buffer(build, "--mamba-radix-cache-strategy", strategy, strategy=strategy)


FAMILIES = {
    "convolutions": Family(build_hybrid_model, env={}),
    "delta rule": Family(build_delta_rule_model),
    "Mamba-2": Family(build_mamba_model),
    # With the first all conversations are longer than that, with the second some are shorter.
    "windows of 100": _windows(100),
    "windows of 700": _windows(700),
    "KDA": Family(build_kimi_model),
    "KDA with buffer": _with_buffer(build_kimi_model),
    "Granite with buffer": _with_buffer(build_granite_model),
    "Falcon-H1 with buffer": _with_buffer(build_parallel_model),
    "delta rule with buffer": _with_buffer(build_delta_rule_model),
    "delta rule with lazy buffer": _lazily(build_delta_rule_model),
    "Mamba-2 with buffer": _with_buffer(build_mamba_model),
    "Mamba-2 with lazy buffer": _lazily(build_mamba_model),
}
OTHERS_SHOW = ("KDA", "Mamba-2 with buffer", "Mamba-2 with lazy buffer")
"""Their kernels and their buffers serve other families, too."""


def of_families(often: Sequence[str], long: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test: families by their names, some only in the long run."""
    return [*often, *(pytest.param(name, marks=pytest.mark.long) for name in long)]


on_more_servers = pytest.mark.parametrize(
    "family",
    of_families(["convolutions", "windows of 100"], ["delta rule", "Mamba-2", "windows of 700"]),
    indirect=True,
)
"""Of tests that start servers of their own. Another recurrence is stored and loaded by the same code."""


@pytest.fixture(
    scope="module", params=of_families([name for name in FAMILIES if name not in OTHERS_SHOW], OTHERS_SHOW)
)
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    family = FAMILIES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in family.env.items():
            patch.setenv(name, value)
        yield family


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.build(tmp_path_factory.mktemp("hybrid-model") / "model")


@dataclass(frozen=True)
class Branched:
    """Answers to a conversation of two turns, to a prompt that leaves it in its second turn, to one that has
    another answer in its first, and to one that leaves it in the first prompt."""

    first: Answer
    second: Answer
    from_turn: Answer
    from_prompt: Answer
    from_nothing: Answer

    def all(self) -> list[Answer]:
        return [self.first, self.second, self.from_turn, self.from_prompt, self.from_nothing]


def begin(server: ServerProcess, family: Family) -> tuple[Answer, list[int]]:
    """The first turn of ``branch``, and the prompt of the second."""
    prompt = random_prompt("branch", PROMPT)
    first = ask(server, prompt, max_new_tokens=family.num_answered)
    return first, [*prompt, *first.output_ids, *random_prompt("second", 60)]


def branch(server: ServerProcess, family: Family, *, evict: bool) -> Branched:
    first, history = begin(server, family)
    second = ask(server, history, max_new_tokens=NEW_TOKENS)
    answers = []
    for num_shared in (family.turn + 30, PROMPT, PROMPT - 100):
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=("branch", num_shared))
        other = [*history[:num_shared], *random_prompt(("other", num_shared), 40)]
        answers.append(ask(server, other, max_new_tokens=NEW_TOKENS))
    return Branched(first, second, *answers)


@pytest.fixture(scope="module")
def kept(model: Path, family: Family) -> Iterator[tuple[Played, Branched]]:
    """What a server answers that never evicts anything."""
    args = ("--dtype", "float32", "--max-total-tokens", "16384", "--enable-cache-report", *family.args)
    with ForkedServer(model, args=args) as server:
        yield play_all(server, evict=False), branch(server, family, evict=False)


def assert_full_size(states: dict[str, int], family: Family) -> None:
    """Windows of short prompts are smaller."""
    of_full_size = states["stored"] * states["state_bytes"]
    assert states["num_bytes"] == of_full_size or (
        family.name == WINDOWS and states["num_bytes"] < of_full_size
    )


Serve = Callable[..., ForkedServer]


@pytest.fixture(scope="module")
def serve(model: Path, family: Family) -> Serve:
    def start(args: tuple[str, ...] = (), env: Mapping[str, str] = STRICT, **options: Any) -> ForkedServer:
        all_args = (*small_krul_server_args(POOL_TOKENS, options), *family.args, *args)
        return ForkedServer(model, args=all_args, env=dict(env))

    return start


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[ServerProcess]:
    with serve() as server:
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


def test_returning_turns_came_from_the_host(server: ServerProcess, family: Family, played: Played) -> None:
    """Each up to the end of the turn before; also behind what is on the device."""
    whole = family.whole
    assert [answer.host_tokens for answer in played.turns] == [0, *map(whole, (622, 671, 720, 769))]
    on_device = whole(300)
    assert (played.partial.device_tokens, played.partial.host_tokens) == (on_device, whole(900) - on_device)
    assert [answer.host_tokens for answer in played.together] == [*map(whole, (400, 530, 660))]
    assert_nothing_left_behind(server)
    stats = settled_stats(server)
    states = stats["states"]
    assert states["restored"] == 8
    assert_full_size(states, family)
    assert (states["dropped_turns"], states["failed_loads"]) == (0, 0)
    assert server.get_json("/server_info")["mamba_radix_cache_strategy"] == family.strategy
    assert stats["restore"]["mode"]["planner"] == "full-load"
    assert family.name in stats["restore"]["mode"]["why"]


def test_prompts_that_part_in_a_turn_go_on_from_an_earlier_boundary(
    server: ServerProcess, family: Family, played: Played, kept: tuple[Played, Branched]
) -> None:
    branched = branch(server, family, evict=True)
    # With a buffer a state of the second prompt is stored, too, and the tree has more than are stored.
    has_buffer = family.unit == 64
    assert_same(kept[1].all(), branched.all(), within=family.within if has_buffer else LOGPROBS_WITHIN)
    assert branched.from_turn.host_tokens == family.whole(family.turn + 30 * has_buffer)
    assert branched.from_prompt.host_tokens == family.whole(PROMPT)
    assert branched.from_nothing.host_tokens == 0


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


@on_more_servers
def test_states_come_back_from_the_disk_after_a_restart(
    serve: Serve, family: Family, kept: tuple[Played, Branched], tmp_path: Path
) -> None:
    options = {"ssd_dir": str(tmp_path), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    with serve(**options) as server:
        first, history = begin(server, family)
        # The turn's KV, its state and that of its prompt.
        wait_until(
            lambda: settled_stats(server)["tiers"][0]["written_segments"] >= 3,
            "a turn and its states to be written",
        )
    with serve(**options) as server:
        second = ask(server, history, max_new_tokens=NEW_TOKENS)
        # The state was on its way before its load was planned.
        wait_until(lambda: settled_stats(server)["hints"] > 0, "a state to be brought ahead")
    assert_same(kept[1].all()[:2], [first, second], within=family.within)
    assert second.host_tokens == family.whole(family.turn)


@on_more_servers
def test_a_wrong_state_is_computed_again(serve: Serve, family: Family, kept: tuple[Played, Branched]) -> None:
    with serve(env={**STRICT, **SPOILED_STATES}) as server:
        turns = play(server, "conversation", evict=True)
        stats = settled_stats(server)
    assert_same(kept[0].turns, turns, within=family.within)
    assert (stats["states"]["restored"], stats["states"]["failed_loads"]) == (0, NUM_TURNS - 1)
    assert stats["restore"]["forward"]["rescued_requests"] == NUM_TURNS - 1
    assert stats["corrupted_segments"] == NUM_TURNS - 1


def ask_right_behind_a_turn(server: ServerProcess) -> Answer:
    """Two tokens are computed, or the rest of a page: convolutions remember little more than that of what was
    before."""
    prompt = random_prompt("behind", PROMPT)
    first = ask(server, prompt, max_new_tokens=NEW_TOKENS)
    push_out(server, num_tokens=POOL_TOKENS, seed="behind")
    return ask(server, [*prompt, *first.output_ids, 7], max_new_tokens=NEW_TOKENS)


@on_more_servers
def test_without_their_states_the_answers_would_be_others(
    serve: Serve, family: Family, server: ServerProcess
) -> None:
    right = ask_right_behind_a_turn(server)
    with serve(env={**STRICT, **LEFT_OUT_STATES}) as without:
        wrong = ask_right_behind_a_turn(without)
    assert right.host_tokens == wrong.host_tokens == family.whole(PROMPT + NEW_TOKENS - 1)
    assert max(abs(a - b) for a, b in zip(right.logprobs, wrong.logprobs, strict=True)) > 1e-2


RANKS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "one rank": ((), STRICT),
    "two ranks": (("--tp", "2"), STRICT_ON_TWO_CORES),
}
# Ranks store KV of KDA's layers with attention once, and their states each.
WITH_FAILING_LOADS = {
    "one rank": ("convolutions", "windows of 100"),
    "two ranks": ("delta rule", "windows of 700", "KDA"),
}


@pytest.mark.parametrize(
    ("family", "args", "env"),
    [
        pytest.param(
            family, *RANKS[ranks], marks=[pytest.mark.long] * (family not in often), id=f"{family}-{ranks}"
        )
        for family in list(FAMILIES)[:6]
        for ranks, often in WITH_FAILING_LOADS.items()
    ],
    indirect=["family"],
)
def test_failed_loads_are_computed_from_the_state_before(
    serve: Serve, family: Family, kept: tuple[Played, Branched], args: tuple[str, ...], env: dict[str, str]
) -> None:
    """Every second load fails; on one server that of a prefix whose beginning is on the device."""
    with serve(args, {**env, **faulty_loads("load-error")}) as server:
        played = play_all(server, evict=True)
        stats = settled_stats(server)
    assert_same(kept[0].all(), played.all(), within=family.within)
    assert stats["restore"]["forward"]["rescued_requests"] > 0
    assert stats["states"]["restored"] > 0
    assert stats["num_leases"] == 0


def _with_eagle(path: Path) -> Path:
    build_eagle_pair(path, path.with_name("draft"), partial(build_window_pool_model, window=100))
    return path


EAGLE = ("--speculative-algorithm", "EAGLE", *MTP[2:], "--speculative-draft-model-path", "DRAFT")
CHAINS = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "1")
TREES = (*NGRAM, "--speculative-ngram-max-bfs-breadth", "4")
DRAFTING: dict[str, Any] = {
    "NGRAM, delta rule": (FAMILIES["delta rule"], TREES),
    "NGRAM, Mamba-2": pytest.param(FAMILIES["Mamba-2"], TREES, marks=pytest.mark.long),
    "MTP, delta rule": pytest.param(Family(build_mtp_model), MTP, marks=pytest.mark.long),
    "MTP, delta rule with buffer": (_with_buffer(build_mtp_model), MTP),
    "EAGLE, windows of 100": (replace(FAMILIES["windows of 100"], build=_with_eagle), EAGLE),
    "NGRAM, windows of 700": pytest.param(FAMILIES["windows of 700"], CHAINS, marks=pytest.mark.long),
}


def ask_with_overshoot(server: ServerProcess) -> list[Answer]:
    """A prompt again, with another salt, for a shorter answer: accepted drafts go past its end."""
    prompt = random_prompt("overshoot", PROMPT)
    asked = {"one": 20, "other": 10}
    answers = [ask(server, prompt, max_new_tokens=num, cache_salt=salt) for salt, num in asked.items()]
    push_out(server, num_tokens=POOL_TOKENS, seed="overshoot")
    history = [*prompt, *answers[1].output_ids, *random_prompt("behind", 20)]
    return [*answers, ask(server, history, max_new_tokens=10, cache_salt="other")]


@pytest.mark.parametrize(("drafting", "speculation"), DRAFTING.values(), ids=DRAFTING)
def test_states_are_those_of_boundaries_also_where_drafts_were_accepted(
    drafting: Family, speculation: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in drafting.env.items():
        monkeypatch.setenv(name, value)
    speculation = tuple(str(tmp_path / "draft") if arg == "DRAFT" else arg for arg in speculation)
    model, same = drafting.build(tmp_path / "model"), partial(assert_same, within=drafting.within)
    never_evicts = ("--dtype", "float32", "--max-total-tokens", "16384", "--enable-cache-report")
    with ForkedServer(model, args=(*never_evicts, *drafting.args)) as server:
        kept, overshot = play_all(server, evict=False), ask_with_overshoot(server)
    for fails in (False, True):
        env = {**STRICT, **(faulty_loads("load-error") if fails else {})}
        args = (*small_krul_server_args(POOL_TOKENS, {"host_memory": "512MiB"}), *drafting.args, *speculation)
        with ForkedServer(model, args=args, env=env) as server:
            played = play_all(server, evict=True)
            again = ask_again(server, played.turns, evict=True)
            overshot_again = ask_with_overshoot(server)
            stats = settled_stats(server)
            assert_aborts_leave_nothing(server, can_fail=fails)
        same(kept.all(), played.all())
        assert [answer.output_ids for answer in again] == [answer.output_ids for answer in kept.turns]
        same(overshot, overshot_again)
        assert sum(answer.num_accepted for answer in again) > 4 * NUM_TURNS
        assert stats["states"]["restored"] > 5
        assert (stats["restore"]["forward"]["rescued_requests"] > 0) == fails
        if not fails:
            assert min(answer.host_tokens for answer in (*played.turns[1:], *again[1:])) > 500
        if not fails and speculation == TREES:
            # What was accepted behind the answer's end has changed its state: that of the prompt is the last.
            assert overshot_again[2].host_tokens == PROMPT


@pytest.mark.parametrize("family", list(FAMILIES)[:3], indirect=True)
def test_drafts_that_part_are_refused_where_sglang_takes_them_for_a_chain(
    serve: Serve, family: Family
) -> None:
    breadth = "4" if family.build is build_hybrid_model else "1"
    with pytest.raises(ServerError, match="if each draft followed the one before it"):  # noqa: SIM117
        with serve((*NGRAM, "--speculative-ngram-max-bfs-breadth", breadth)):
            pass


ERROR_BUDGET, NUM_ADDED = 0.01, 64
KV_BYTES = 2 * 2 * 2 * 64 * 4
"""Of a token: two layers, two heads of 64 with key and value, in float32."""
with_bases = pytest.mark.parametrize(
    "family", of_families(["convolutions", "delta rule", "windows of 100"], ["Mamba-2"]), indirect=True
)


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
    wanted = {"logprob_start_len": PROMPT + NEW_TOKENS - 1, "top_logprobs_num": 512, "max_new_tokens": 1}
    said = [server.post_json("/generate", request_payload(ids, **wanted)) for ids in histories]
    return [
        (each["meta_info"]["cached_tokens_details"]["host"], predictions(each, with_output=True))
        for each in said
    ]


@pytest.fixture(scope="module")
def in_bases(family: Family, model: Path, tmp_path_factory: pytest.TempPathFactory) -> StoredInBases:
    cache_dir = tmp_path_factory.mktemp("krul-cache")
    list(learn_to_files(Checkpoint(str(model)), None, num_pieces=4, cache_dir=cache_dir))
    disk = {"ssd_dir": str(cache_dir / "ssd"), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    args = bases_server_args(POOL_TOKENS, cache_dir, error_budget=ERROR_BUDGET, relearn=False, **disk)
    prompts = [random_prompt(("in bases", number), PROMPT) for number in range(4)]
    with ForkedServer(model, args=(*args, *family.args), env=STRICT) as server:
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
    with ForkedServer(model, args=(*args, *family.args), env={**STRICT, **SPOILED_STATES}) as server:
        restarted = predicted(server, histories)
        prompt = random_prompt("spoiled", PROMPT)
        prompt += [*ask(server, prompt).output_ids, *random_prompt("second", 60)]
        kept = ask(server, prompt)
        push_out(server, num_tokens=POOL_TOKENS, seed="spoiled")
        spoiled = kept, ask(server, prompt)
        restarted_stats = settled_stats(server)
    return StoredInBases(computed, decoded, stats, restarted, spoiled, restarted_stats)


@with_bases
def test_kv_comes_back_from_bases_within_its_budget(family: Family, in_bases: StoredInBases) -> None:
    """And what is predicted behind it depends on the true states."""
    lost = []
    for (before, true), (after, found) in zip(in_bases.computed, in_bases.decoded, strict=True):
        assert (before, after) == (0, family.whole(PROMPT + NEW_TOKENS - 1))
        assert len(true.logprobs) == NUM_ADDED + 1
        lost.append(divergences(true, found).mean())
    assert ERROR_BUDGET / 3 < sum(lost) / len(lost) < 1.5 * ERROR_BUDGET


@with_bases
def test_kv_takes_fewer_bytes_in_bases_and_states_as_many(family: Family, in_bases: StoredInBases) -> None:
    stats = in_bases.stats
    states, offload, budget = stats["states"], stats["offload"], stats["compression"]["budget"]
    assert_full_size(states, family)
    assert offload["num_bytes"] < offload["tokens"] * KV_BYTES / 16
    assert stats["compression"]["subspace_turns"] >= 4
    assert (budget["probes"], budget["unrecorded_turns"]) == (0, 0)


@with_bases
def test_a_restarted_server_decodes_the_same_in_bases(family: Family, in_bases: StoredInBases) -> None:
    for (_, found), (num_tokens, again) in zip(in_bases.decoded, in_bases.restarted, strict=True):
        assert num_tokens == family.whole(PROMPT + NEW_TOKENS - 1)
        assert divergences(found, again).mean() < 1e-5


@with_bases
def test_kv_in_bases_is_of_no_use_without_its_state(family: Family, in_bases: StoredInBases) -> None:
    kept, computed = in_bases.spoiled
    assert_same([kept], [computed], within=family.within)
    states = in_bases.restarted_stats["states"]
    # A window of the prompt that SGLang warms up with is worth a load, too.
    num_restored = len(in_bases.restarted) + (family.name == WINDOWS)
    assert (states["restored"], states["failed_loads"]) == (num_restored, 1)
    assert in_bases.restarted_stats["restore"]["forward"]["rescued_requests"] == 1


@with_bases
def test_pairs_of_layers_are_refused(serve: Serve) -> None:
    with pytest.raises(ServerError, match="hybrid model"), serve(strategy="krul"):
        pass
