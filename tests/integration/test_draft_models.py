"""Speculation with a draft model: its KV comes back, and greedy answers are those without."""

from __future__ import annotations

import os
import shutil
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from demo.server import ServerProcess
from krul_sglang.cli.selftest import SelftestConfig, run_selftest
from krul_sglang.learning.command import learn_to_files
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.daemon_process import running_daemon
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    STRICT_ON_TWO_CORES,
    Answer,
    Drafted,
    Played,
    ask,
    ask_drafted,
    assert_aborts_leave_nothing,
    assert_same,
    play_all,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
)
from tests.support.server_plugin import LEFT_OUT_DRAFTS, WITH_PLUGIN, faulty_loads
from tests.support.tiny_model import build_eagle_pair, build_latent_model, build_tiny_model, configure

NUM_TURNS = 4
EDGE_PROMPTS = (320, 321)
"""Tokens of prompts that fill pages, and of such that have one more: with EAGLE it names the last page."""


@dataclass(frozen=True)
class Speculation:
    """``target`` and ``draft`` are names in ``models``."""

    algorithm: str
    target: str
    draft: str
    num_steps: int = 3
    load_format: str = "auto"
    topk: int = 1

    @property
    def is_often_right(self) -> bool:
        return self.draft not in ("small", "eagle3")

    def args(self, models: dict[str, Path]) -> tuple[str, ...]:
        return (
            *("--speculative-algorithm", self.algorithm),
            *("--speculative-draft-model-path", str(models[self.draft])),
            *("--speculative-draft-load-format", self.load_format),
            *("--speculative-num-steps", str(self.num_steps), "--speculative-eagle-topk", str(self.topk)),
            *("--speculative-num-draft-tokens", str(self.topk * self.num_steps + 1)),
        )


ITSELF = Speculation("STANDALONE", "llama", "llama")
SMALL = Speculation("STANDALONE", "llama", "small")
EAGLE = Speculation("EAGLE", "target of eagle", "eagle")
EAGLE_1 = replace(EAGLE, num_steps=1)
NEXTN_TREES = replace(EAGLE, algorithm="NEXTN", topk=2)
"""SGLang takes trees with pages of one token alone, or with the attention of a GPU."""
EAGLE3 = Speculation("EAGLE3", "target of eagle", "eagle3", load_format="dummy")

MTP = Speculation("NEXTN", "v3", "v3")
"""The draft is a layer of the target's own checkpoint, and has latent KV, too."""


@dataclass(frozen=True)
class Mode:
    """``fails``: every second load is made to fail."""

    speculation: Speculation
    options: dict[str, Any]
    page_size: int = 16
    env: dict[str, str] = field(default_factory=lambda: STRICT | WITH_PLUGIN)
    fails: bool = False
    args: tuple[str, ...] = ()


RANDOM, WHOLE = {"planner": "random"}, {"planner": "full-load"}
LOSSY = WHOLE | {"strategy": "subspace", "error_budget": 1e-9, "probe_share": 0, "relearn": False}
"""So small a budget leaves the target's KV as it is: answers are those of an exact store."""
TOKEN_BYTES = 4 * 2 * 64 * 2 * 4
"""Of the draft that is the target itself, in float32."""
FAILING = STRICT | faulty_loads("load-error")
TWO_RANKS = STRICT_ON_TWO_CORES | WITH_PLUGIN
MODES = {
    "standalone-page-1-random-heads": Mode(ITSELF, RANDOM, page_size=1),
    "standalone-page-16-whole-loads": Mode(ITSELF, WHOLE),
    "standalone-page-16-failing-loads": Mode(ITSELF, RANDOM, env=FAILING, fails=True),
    "standalone-page-16-small-draft": Mode(SMALL, RANDOM),
    "standalone-page-16-lossy": Mode(ITSELF, LOSSY),
    "standalone-page-16-two-ranks": Mode(ITSELF, RANDOM, env=TWO_RANKS, args=("--tp", "2")),
    "eagle-1-page-16-whole-loads": Mode(EAGLE_1, WHOLE),
    "eagle-3-page-1-random-heads": Mode(EAGLE, RANDOM, page_size=1),
    "eagle-3-page-16-failing-loads": Mode(EAGLE, RANDOM, env=FAILING, fails=True),
    "eagle3-page-16-random-heads": Mode(EAGLE3, RANDOM),
    "nextn-trees-page-1-random-heads": Mode(NEXTN_TREES, RANDOM, page_size=1),
    "eagle-3-page-16-two-ranks": Mode(EAGLE, RANDOM, env=TWO_RANKS, args=("--tp", "2")),
    "mtp-page-16-random-heads": Mode(MTP, RANDOM),
    "mtp-page-16-failing-loads": Mode(MTP, RANDOM, env=FAILING, fails=True),
    "mtp-page-16-two-ranks": Mode(MTP, RANDOM, env=TWO_RANKS, args=("--tp", "2")),
}
OTHERS_SHOW = (
    *(f"standalone-page-16-{shown}" for shown in ("whole-loads", "failing-loads", "two-ranks")),
    *("eagle-3-page-1-random-heads", "mtp-page-16-failing-loads", "mtp-page-16-two-ranks"),
)


@dataclass(frozen=True)
class Restored:
    """``edges``: answers to ``EDGE_PROMPTS``, computed and then restored."""

    mode: Mode
    played: Played
    turns: list[Drafted]
    edges: list[tuple[Answer, Answer]]
    stats: dict[str, Any]


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by the names that ``Speculation`` has for them."""
    root = tmp_path_factory.mktemp("drafts")
    small = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "hidden_size": 64}
    build_eagle_pair(root / "target", root / "eagle")
    shutil.copytree(root / "eagle", root / "eagle3", ignore=shutil.ignore_patterns("*.safetensors"))
    of_eagle3 = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    configure(root / "eagle3", of_eagle3)
    return {
        "llama": tiny_models["float32"],
        "small": build_tiny_model(root / "small", seed=1, **small),
        "target of eagle": root / "target",
        "eagle": root / "eagle",
        "eagle3": root / "eagle3",
        "v3": build_latent_model(root / "v3", num_experts=4, q_lora_rank=96, predicts_ahead=True),
    }


def krul_server(models: dict[str, Path], mode: Mode) -> ForkedServer:
    args = (
        # Host memory of the usual size is too small for both models' KV with pages of one token.
        *small_krul_server_args(POOL_TOKENS, mode.options),
        *("--page-size", str(mode.page_size)),
        *mode.speculation.args(models),
        *mode.args,
    )
    return ForkedServer(models[mode.speculation.target], args=args, env=mode.env)


def play_turns(server: ServerProcess, *, evict: bool) -> list[Drafted]:
    """A conversation whose answers are long enough to see how many drafts are accepted."""
    turns: list[Drafted] = []
    history = random_prompt("drafted", 611)
    for number in range(NUM_TURNS):
        turns.append(ask_drafted(server, history, max_new_tokens=40))
        history = [*history, *turns[-1].output_ids, *random_prompt(("drafted", number), 37)]
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=("drafted", number))
    return turns


def accept_length(turns: Sequence[Drafted]) -> float:
    """Mean number of tokens that a forward brings, over the turns that come after the first one."""
    return 1 + sum(turn.num_accepted for turn in turns[1:]) / sum(turn.num_forwards for turn in turns[1:])


def play_edges(server: ServerProcess) -> list[tuple[Answer, Answer]]:
    prompts = [random_prompt("edge", num_tokens) for num_tokens in EDGE_PROMPTS]
    computed = []
    for prompt in prompts:
        computed.append(ask(server, prompt))
        push_out(server, num_tokens=POOL_TOKENS, seed="edge")
    return list(zip(computed, [ask(server, prompt) for prompt in prompts], strict=True))


PLAIN = ("--dtype", "float32", "--max-total-tokens", "16384", "--enable-cache-report")
NeverLeft = Callable[[Mode], list[Drafted]]


@pytest.fixture(scope="module")
def never_left(models: dict[str, Path]) -> NeverLeft:
    """The turns of a server with the speculation of a mode, and its pages, without krul and evictions."""

    @cache
    def play_without_krul(speculation: Speculation, page_size: int) -> list[Drafted]:
        args = (*PLAIN, "--page-size", str(page_size), *speculation.args(models))
        with ForkedServer(models[speculation.target], args=args) as server:
            return play_turns(server, evict=False)

    return lambda mode: play_without_krul(mode.speculation, mode.page_size)


@pytest.fixture(scope="module")
def undrafted(models: dict[str, Path], kept: Played) -> Callable[[str], Played]:
    """What a target answers without speculation, krul and evictions."""

    @cache
    def play_plain(target: str) -> Played:
        if target == "llama":
            return kept
        with ForkedServer(models[target], args=(*PLAIN, "--page-size", "16")) as server:
            return play_all(server, evict=False)

    return play_plain


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] * (name in OTHERS_SHOW)) for name in MODES],
)
def restored(request: pytest.FixtureRequest, models: dict[str, Path]) -> Restored:
    mode = MODES[request.param]
    if mode.options is LOSSY:
        target = Checkpoint(str(models[mode.speculation.target]))
        list(learn_to_files(target, None, num_pieces=4, cache_dir=Path(os.environ["KRUL_CACHE_DIR"])))
    with krul_server(models, mode) as server:
        turns = play_turns(server, evict=True)
        edges = play_edges(server)
        played = play_all(server, evict=True)
        stats = settled_stats(server)
        assert_aborts_leave_nothing(server, can_fail=mode.fails)
        return Restored(mode, played, turns, edges, stats)


def test_every_answer_is_that_of_servers_without_krul_and_without_speculation(
    undrafted: Callable[[str], Played], never_left: NeverLeft, restored: Restored
) -> None:
    assert_same(undrafted(restored.mode.speculation.target).all(), restored.played.all())
    expected = never_left(restored.mode)
    assert [turn.output_ids for turn in restored.turns] == [turn.output_ids for turn in expected]


def test_prompts_that_end_with_a_page_come_back(restored: Restored) -> None:
    for computed, again in restored.edges:
        assert again.output_ids == computed.output_ids
        assert again.host_tokens + again.device_tokens >= 288


def test_as_many_drafts_are_accepted_as_if_nothing_had_left(
    never_left: NeverLeft, restored: Restored
) -> None:
    assert all(turn.host_tokens > 500 for turn in restored.turns[1:])
    if restored.mode.fails or not restored.mode.speculation.is_often_right:
        return
    expected = accept_length(never_left(restored.mode))
    assert expected > (1.6 if restored.mode.speculation.num_steps == 1 else 2.3)
    assert accept_length(restored.turns) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("speculation", [ITSELF, EAGLE], ids=lambda speculation: speculation.algorithm)
def test_control_without_draft_kv_fewer_drafts_are_accepted(
    models: dict[str, Path], never_left: NeverLeft, speculation: Speculation
) -> None:
    mode = Mode(speculation, WHOLE, env=STRICT | LEFT_OUT_DRAFTS)
    with krul_server(models, mode) as server:
        turns = play_turns(server, evict=True)
        stats = settled_stats(server)["draft"]
    expected = never_left(mode)
    assert [turn.output_ids for turn in turns] == [turn.output_ids for turn in expected]
    assert accept_length(turns) < 0.75 * accept_length(expected)
    assert (stats["restored_tokens"], stats["missing_tokens"] > 1500) == (0, True)


def test_draft_kv_comes_back_with_the_target_s(restored: Restored) -> None:
    draft, loaded = restored.stats["draft"], restored.stats["load"]["tokens"]
    assert draft["failed_loads"] == 0
    assert draft["after_restores"]["turns"] >= NUM_TURNS - 1
    if restored.mode.fails:
        # What the target alone computed again has no draft KV, and none is stored of what follows.
        assert draft["missing_tokens"] > 500
        assert draft["dropped_turns"] > 0
        assert draft["stored_tokens"] < restored.stats["offload"]["tokens"]
    else:
        assert (draft["restored_tokens"], draft["missing_tokens"]) == (loaded, 0)
        offload = restored.stats["offload"]
        # On a busy machine a turn may be evicted while it is stored.
        num_evicted = offload["dropped_turns"].get("evicted", 0)
        assert draft["dropped_turns"] <= num_evicted
        # A target's KV that left is stored again, beside what is left of its draft's.
        if not num_evicted and not restored.stats["evicted_segments"]:
            assert draft["stored_tokens"] == offload["tokens"]


def test_where_kv_is_compressed_its_draft_kv_takes_fewer_bytes(restored: Restored) -> None:
    draft = restored.stats["draft"]
    is_lossy = restored.mode.options is LOSSY
    assert draft["precision"] == ("int8" if is_lossy else "native")
    if restored.mode.speculation == ITSELF and not restored.mode.args:
        share = draft["num_bytes"] / (draft["stored_tokens"] * TOKEN_BYTES)
        # A byte for each number of 4, and what scales take.
        assert 0.25 < share < 0.3 if is_lossy else share == 1


def test_failed_loads_were_computed_and_nobody_noticed(restored: Restored) -> None:
    forward = restored.stats["restore"]["forward"]
    assert (forward["rescued_requests"] > 0) == restored.mode.fails
    assert forward["lost_requests"] == 0


def assert_shown(server: ServerProcess, draft: dict[str, Any]) -> None:
    """The metrics page has what ``/server_info`` has, and the selftest says whether drafts come back."""
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        metrics = page.read().decode()
    assert f'krul_draft_missing_tokens{{tp_rank="0"}} {float(draft["missing_tokens"])}' in metrics
    restored = draft["after_restores"]
    length = 1 + restored["accepted"] / restored["forwards"]
    assert f'krul_draft_accept_length_restored{{tp_rank="0"}} {length}' in metrics
    result = run_selftest(SelftestConfig(server.url))
    assert "Draft KV came back for all of the tokens." in result.verdict


def test_servers_with_and_without_drafts_share_the_target(models: dict[str, Path], kept: Played) -> None:
    """Three turns, each on another server of one daemon; the second one has a draft model."""
    history, answers = random_prompt("conversation", 611), list[Answer]()
    with running_daemon("--host-memory", "256MiB") as (runtime_dir, _):
        options = WHOLE | {"endpoint": str(runtime_dir), "host_memory": "auto"}
        for number, speculation in enumerate(((), ITSELF.args(models), ())):
            args = (*small_krul_server_args(POOL_TOKENS, options), *speculation, "--enable-metrics")
            with ForkedServer(models["llama"], args=args, env=STRICT) as server:
                before = settled_stats(server)["draft"]
                answers.append(ask(server, history, max_new_tokens=12))
                draft = settled_stats(server)["draft"]
                if speculation:
                    assert_shown(server, draft)
            if speculation:
                # Without draft KV of the prefix, none is stored of what follows.
                counts = [draft[name] - before[name] for name in ("missing_tokens", "stored_tokens")]
                assert counts == [608, 0]
            history = [*history, *answers[-1].output_ids, *random_prompt(("conversation", number), 37)]
    assert_same(kept.turns[:3], answers)
    assert [answer.host_tokens for answer in answers] == [0, 608, 656]
