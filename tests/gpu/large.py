"""A model of more than a billion parameters, made here: long prompts, bases, and users side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.simulate.timeline import count_steps
from benchmarks.tables import RESULTS
from benchmarks.tiers.timing import percentile
from demo.server import ServerProcess, wait_for_saves
from demo.summary import quantiles
from krul_backend.memory import format_bytes
from krul_sglang.cli.machine import available_bytes
from krul_sglang.cli.selftest import ProbeAnswer, SelftestConfig, run_selftest
from krul_sglang.sizing.on_paper import PCIE5, Model, predict
from krul_sglang.traced_restore import RESTORES, TracedRestore
from tests.gpu.serving import make_server, server_facts
from tests.gpu.stage import LeftOut, Setting, Stage
from tests.support.scenario import ask, assert_nothing_left_behind, push_out, random_prompt, settled_stats
from tests.support.tiny_model import build_tiny_model

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of the model that is made, as Llama-3-8B has them; it is less wide."""
_WIDTH = 2048
_BELIEVED = (0.5, 2.0)
"""A restore may take so much less or more than the planner believes."""


@dataclass(frozen=True)
class Sizes:
    """``prompt``, ``chunk`` and ``pool`` in tokens; ``turns`` of each of so many ``users``."""

    prompt: int
    chunk: int
    pool: int
    turn: int
    turns: int
    users: int
    new: int


LARGE = Sizes(prompt=16_384, chunk=4096, pool=40_960, turn=1000, turns=8, users=16, new=128)
SMALL = Sizes(prompt=1024, chunk=256, pool=2560, turn=400, turns=2, users=4, new=8)


def sizes_of(setting: Setting) -> Sizes:
    return SMALL if setting.is_dry else LARGE


def large_model(setting: Setting, num_layers: int = NUM_LAYERS) -> Path:
    """The checkpoint to serve: that of ``--model``, or random weights, which are made once."""
    if setting.model is not None:
        return Path(setting.model)
    path = setting.folder / f"model-{num_layers}"
    if not (path / "made").exists():
        shape = {"hidden_size": _WIDTH, "num_layers": num_layers, "num_heads": _WIDTH // HEAD_DIM}
        shape |= {"num_kv_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM}
        shape |= {"max_positions": 65_536, "init_std": 0.02}
        build_tiny_model(path, dtype="bfloat16", **({} if setting.is_dry else shape))
        (path / "made").touch()
    return path


def long_prompts_are_loaded(setting: Setting) -> dict[str, Any]:
    """A prompt of many chunks comes back whole."""
    return _long_prompt(setting, "full-load")


def long_prompts_are_planned(setting: Setting) -> dict[str, Any]:
    """The same prompt, as the planner splits it."""
    if setting.is_dry:
        raise LeftOut("a CPU computes so small a model sooner than it loads")
    return _long_prompt(setting, "local-search")


def _long_prompt(setting: Setting, planner: str) -> dict[str, Any]:
    sizes, model = sizes_of(setting), large_model(setting)
    args = ["--chunked-prefill-size", str(sizes.chunk), "--max-total-tokens", str(sizes.pool)]
    with make_server(setting, _options(setting, planner=planner), args, model=model) as server:
        result = run_selftest(SelftestConfig(server.url, prompt_tokens=sizes.prompt, timeout_s=400))
        assert result.passed, result.verdict
        restores = _restores(server)
        assert_nothing_left_behind(server)
        predicted = None if setting.model is not None else _predicted(result.again)
        print(f"{planner}: predicted {predicted}, seen {restores[-1].end_s} s", flush=True)
        return {
            "verdict": result.verdict,
            "predicted_s": predicted,
            "prompt_tokens": result.again.prompt_tokens,
            "computed_s": result.cold.latency_s,
            "restored_s": result.again.latency_s,
            "planned_s": restores[-1].planned_s,
            "traced_s": restores[-1].end_s,
            "restore": settled_stats(server)["restore"],
            **server_facts(server),
        }


def _predicted(again: ProbeAnswer) -> dict[str, float]:
    """What ``benchmarks.simulate`` computes for an H100 and the model that is made here."""
    counted = json.loads((RESULTS / "launches.json").read_text())["rows"]
    model = Model("made here", NUM_LAYERS, _WIDTH, 2 * _WIDTH, _WIDTH // HEAD_DIM, NUM_KV_HEADS, HEAD_DIM)
    new_tokens = again.prompt_tokens - again.host_tokens
    # It has as many layers and KV heads as the model whose launches were counted.
    return predict(model, PCIE5, count_steps(counted, "Llama-3-8B"), again.host_tokens, new_tokens)


def turns_are_kept_in_bases(setting: Setting) -> dict[str, Any]:
    """Bases of ten layers are learned here, no turn is skipped, and restores are as fast as is believed."""
    sizes, model, cache = sizes_of(setting), large_model(setting, 10), setting.folder / "cache"
    learned_s = _learn(setting, model, cache)
    options = _options(setting, planner="full-load", strategy="subspace", error_budget=4.0, probe_share=0.0)
    options |= {"cache_dir": str(cache), "fast_copies": "never"}
    args = ["--max-total-tokens", str(4 * sizes.turn)]
    prompts = [random_prompt(("turn", number), sizes.turn) for number in range(sizes.turns)]
    with make_server(setting, options, args, model=model) as server:
        saved_s = []
        for prompt in prompts:
            ask(server, prompt, max_new_tokens=2)
            began_s = time.perf_counter()
            stats = wait_for_saves(server, timeout_s=300)[0]
            saved_s.append(time.perf_counter() - began_s)
        compression = stats["compression"]
        assert stats["offload"]["dropped_turns"] == {}, stats["offload"]
        assert stats["offload"]["failed_encodings"] == 0, stats["offload"]
        assert compression["subspace_turns"] == compression["turns"] >= sizes.turns, compression
        push_out(server, num_tokens=4 * sizes.turn, seed="bases")
        host_tokens = [ask(server, prompt, max_new_tokens=2).host_tokens for prompt in prompts]
        assert min(host_tokens) > sizes.turn // 2, host_tokens
        token_bytes = _token_bytes(model)
        rows = [
            {
                "tokens": restore.prefix_tokens,
                "believed_gbs": restore.prefix_tokens * token_bytes / restore.planned_s / 1e9,
                "seen_gbs": restore.prefix_tokens * token_bytes / restore.end_s / 1e9,
            }
            for restore in _restores(server)
            if restore.planned_s > 0
        ]
        ratio = percentile([row["believed_gbs"] / row["seen_gbs"] for row in rows], 0.5)
        assert setting.is_dry or _BELIEVED[0] <= ratio <= _BELIEVED[1], (ratio, rows)
        assert_nothing_left_behind(server)
        return {
            "learned_s": learned_s,
            "from_answer_to_stored_s": quantiles(saved_s),
            "seen_over_believed_s": ratio,
            "restores": rows,
            "compression": compression,
            "kernels": stats["restore"]["kernels"],
            **server_facts(server),
        }


def _learn(setting: Setting, model: Path, cache: Path) -> float:
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "krul_sglang.cli", "learn", "--model-path", str(model)]
    command += ["--pieces", "4" if setting.is_dry else "12", "--device", setting.device]
    env = {**os.environ, "KRUL_CACHE_DIR": str(cache)}
    finished = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-4000:]
    return time.perf_counter() - began_s


def users_wait_no_longer_for_tokens(setting: Setting) -> dict[str, Any]:
    """Users side by side in a pool for a part of them: times to and between tokens, without and with krul."""
    sizes, model = sizes_of(setting), large_model(setting)
    args = ["--max-total-tokens", str(sizes.users * sizes.turn), "--max-running-requests", str(sizes.users)]
    found: dict[str, Any] = {}
    for name, options in (("without krul", None), ("with krul", _options(setting))):
        with make_server(setting, options, args, model=model) as server:
            first_s, between_s = _side_by_side(server, sizes)
            found[name] = {
                "first_token_s": quantiles(first_s),
                "between_tokens_s": {**quantiles(between_s), "p99": percentile(between_s, 0.99)},
            }
            if options is not None:
                stats = settled_stats(server)
                assert stats["offload"]["dropped_turns"] == {}, stats["offload"]
                found |= {"hit_pages": stats["hit_pages"], **server_facts(server)}
                assert_nothing_left_behind(server)
    p99 = [found[name]["between_tokens_s"]["p99"] for name in ("with krul", "without krul")]
    return {**found, "p99_with_over_without": p99[0] / p99[1]}


def tokens_come_while_memory_is_pinned(setting: Setting) -> dict[str, Any]:
    """A server is ready before 64 GiB are pinned; what it restores meanwhile is right, and tokens go on."""
    num_bytes = 1 << 30 if setting.is_dry else 64 << 30
    if 1.25 * num_bytes > available_bytes():
        raise LeftOut(f"only {format_bytes(available_bytes())} of memory are available")
    sizes, model = sizes_of(setting), large_model(setting)
    args = ["--max-total-tokens", str(4 * sizes.turn)]
    options = {"host_memory": num_bytes, "planner": "full-load"}
    with make_server(setting, options, args, model=model) as server:
        ready_s, shares = time.perf_counter(), [_locked_share(server)]
        result = run_selftest(SelftestConfig(server.url, prompt_tokens=sizes.turn, timeout_s=400))
        assert result.passed, result.verdict
        shares.append(_locked_share(server))
        beside_s = _between_tokens(server, sizes, 3)
        while (share := _locked_share(server)) < 1:
            beside_s += _between_tokens(server, sizes, 1)
            assert time.perf_counter() < ready_s + 300, f"{share:.0%} of the memory is pinned"
        pinned_s = time.perf_counter() - ready_s
        after_s = _between_tokens(server, sizes, 10)
        assert_nothing_left_behind(server)
        return {
            "gib": num_bytes / 2**30,
            "share_pinned_when_ready_and_after_selftest": shares,
            "pinned_after_ready_s": pinned_s,
            "between_tokens_beside_s": {**quantiles(beside_s), "p99": percentile(beside_s, 0.99)},
            "between_tokens_after_s": {**quantiles(after_s), "p99": percentile(after_s, 0.99)},
            **server_facts(server),
        }


def _locked_share(server: ServerProcess) -> float:
    """How much of the arena is pinned; on a CPU there is nothing to pin."""
    locked = server.server_info()["internal_states"][0]["krul"]["daemon"]["locked"]
    if locked is None:
        return 1.0
    assert locked["error"] == 0, locked
    return float(locked["bytes"] / locked["of_bytes"])


def _between_tokens(server: ServerProcess, sizes: Sizes, num_answers: int) -> list[float]:
    """Seconds between the tokens of answers, one after the other."""
    prompt = random_prompt("between tokens", 64)
    return [each for _ in range(num_answers) for each in _stream(server, prompt, sizes.new)[1][1:]]


def _side_by_side(server: ServerProcess, sizes: Sizes) -> tuple[list[float], list[float]]:
    """Seconds to the first tokens of returning turns, and between tokens of all."""
    first_s: list[float] = []
    between_s: list[float] = []
    lock = threading.Lock()

    def converse(user: int) -> None:
        history = random_prompt(("user", user), sizes.turn)
        for turn in range(3):
            ids, times_s = _stream(server, history, sizes.new)
            with lock:
                first_s.extend(times_s[:1] if turn else [])
                between_s.extend(times_s[1:])
            history = [*history, *ids, *random_prompt(("more", user, turn), 100)]

    with ThreadPoolExecutor(sizes.users) as pool:
        list(pool.map(converse, range(sizes.users)))
    return first_s, between_s


def _stream(server: ServerProcess, prompt: Sequence[int], num_new: int) -> tuple[list[int], list[float]]:
    """The answer's tokens, and the seconds before each piece of it."""
    sampling = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
    payload = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    ids: list[int] = []
    times_s: list[float] = []
    before_s = time.perf_counter()
    with httpx.stream("POST", f"{server.url}/generate", json=payload, timeout=600, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times_s.append(time.perf_counter() - before_s)
                before_s += times_s[-1]
                ids = json.loads(line.removeprefix("data: "))["output_ids"]
    assert len(ids) == num_new, f"{len(ids)} tokens of {num_new}"
    return ids, times_s


def _options(setting: Setting, **options: Any) -> dict[str, Any]:
    return {"host_memory": "1GiB" if setting.is_dry else "16GiB", **options}


def _token_bytes(model: Path) -> int:
    """Of a token's keys and values in all layers, in 16 bits."""
    config = json.loads((model / "config.json").read_text())
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def _restores(server: ServerProcess) -> list[TracedRestore]:
    (state,) = server.server_info()["internal_states"]
    return [TracedRestore.parse(value, index=index, rank=0) for index, value in enumerate(state[RESTORES])]


LONG_PROMPTS: Stage = (
    ("long prompts are loaded", long_prompts_are_loaded),
    ("long prompts are planned", long_prompts_are_planned),
)
SUBSPACE: Stage = (("turns are kept in bases", turns_are_kept_in_bases),)
PINNING: Stage = (("tokens come while memory is pinned", tokens_come_while_memory_is_pinned),)
USERS: Stage = (("users wait no longer for tokens", users_wait_no_longer_for_tokens),)
