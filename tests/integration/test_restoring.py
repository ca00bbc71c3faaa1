"""Heads recomputed, tails loaded: whatever the split, answers are those of a server that never evicted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    Played,
    ask,
    assert_nothing_left_behind,
    assert_same,
    play,
    play_all,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
)
from tests.support.server_plugin import ROUNDED_HEADS, SKIPPED_HEADS, WITH_PLUGIN, faulty_loads
from tests.support.tiny_model import build_tiny_model, make_experts_alike


@dataclass(frozen=True)
class Mode:
    """A server that restores, and whether its loads are made to fail."""

    options: dict[str, Any]
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    fault: str | None = None


RANDOM = {"planner": "random"}
MODES = {
    "page-1-everything-stored": Mode({**RANDOM, "store_full_tail": True}, ("--page-size", "1")),
    "page-64-stuck-loads": Mode({**RANDOM, "load_timeout": 0.5}, ("--page-size", "64"), fault="load-stall"),
    "page-16-mixed-chunks": Mode(
        {**RANDOM, "max_head_tokens": 100_000},
        ("--chunked-prefill-size", "256", "--enable-mixed-chunk", "--schedule-policy", "lpm"),
    ),
    "page-16-chunked-prefill-tp2-failing-loads": Mode(
        {**RANDOM, "max_head_tokens": 100_000},
        ("--page-size", "16", "--chunked-prefill-size", "512", "--tp", "2"),
        (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),),
        fault="load-error",
    ),
}


@dataclass(frozen=True)
class Restored:
    """``trace``: what ``krul-sglang trace`` wrote about the last restores, in Chrome's format."""

    mode: Mode
    played: Played
    stats: dict[str, Any]
    trace: list[dict[str, Any]]


@pytest.fixture(scope="module", params=MODES)
def restored(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Restored:
    mode = MODES[request.param]
    args = (*small_krul_server_args(POOL_TOKENS, mode.options), *mode.args)
    plugin = WITH_PLUGIN if mode.fault is None else faulty_loads(mode.fault)
    with ForkedServer(
        tiny_models["float32"], args=args, env={**STRICT, **plugin, **dict(mode.env)}
    ) as server:
        played = play_all(server, evict=True)
        stats = settled_stats(server)
        if mode.fault is None:
            assert_nothing_left_behind(server)
        # A load that was given up while it was stuck keeps its lease until it wakes.
        deadline_s = time.monotonic() + 20.0
        while stats["num_leases"]:
            assert time.monotonic() < deadline_s, "a lease outlives its load"
            time.sleep(0.1)
            stats = settled_stats(server)
        path = tmp_path_factory.mktemp("trace") / "trace.json"
        arguments = ["trace", "--url", server.url, "--output", str(path)]
        subprocess.run([sys.executable, "-m", "krul_sglang.cli", *arguments], check=True)
        return Restored(mode, played, stats, json.loads(path.read_text())["traceEvents"])


def test_every_turn_answers_as_on_a_server_that_never_evicted(kept: Played, restored: Restored) -> None:
    assert_same(kept.turns, restored.played.turns)


def test_a_prefix_half_on_the_device_is_completed(kept: Played, restored: Restored) -> None:
    assert_same([kept.partial], [restored.played.partial])
    assert 0 < restored.played.partial.device_tokens < 301
    assert restored.played.partial.host_tokens > 500


def test_conversations_that_return_together_are_restored_together(kept: Played, restored: Restored) -> None:
    assert_same(kept.together, restored.played.together)


def test_all_of_them_came_from_the_host(restored: Restored) -> None:
    """A failed load counts, too: its prefix was promised, and then recomputed."""
    for answer in [*restored.played.turns[1:], *restored.played.together]:
        assert answer.device_tokens == 0
        assert answer.host_tokens > 300


def test_heads_were_recomputed_and_tails_loaded(restored: Restored) -> None:
    plans, forward = restored.stats["restore"]["plans"], restored.stats["restore"]["forward"]
    assert 0 < plans["head_tokens"] < plans["prefix_tokens"]
    assert forward["head_tokens"] >= plans["head_tokens"]
    assert restored.stats["load"]["num_bytes"] > 0


def test_what_is_left_out_takes_no_memory(restored: Restored) -> None:
    left_out = restored.stats["offload"]["left_out_bytes"] + restored.stats["trimmed_bytes"]
    assert (left_out == 0) == bool(restored.mode.options.get("store_full_tail"))


def test_failed_loads_were_recomputed_and_nobody_noticed(restored: Restored) -> None:
    rescued = restored.stats["restore"]["forward"]["rescued_requests"]
    assert (rescued > 0) == (restored.mode.fault is not None)


def test_the_trace_shows_what_both_streams_did(restored: Restored) -> None:
    work = [event for event in restored.trace if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in work)
    names = " ".join(event["name"] for event in work)
    assert all(kind in names for kind in ("load", "head", "own"))


def test_heads_of_a_model_with_experts_are_recomputed(tmp_path: Path) -> None:
    """It asks its attention backend for SGLang's pool, to write KV itself where it can."""
    model = build_tiny_model(tmp_path / "model", num_experts=4)
    args = small_krul_server_args(POOL_TOKENS, {**RANDOM, "cache_dir": str(tmp_path / "cache")})
    prompt = random_prompt("experts", 611)
    with ForkedServer(model, args=args, env={**STRICT, **WITH_PLUGIN}) as server:
        first = ask(server, prompt, max_new_tokens=12)
        push_out(server, num_tokens=POOL_TOKENS, seed="experts")
        again = ask(server, prompt, max_new_tokens=12)
        stats = settled_stats(server)
    assert_same([first], [again])
    assert again.host_tokens > 500
    assert stats["restore"]["forward"]["head_tokens"] > 0
    proof = stats["restore"]["proof"]
    assert 0 < proof["routed_alike"] == proof["routed_rows"]


def test_experts_with_nearly_equal_scores_are_no_reason_to_have_no_heads(tmp_path: Path) -> None:
    """Roundings decide between them, and what follows in other layers is far from the prefill then."""
    model = build_tiny_model(tmp_path / "model", dtype="bfloat16", num_layers=12, num_experts=16)
    make_experts_alike(model)
    args = small_krul_server_args(POOL_TOKENS, {**RANDOM, "cache_dir": str(tmp_path / "cache")})
    args = tuple("bfloat16" if arg == "float32" else arg for arg in args)
    prompt = random_prompt("experts", 611)
    with ForkedServer(model, args=args, env={**STRICT, **ROUNDED_HEADS}) as server:
        ask(server, prompt, max_new_tokens=1)
        push_out(server, num_tokens=POOL_TOKENS, seed="experts")
        again = ask(server, prompt, max_new_tokens=1)
        restore = settled_stats(server)["restore"]
    proof = restore["proof"]
    assert 0.9 * proof["routed_rows"] < proof["routed_alike"] < proof["routed_rows"]
    assert restore["mode"]["why"] == "as configured"
    assert again.host_tokens > 500
    assert restore["forward"]["head_tokens"] > 0


def test_answers_differ_from_each_other(kept: Played) -> None:
    """Without this the equalities above could hold for a model that always says the same."""
    answers = [answer.output_ids for answer in kept.all()]
    assert len(set(answers)) == len(answers)


def test_control_heads_that_are_not_recomputed_are_noticed(
    kept: Played, tiny_models: dict[str, Path]
) -> None:
    args = small_krul_server_args(POOL_TOKENS, RANDOM)
    with ForkedServer(tiny_models["float32"], args=args, env={**STRICT, **SKIPPED_HEADS}) as server:
        turns = play(server, "conversation", evict=True)
    assert turns[0].output_ids == kept.turns[0].output_ids
    assert turns[1].output_ids != kept.turns[1].output_ids
