"""The real server with each attention backend and CUDA graphs, its own self-test, and the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from demo.app import BUNDLED_CONVERSATIONS
from demo.conversations import load_conversations
from demo.player import Player
from demo.server import ServerProcess
from krul_sglang.cli.selftest import SelftestConfig, run_selftest
from krul_sglang.models.find import REFERENCE_MODEL
from tests.gpu.stage import LeftOut, Setting, Stage
from tests.support.scenario import (
    KRUL,
    STRICT,
    STRICT_ON_TWO_CORES,
    assert_nothing_left_behind,
    play_chats,
    settled_stats,
)
from tests.support.server_plugin import WITH_PLUGIN, spoiled_heads

_SHOWN_FLAGS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "disable_cuda_graph",
    "cuda_graph_config",
    "chunked_prefill_size",
    "kv_cache_dtype",
)
"""Of the server's resolved arguments, what says which kernels and graphs it ran with."""
_ELEMENTS = {"bf16": "auto", "fp8": "fp8_e4m3"}
"""SGLang's names for the elements of the pool; the bundled model's own are bf16."""


def tests_of_the_gpu(setting: Setting) -> dict[str, Any]:
    """pytest over what the stage of kernels has not run yet."""
    if setting.is_dry:
        raise LeftOut("they are skipped without a GPU")
    path = Path(__file__).with_name("test_query_capture_cuda.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-4000:]
    return {"summary": finished.stdout.strip().splitlines()[-1]}


def whole_prefixes_are_loaded(setting: Setting) -> dict[str, Any]:
    """The self-test passes with everything loaded, on a server with its default graphs."""
    return _selftest(setting, {"planner": "full-load"})


def heads_are_recomputed(setting: Setting) -> dict[str, Any]:
    """The self-test passes with heads of random lengths, by the attention that this device offers."""
    return _selftest(setting, {"planner": "random"})


def prefixes_come_back_with_eager_prefill(setting: Setting) -> dict[str, Any]:
    """The same without CUDA graphs, which shows whether a failure above is theirs."""
    return _selftest(setting, {"planner": "random"}, ["--disable-cuda-graph"])


def prefixes_come_back_to_two_ranks(setting: Setting) -> dict[str, Any]:
    """Tensor parallelism: each rank has its own part of the memory and its own device."""
    if not setting.is_dry and torch.cuda.device_count() < 2:
        raise LeftOut("there is one device")
    return _selftest(
        setting, {"planner": "random"}, ["--tp", "2"], STRICT_ON_TWO_CORES if setting.is_dry else {}
    )


def unproven_heads_are_loaded(setting: Setting) -> dict[str, Any]:
    """Heads that are computed wrongly fail their proof; the server says so, and serves by whole loads."""
    result = _selftest(setting, {"planner": "full-load"}, env=spoiled_heads(0))
    mode = result["restore"]["mode"]
    assert "cannot be recomputed" in mode["why"], mode
    assert mode["planner"] == "full-load", mode
    return result


def _backend(setting: Setting, *, backend: str, elements: str, page_size: int) -> dict[str, Any]:
    """The self-test with one attention backend, element type of the pool, and page size."""
    if setting.is_dry and backend != "triton":
        raise LeftOut("a CPU has one attention backend")
    if backend == "fa3" and not setting.is_dry and torch.cuda.get_device_capability(0)[0] not in (8, 9):
        raise LeftOut("FA3 has no kernels for this device")
    args = ["--page-size", str(page_size), "--kv-cache-dtype", _ELEMENTS[elements]]
    args += [] if setting.is_dry else ["--attention-backend", backend]
    # Heads of an fp8 pool may fall on the other side of a step, which changes answers a little.
    planner = "random" if elements == "bf16" else "full-load"
    return _selftest(setting, {"planner": planner}, args)


def queries_are_recorded_inside_graphs(setting: Setting) -> dict[str, Any]:
    """Conversations are stored with pairs of layers, which need statistics of every turn."""
    options = {"strategy": "krul", "gamma": 0.0, "planner": "full-load"}
    conversations = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=4, turns=3)
    with make_server(setting, options) as server:
        with Player(server.url, max_tokens=32) as player:
            played = list(play_chats(player, conversations))
        stats = settled_stats(server)
        compression = stats["compression"]
        assert stats["offload"]["dropped_turns"] == {}, stats["offload"]
        assert compression["turns"] >= len(played), compression
        assert sum(compression["pairs"].values()) > 0, compression
        assert_nothing_left_behind(server)
        return {"turns": len(played), "compression": compression, **server_facts(server)}


def demo(setting: Setting) -> dict[str, Any]:
    """The demo: the same prompts to three servers; its verdict decides."""
    path = setting.folder / "demo.json"
    model = "bundled" if setting.model is None else setting.model
    command = [sys.executable, "-m", "demo", "--json", str(path), "--model-path", model]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-4000:]
    summary: dict[str, Any] = json.loads(path.read_text())["summary"]
    return summary


def _selftest(
    setting: Setting, options: dict[str, Any], args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    with make_server(setting, options, args, env) as server:
        result = run_selftest(SelftestConfig(url=server.url, min_host_share=0.5))
        assert result.passed, result.verdict
        stats = settled_stats(server)
        assert stats["restore"]["forward"]["rescued_requests"] == 0, stats["restore"]
        assert_nothing_left_behind(server)
        return {
            "verdict": result.verdict,
            "cold_s": result.cold.latency_s,
            "again_s": result.again.latency_s,
            "restore": stats["restore"],
            "load": stats["load"],
            **server_facts(server),
        }


def make_server(
    setting: Setting,
    options: dict[str, Any] | None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    model: str | Path | None = None,
) -> ServerProcess:
    """A server with these options of krul, or without krul if they are None. Kernels are SGLang's choice."""
    config = json.dumps({"host_memory": "2GiB", **(options or {})})
    return ServerProcess(
        model or setting.model or REFERENCE_MODEL,
        args=(
            *("--page-size", "16", "--max-total-tokens", "4096", "--enable-cache-report"),
            *(() if options is None else (*KRUL, "--unified-cache-external-linker-config", config)),
            *setting.server_args,
            *args,
        ),
        env={**STRICT, **WITH_PLUGIN, **(env or {})},
        # Kernels are compiled at the first start.
        ready_timeout_s=900.0,
    )


def server_facts(server: ServerProcess) -> dict[str, Any]:
    """After how long it was ready, and with which kernels and graphs it ran."""
    info = server.server_info()
    return {
        "ready_after_s": server.ready_after_s,
        "flags": {name: info[name] for name in _SHOWN_FLAGS if name in info},
    }


CHECKS: Stage = (
    ("tests of the GPU", tests_of_the_gpu),
    ("whole prefixes are loaded", whole_prefixes_are_loaded),
    ("heads are recomputed", heads_are_recomputed),
    ("prefixes come back with eager prefill", prefixes_come_back_with_eager_prefill),
    ("prefixes come back to two ranks", prefixes_come_back_to_two_ranks),
    ("unproven heads are loaded", unproven_heads_are_loaded),
    ("queries are recorded inside graphs", queries_are_recorded_inside_graphs),
    ("demo", demo),
)

BACKENDS: Stage = tuple(
    (
        f"{backend}, {elements}, pages of {page_size}",
        partial(_backend, backend=backend, elements=elements, page_size=page_size),
    )
    for backend, elements, page_size in product(("fa3", "flashinfer", "triton"), _ELEMENTS, (16, 64))
)
