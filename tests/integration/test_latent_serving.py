"""Models with latent KV (MLA): conversations come back as on a server that never evicts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from demo.server import ServerError, ServerProcess
from krul_sglang.learning.command import learn_to_files
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    NUM_TURNS,
    POOL_TOKENS,
    STRICT,
    STRICT_ON_TWO_CORES,
    Played,
    ask,
    assert_nothing_left_behind,
    assert_same,
    bases_server_args,
    play,
    play_all,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
    wait_for_probes,
    wait_until_written,
)
from tests.support.server_plugin import SKIPPED_HEADS, WITH_PLUGIN, faulty_loads
from tests.support.tiny_model import (
    LATENT_KINDS,
    LATENT_RANK,
    LATENT_ROTARY,
    build_latent_model,
    build_minicpm3_model,
)

NUM_LAYERS = 4
ELEMENTS = NUM_LAYERS * (LATENT_RANK + LATENT_ROTARY)
"""Of a token, over all layers."""


@dataclass(frozen=True)
class Mode:
    """``model``: see ``models``. ``token_bytes``: that a stored token takes in all layers."""

    model: str
    options: dict[str, Any]
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = tuple(STRICT.items())
    fault: str | None = None
    token_bytes: int = 4 * ELEMENTS

    @property
    def control_args(self) -> tuple[str, ...]:
        return self.args if "--kv-cache-dtype" in self.args else ()


RANDOM = {"planner": "random", "max_head_tokens": 100_000, "store_full_tail": True}
MODES = {
    "dense-mixed-chunks": Mode("dense", RANDOM, ("--chunked-prefill-size", "256", "--enable-mixed-chunk")),
    "experts-tp2-failing-loads": Mode(
        "experts", RANDOM, ("--tp", "2"), tuple(STRICT_ON_TWO_CORES.items()), "load-error"
    ),
    "dense-fp8-whole-loads": Mode(
        "dense", {"planner": "full-load"}, ("--kv-cache-dtype", "fp8_e4m3"), token_bytes=ELEMENTS
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("latent-models")
    return {
        "dense": build_latent_model(root / "dense", num_layers=NUM_LAYERS),
        "experts": build_latent_model(root / "experts", num_layers=NUM_LAYERS, q_lora_rank=96, num_experts=4),
    }


@cache
def kept(model: Path, args: tuple[str, ...]) -> Played:
    """What a server answers that never evicts anything."""
    common = (
        "--dtype",
        "float32",
        "--page-size",
        "16",
        "--max-total-tokens",
        "16384",
        "--enable-cache-report",
    )
    with ForkedServer(model, args=(*common, *args)) as server:
        return play_all(server, evict=False)


@contextmanager
def serving(
    model: Path, options: dict[str, Any], args: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    all_args = (*small_krul_server_args(POOL_TOKENS, options), *args)
    with ForkedServer(model, args=all_args, env=STRICT if env is None else env) as server:
        yield server


@dataclass(frozen=True)
class Restored:
    mode: Mode
    kept: Played
    played: Played
    stats: dict[str, Any]


@pytest.fixture(scope="module", params=MODES)
def restored(request: pytest.FixtureRequest, models: dict[str, Path]) -> Restored:
    mode = MODES[request.param]
    plugin = WITH_PLUGIN if mode.fault is None else faulty_loads(mode.fault)
    with serving(models[mode.model], mode.options, mode.args, {**dict(mode.env), **plugin}) as server:
        played = play_all(server, evict=True)
        if mode.fault is None:
            assert_nothing_left_behind(server)
        stats = settled_stats(server)
    return Restored(mode, kept(models[mode.model], mode.control_args), played, stats)


def test_every_turn_answers_as_on_a_server_that_never_evicted(restored: Restored) -> None:
    assert_same(restored.kept.all(), restored.played.all())


def test_answers_differ_from_each_other(restored: Restored) -> None:
    """Without this the equality above could hold for a model that always says the same."""
    assert len({answer.output_ids for answer in restored.kept.turns}) == NUM_TURNS


def test_returning_turns_came_from_the_host(restored: Restored) -> None:
    for answer in [*restored.played.turns[1:], *restored.played.together]:
        assert answer.device_tokens == 0
        assert answer.host_tokens > 300


def test_heads_were_recomputed_where_they_were_planned(restored: Restored) -> None:
    restore, has_heads = restored.stats["restore"], restored.mode.options is RANDOM
    assert restore["mode"]["why"] == "as configured"
    assert restore["proof"]["rows_within_one_ulp"] > 0
    assert (restore["proof"]["routed_rows"] > 0) == (restored.mode.model == "experts")
    assert (restore["forward"]["head_tokens"] > 0) == has_heads
    assert restored.stats["load"]["num_bytes"] > 0
    assert (restore["forward"]["rescued_requests"] > 0) == (restored.mode.fault is not None)


def test_latent_kv_is_stored_once_and_as_it_is(restored: Restored) -> None:
    """Also of two ranks, which both have all of it."""
    offload = restored.stats["offload"]
    assert offload["num_bytes"] == offload["tokens"] * restored.mode.token_bytes
    assert restored.stats["committed_segments"] == offload["segments"]


def test_layers_that_cannot_be_cut_come_back_whole(tmp_path: Path) -> None:
    model = build_minicpm3_model(tmp_path / "model")
    with serving(model, {}) as server:
        played = play_all(server, evict=True)
        assert_nothing_left_behind(server)
        stats = settled_stats(server)
    assert_same(kept(model, ()).all(), played.all())
    assert len({answer.output_ids for answer in played.turns}) == NUM_TURNS
    assert all(answer.host_tokens > 300 for answer in (*played.turns[1:], *played.together))
    assert stats["restore"]["mode"]["planner"] == "full-load"
    assert "layers of another kind (MiniCPM3DecoderLayer)" in stats["restore"]["mode"]["why"]
    assert stats["offload"]["num_bytes"] == stats["offload"]["tokens"] * 4 * ELEMENTS


def test_without_heads_the_answers_would_be_others(models: dict[str, Path]) -> None:
    with serving(models["dense"], RANDOM, env={**STRICT, **SKIPPED_HEADS}) as server:
        wrong = play(server, "conversation", evict=True)
    right = kept(models["dense"], ()).turns
    assert wrong[0].output_ids == right[0].output_ids
    assert [answer.output_ids for answer in wrong[1:]] != [answer.output_ids for answer in right[1:]]


def test_one_rank_finds_what_two_have_stored(models: dict[str, Path], tmp_path: Path) -> None:
    options = {"planner": "full-load", "ssd_dir": str(tmp_path), "ssd_capacity": "1GiB", "ssd_timeout": 10.0}
    prompt = random_prompt("two ranks", 500)
    with serving(models["dense"], options, ("--tp", "2"), STRICT_ON_TWO_CORES) as server:
        first = ask(server, prompt)
        wait_until_written(server)
    with serving(models["dense"], options) as server:
        again = ask(server, prompt)
    assert again.host_tokens > 400
    assert_same([first], [again])


ERROR_BUDGET = 0.01


@pytest.fixture(scope="module")
def stored_in_bases(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Counters of servers of one rank, of two, and with fp8 KV, with the same bases; each has answered
    conversations that left and came back."""
    cache_dir = tmp_path_factory.mktemp("krul-cache")
    list(learn_to_files(Checkpoint(str(models["dense"])), None, num_pieces=4, tp_size=2, cache_dir=cache_dir))
    on_two_ranks, in_fp8 = (("--tp", "2"), STRICT_ON_TWO_CORES), (("--kv-cache-dtype", "fp8_e4m3"),)
    return [store_in_bases(models["dense"], cache_dir, *more) for more in ((), on_two_ranks, in_fp8)]


def store_in_bases(
    model: Path,
    cache_dir: Path,
    more: tuple[str, ...] = (),
    env: dict[str, str] = STRICT,
    *,
    error_budget: float = ERROR_BUDGET,
) -> dict[str, Any]:
    args = bases_server_args(POOL_TOKENS, cache_dir, error_budget=error_budget, probe_share=1)
    with ForkedServer(model, args=(*args, *more), env=env) as server:
        prompts = [random_prompt(("in bases", number), 500) for number in range(4)]
        computed = [ask(server, prompt) for prompt in prompts]
        wait_for_probes(server, 0)
        stats = settled_stats(server)
        push_out(server, num_tokens=POOL_TOKENS, seed="in bases")
        decoded = [ask(server, prompt) for prompt in prompts]
        assert_nothing_left_behind(server)
    return {**stats, "computed": computed, "decoded": decoded}


def assert_decoded(stats: dict[str, Any], *, error_budget: float = ERROR_BUDGET) -> None:
    pairs = list(zip(stats["computed"], stats["decoded"], strict=True))
    assert all(answer.host_tokens > 480 for _, answer in pairs)
    # The first token depends on what came back alone.
    off = [abs(one.logprobs[0] - other.logprobs[0]) for one, other in pairs]
    assert 1e-3 < sum(off) / len(off) < 0.6
    assert sum(one.output_ids[0] == other.output_ids[0] for one, other in pairs) >= 3
    assert error_budget / 3 < stats["compression"]["budget"]["last_kl"] < 3 * error_budget
    assert stats["compression"]["subspace_turns"] == stats["compression"]["turns"]


def test_conversations_come_back_from_bases(stored_in_bases: list[dict[str, Any]]) -> None:
    for stats in stored_in_bases:
        assert_decoded(stats)


@pytest.mark.parametrize("kind", LATENT_KINDS)
def test_models_with_the_layers_of_deepseek_have_bases(kind: str, tmp_path: Path) -> None:
    model = build_latent_model(tmp_path / "model", q_lora_rank=96, kind=kind)
    list(learn_to_files(Checkpoint(str(model)), None, num_pieces=8, cache_dir=tmp_path))
    stats = store_in_bases(model, tmp_path, error_budget=0.03)
    assert_decoded(stats, error_budget=0.03)


def test_latents_take_many_times_fewer_bytes_in_bases(stored_in_bases: list[dict[str, Any]]) -> None:
    """And as few for two ranks and fp8, whose rounding is another."""
    for stats in stored_in_bases:
        assert stats["stored_bytes"] < stats["stored_tokens"] * 4 * ELEMENTS / 8
        assert stats["compression"]["budget"]["unrecorded_turns"] == 0
    one, two, fp8 = (stats["stored_bytes"] for stats in stored_in_bases)
    assert two == pytest.approx(one, rel=0.02)
    assert fp8 == pytest.approx(one, rel=0.05)


def test_a_strategy_that_looks_at_attention_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ServerError, match="latent KV"), serving(models["dense"], {"strategy": "krul"}):
        pass
