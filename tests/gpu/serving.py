"""Stage b: the real server with FlashInfer and CUDA graphs, its own self-test, and the demo. Needs SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from krul_sglang.cli.app import BUNDLED_CONVERSATIONS
from krul_sglang.cli.selftest import SelftestConfig, run_selftest
from krul_sglang.demo.conversations import load_conversations
from krul_sglang.demo.player import Player
from krul_sglang.demo.server import ServerProcess
from krul_sglang.models.find import REFERENCE_MODEL
from tests.gpu.stage import LeftOut, Setting, Stage
from tests.support.scenario import KRUL, STRICT, assert_nothing_left_behind, play_chats, settled_stats
from tests.support.server_plugin import WITH_PLUGIN

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


def tests_of_the_gpu(setting: Setting) -> dict[str, Any]:
    """pytest over tests/gpu."""
    if setting.is_dry:
        raise LeftOut("they are skipped without a GPU")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
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


def queries_are_recorded_inside_graphs(setting: Setting) -> dict[str, Any]:
    """Conversations are stored with pairs of layers, which need statistics of every turn."""
    options = {"strategy": "krul", "gamma": 0.0, "planner": "full-load"}
    conversations = load_conversations(BUNDLED_CONVERSATIONS).select(num_conversations=4, turns=3)
    with _server(setting, options) as server:
        with Player(server.url, max_tokens=32) as player:
            played = list(play_chats(player, conversations))
        stats = settled_stats(server)
        compression = stats["compression"]
        assert stats["offload"]["dropped_turns"] == {}, stats["offload"]
        assert compression["turns"] >= len(played), compression
        assert sum(compression["pairs"].values()) > 0, compression
        assert_nothing_left_behind(server)
        return {"turns": len(played), "compression": compression, **_flags(server)}


def demo(setting: Setting) -> dict[str, Any]:
    """``krul-sglang demo``: the same prompts to three servers; its verdict decides."""
    path = setting.folder / "demo.json"
    model = "bundled" if setting.model is None else setting.model
    command = [sys.executable, "-m", "krul_sglang.cli", "demo", "--json", str(path), "--model-path", model]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-4000:]
    summary: dict[str, Any] = json.loads(path.read_text())["summary"]
    return summary


def _selftest(setting: Setting, options: dict[str, Any], args: Sequence[str] = ()) -> dict[str, Any]:
    with _server(setting, options, args) as server:
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
            **_flags(server),
        }


@contextmanager
def _server(setting: Setting, options: dict[str, Any], args: Sequence[str] = ()) -> Iterator[ServerProcess]:
    config = json.dumps({"host_memory": "2GiB", **options})
    server = ServerProcess(
        REFERENCE_MODEL if setting.model is None else setting.model,
        args=(
            *("--page-size", "16", "--max-total-tokens", "4096", "--enable-cache-report"),
            *("--unified-cache-external-linker-config", config),
            *KRUL,
            *(() if setting.is_dry else ("--attention-backend", "flashinfer")),
            *args,
        ),
        env={**STRICT, **WITH_PLUGIN},
        # FlashInfer compiles its kernels at the first start.
        ready_timeout_s=900.0,
    )
    with server:
        yield server


def _flags(server: ServerProcess) -> dict[str, Any]:
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
    ("queries are recorded inside graphs", queries_are_recorded_inside_graphs),
    ("demo", demo),
)
