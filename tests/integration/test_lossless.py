"""A conversation that left the pool, and is loaded whole, comes back with the same answers, to the bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.server import ServerProcess
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    KRUL,
    STRICT,
    Answer,
    ask,
    assert_nothing_left_behind,
    push_out,
    random_prompt,
    settled_stats,
)

NUM_TURNS = 3
PAGE_SIZE = 16


@dataclass(frozen=True)
class Mode:
    dtype: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


MODES = {
    # The overlap scheduler is SGLang's default: it is on in all of them.
    # With the threads of a user's server; the others have one each.
    "bf16-chunked-prefill": Mode("bfloat16", ("--chunked-prefill-size", "512"), (("OMP_NUM_THREADS", "2"),)),
    "fp32-python-tree": Mode("float32", (), (("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python"),)),
    "fp32-tp2-chunked-prefill": Mode(
        "float32", ("--tp", "2", "--chunked-prefill-size", "512"), (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)
    ),
}


@dataclass(frozen=True)
class Played:
    """The turns of one conversation on a server that never evicted it, and on one that always did."""

    prompts: list[list[int]]
    kept: list[Answer]
    restored: list[Answer]
    dtype: str
    stats: dict[str, Any]


def play(server: ServerProcess, *, evict: bool) -> tuple[list[list[int]], list[Answer]]:
    prompts, answers = [], []
    history = random_prompt("conversation", 700)
    for turn in range(NUM_TURNS):
        prompts.append(list(history))
        answers.append(ask(server, history, max_new_tokens=20))
        history += [*answers[-1].output_ids, *random_prompt(("question", turn), 37)]
        if evict:
            push_out(server, num_tokens=2400, seed=turn)
    return prompts, answers


@pytest.fixture(scope="module", params=MODES)
def played(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Played:
    mode = MODES[request.param]
    args = (*mode.args, "--dtype", mode.dtype, "--page-size", str(PAGE_SIZE), "--enable-cache-report")
    env = dict(mode.env)
    model = tiny_models[mode.dtype]
    with ForkedServer(model, args=(*args, "--max-total-tokens", "16384"), env=env) as server:
        prompts, kept = play(server, evict=False)
    options = json.dumps({"planner": "full-load"})
    small = (*args, "--max-total-tokens", "2048", *KRUL, "--unified-cache-external-linker-config", options)
    with ForkedServer(model, args=small, env={**env, **STRICT}) as server:
        _, restored = play(server, evict=True)
        assert_nothing_left_behind(server)
        stats = settled_stats(server)
    return Played(prompts, kept, restored, mode.dtype, stats)


def test_control_kept_the_conversation_on_the_device(played: Played) -> None:
    for prompt, answer in zip(played.prompts[1:], played.kept[1:], strict=True):
        assert answer.host_tokens == 0
        assert answer.device_tokens > len(prompt) - 3 * PAGE_SIZE - 37


def test_returning_turns_were_restored_from_the_host(played: Played) -> None:
    for kept, restored in zip(played.kept[1:], played.restored[1:], strict=True):
        assert restored.device_tokens == 0
        assert restored.host_tokens == kept.device_tokens


def test_tokens_and_logprobs_are_exactly_those_of_the_server_that_never_evicted(played: Played) -> None:
    for kept, restored in zip(played.kept, played.restored, strict=True):
        assert restored.output_ids == kept.output_ids
        assert restored.logprobs == kept.logprobs


def test_answers_depend_on_the_prompt(played: Played) -> None:
    """Without this the equality above could hold for a model that always says the same."""
    assert len({answer.output_ids for answer in played.kept}) == NUM_TURNS


def test_whole_loads_recompute_nothing_and_leave_nothing_out(played: Played) -> None:
    assert played.stats["restore"]["forward"]["head_tokens"] == 0
    assert played.stats["offload"]["left_out_bytes"] == 0


def test_recomputed_heads_are_those_of_a_prefill(played: Played) -> None:
    """What the proof at start saw, on every rank; this mode recomputes none."""
    proof = played.stats["restore"]["proof"]
    assert proof["rows"] > 1500
    assert proof["max_relative_error"] < {"float32": 1e-5, "bfloat16": 0.01}[played.dtype]
    if played.dtype == "bfloat16":
        assert proof["rows_within_one_ulp"] >= 0.999 * proof["rows"]
