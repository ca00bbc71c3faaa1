"""Returning turns beside SGLang's own host cache, on servers that share the device and take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from demo.server import ServerProcess, start_servers, stop_servers, wait_for_saves
from krul_sglang.traced_restore import RESTORES
from tests.gpu.large import large_model
from tests.gpu.serving import make_server, server_facts
from tests.gpu.stage import Setting, Stage
from tests.support.scenario import random_prompt, request_payload

RECOMPUTE, KRUL, HICACHE = "recompute", "krul", "HiCache"
HOST_GIB = 32
"""Of each server: what pushes a history out of the pool must not push it out of host memory."""
HICACHE_ARGS = ("--enable-hierarchical-cache", "--hicache-size", str(HOST_GIB))
REPEATS, NEW_TOKENS = 3, 100
LARGE, SMALL = ((2048, 1), (8192, 8), (8192, 1), (16_384, 1)), ((512, 1), (1024, 4))
"""Lengths of histories in tokens, and in how many turns they came."""


def turns_come_back(setting: Setting) -> dict[str, Any]:
    """Seconds to the first token of new ones after a history that has left the device, and after one that has
    not, by each server in turn; and of users who come back at once."""
    names = (RECOMPUTE, KRUL) if setting.is_dry else (RECOMPUTE, KRUL, HICACHE)
    histories, pool, users = (SMALL, 2560, (4, 400)) if setting.is_dry else (LARGE, 40_960, (8, 4000))
    servers = {name: _server(setting, name, pool) for name in names}
    rows: list[dict[str, Any]] = []
    returning_s: dict[str, list[float]] = {}
    try:
        start_servers(list(servers.values()))
        # In the first round kernels are compiled.
        for repeat in range(REPEATS + 1):
            for length, num_turns in histories:
                for name, server in servers.items():
                    seed = "alone", repeat, length, num_turns
                    times = _come_back(server, seed, length, num_turns, pool)
                    if repeat:
                        rows.append({"server": name, "history": length, "turns": num_turns, **times})
                        of_history = returning_s.setdefault(f"{length} in {num_turns} turns, {name}", [])
                        of_history.append(times["returning_s"])
        # The first time kernels for several requests are compiled.
        together = {
            name: [_come_back_together(server, *users, pool) for _ in range(2)]
            for name, server in servers.items()
        }
        facts = {name: server_facts(server) for name, server in servers.items()}
        (state,) = servers[KRUL].server_info()["internal_states"]
    finally:
        stop_servers(list(servers.values()))
    medians = {history: statistics.median(times) for history, times in returning_s.items()}
    print("\n".join(f"{history}: {seconds:.3f} s" for history, seconds in medians.items()), flush=True)
    return {
        "medians_s": medians,
        "rows": rows,
        "users_at_once": together,
        "servers": facts,
        "last_restores": state[RESTORES],
    }


def _server(setting: Setting, name: str, pool: int) -> ServerProcess:
    options = {"host_memory": "1GiB" if setting.is_dry else f"{HOST_GIB}GiB"} if name == KRUL else None
    args = ["--max-total-tokens", str(pool), "--skip-tokenizer-init"]
    args += HICACHE_ARGS if name == HICACHE else ()
    if setting.is_dry or setting.model is not None:
        return make_server(setting, options, args, model=large_model(setting))
    args += ["--load-format", "dummy", "--mem-fraction-static", "0.95"]
    return make_server(setting, options, args, model=_config_of_8b(setting))


def _config_of_8b(setting: Setting) -> Path:
    """A folder from which SGLang makes a Llama-3-8B with random weights."""
    from transformers import LlamaConfig

    path = setting.folder / "llama-3-8b"
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=65536,
        dtype="bfloat16",
    ).save_pretrained(path)
    return path


def _come_back(server: ServerProcess, seed: object, length: int, num_turns: int, pool: int) -> dict[str, Any]:
    history = random_prompt(seed, length)
    for turn in range(num_turns):
        first_s, _ = _first_token(server, history[: length * (turn + 1) // num_turns])
        _settle(server)
    _push_out(server, seed, pool)
    returning_s, num_cached = _first_token(server, history + random_prompt((seed, "new"), NEW_TOKENS))
    _settle(server)
    device_s, _ = _first_token(server, history + random_prompt((seed, "other"), NEW_TOKENS))
    return {"first_s": first_s, "returning_s": returning_s, "device_s": device_s, "cached": num_cached}


def _come_back_together(server: ServerProcess, num_users: int, length: int, pool: int) -> list[float]:
    histories = [random_prompt(("user", user), length) for user in range(num_users)]
    with ThreadPoolExecutor(num_users) as threads:
        list(threads.map(lambda history: _first_token(server, history), histories))
        _settle(server)
        _push_out(server, "users", pool)
        prompts = [history + random_prompt(("new", *history[:9]), NEW_TOKENS) for history in histories]
        return sorted(seconds for seconds, _ in threads.map(lambda each: _first_token(server, each), prompts))


def _push_out(server: ServerProcess, seed: object, pool: int) -> None:
    for number in range(6):
        _first_token(server, random_prompt((seed, "pushes", number), pool // 5))
    _settle(server)


def _settle(server: ServerProcess) -> None:
    """Wait until what was asked is stored: HiCache does not say so."""
    time.sleep(0.3)
    wait_for_saves(server)


def _first_token(server: ServerProcess, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds of a request for one token, and how many of its tokens the server had."""
    payload = request_payload(list(prompt), max_new_tokens=1) | {"return_logprob": False}
    began_s = time.perf_counter()
    answer = server.post_json("/generate", payload)
    return time.perf_counter() - began_s, answer["meta_info"]["cached_tokens"]


BESIDE: Stage = (("turns come back beside HiCache", turns_come_back),)
