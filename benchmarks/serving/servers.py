"""The servers that a run compares: how each is started, when it is idle, what it has stored."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.serving.configuration import KRUL_SERVERS, Configuration, ServingBenchmarkError
from benchmarks.serving.slow_ssd import SlowSsdDaemon
from krul_backend.memory import parse_bytes
from krul_backend.strategy.strategy import SUBSPACE
from krul_sglang.config import DAEMON_MARK, KrulConfig
from krul_sglang.demo.run import default_dtype
from krul_sglang.demo.server import KrulState, ServerProcess, krul_states, stored_amounts, wait_for_saves
from krul_sglang.demo.sizing import PoolSizes

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 600.0
_SETTLE_TIMEOUT_S = 120.0
_HOST_MEMORY_SLACK = 1.25
_MIN_HOST_MEMORY_BYTES = 128 << 20


@dataclass
class Server:
    """A running server. ``options``: krul's; None without krul. ``daemon``: one that it joins, if any."""

    name: str
    pool_tokens: int
    options: Mapping[str, Any] | None
    process: ServerProcess
    daemon: SlowSsdDaemon | None = None
    first_counters: dict[str, int] = field(default_factory=dict)

    def settle(self) -> None:
        """Wait until nothing is left of what krul does after an answer: turns are stored, on every tier.

        Raises:
            ServerError: after two minutes something is still left.
        """
        wait_for_saves(self.process, timeout_s=_SETTLE_TIMEOUT_S)

    def krul_states(self) -> list[KrulState]:
        return krul_states(self.process.server_info())

    def mark(self) -> None:
        """Count hits of krul's tiers from now on."""
        self.first_counters = self._hit_pages()

    def hit_pages(self) -> dict[str, int]:
        """Pages found on each of krul's tiers since ``mark``; empty without krul."""
        return {tier: pages - self.first_counters.get(tier, 0) for tier, pages in self._hit_pages().items()}

    def _hit_pages(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for state in self.krul_states():
            for tier, pages in state["tier_hit_pages"].items():
                found[tier] = found.get(tier, 0) + pages
        return found

    def bytes_stored(self) -> int | None:
        """Bytes that krul keeps: in host memory, or on the lower tier that has most. None without krul."""
        states = self.krul_states()
        if not states:
            return None
        stored = stored_amounts(states)
        lower: list[int] = [tier["stored_bytes"] for state in states for tier in state["tiers"]]
        return max((stored.num_bytes, *lower))

    def restores(self) -> dict[str, int] | None:
        """How many prefixes krul loaded, refused because computing is sooner, or lost; None without krul."""
        states = self.krul_states()
        if not states:
            return None
        plans = [state["restore"]["plans"] for state in states if state["restore"] is not None]
        return {
            "loaded": sum(state["load"]["requests"] for state in states),
            "refused": sum(each["refused"] for each in plans),
            "turns_not_stored": sum(
                state["offload"]["skipped_turns"] + state["offload"]["failed_turns"] for state in states
            ),
        }

    def tiers_mbs(self) -> dict[str, float] | None:
        """MB per second that krul now expects of each tier it has met; None without krul's planner."""
        costs = [state["restore"]["costs"]["tiers"] for state in self.krul_states() if state["restore"]]
        if not costs:
            return None
        return {tier: 1e-6 / cost["byte_s"] for tier, cost in costs[0].items() if cost["byte_s"] > 0}

    def memory_bytes(self) -> int:
        """Proportional set size of all its processes: memory that several share counts once in all."""
        root = psutil.Process(self.process.pid)
        total = 0
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total


def make_server(name: str, configuration: Configuration, pools: PoolSizes, folder: Path) -> Server:
    """A server that is not started yet. krul's costs are measured anew, and kept in ``folder`` only.

    Bases of the model are those in the user's cache directory, where they are learned if they are missing.
    """
    pool_tokens = pools.reference_tokens if name == "device" else pools.device_tokens
    args = [
        *("--page-size", str(configuration.page_size)),
        *("--dtype", dtype(configuration)),
        *configuration.server_args,
        *("--max-total-tokens", str(pool_tokens)),
    ]
    options = daemon = None
    if name in KRUL_SERVERS:
        options = configuration.options_of(name)
        values = {
            "cache_dir": str(folder / name),
            "host_memory": host_memory_bytes(configuration, pools),
            **options,
        }
        if options.get("strategy") == SUBSPACE:
            _bring_bases(configuration.model_path, folder / name)
        if configuration.ssd is not None:
            values |= {"ssd_dir": str(folder / f"{name}-ssd"), "ssd_capacity": configuration.ssd}
        if configuration.ssd_read_mbs is not None:
            daemon = _slow_daemon(values, folder / f"{name}-daemon", configuration.ssd_read_mbs)
            values = _without_daemon_options(values) | {"endpoint": str(daemon.runtime_dir)}
        args += ["--radix-cache-backend", "krul"]
        args += ["--unified-cache-external-linker-config", orjson.dumps(values).decode()]
    process = ServerProcess(configuration.model_path, args=args, ready_timeout_s=_READY_TIMEOUT_S)
    return Server(name, pool_tokens, options, process, daemon)


def _slow_daemon(values: Mapping[str, Any], runtime_dir: Path, read_mbs: float) -> SlowSsdDaemon:
    """The daemon that a server with these options would start, but for its disk."""
    from krul_sglang.engine.cache.store_connection import daemon_arguments

    config = KrulConfig.from_mapping(values, "options of a server")
    assert config.host_memory is not None, "make_server gives a size"
    return SlowSsdDaemon(runtime_dir, daemon_arguments(config, config.host_memory), read_mbs)


def _without_daemon_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is left for a server that joins a daemon."""
    of_daemon = {
        option.name for option in fields(KrulConfig) if option.metadata["description"].startswith(DAEMON_MARK)
    }
    return {name: value for name, value in values.items() if name not in of_daemon}


def _bring_bases(model_path: str, cache_dir: Path) -> None:
    from krul_sglang.learning.command import ensure_bases
    from krul_sglang.models.checkpoint import Checkpoint

    own = Path(KrulConfig.load(None).cache_dir).expanduser()
    (path,) = ensure_bases(Checkpoint(model_path), own, logger.info)
    target = cache_dir / path.relative_to(own)
    target.parent.mkdir(parents=True)
    shutil.copyfile(path, target)


def check_pool(server: Server, page_size: int) -> None:
    """Raises ServingBenchmarkError if the device pool is another one than asked for."""
    got = server.process.server_info().get("max_total_num_tokens")
    if got is None or abs(got - server.pool_tokens) > page_size:
        raise ServingBenchmarkError(
            f"{server.name}: a device pool of {got} tokens where {server.pool_tokens} were asked for; use "
            "fewer --users, or give it more memory (--server-arg=--mem-fraction-static=...)"
        )


def dtype(configuration: Configuration) -> str:
    return default_dtype() if configuration.dtype is None else configuration.dtype


def host_memory_bytes(configuration: Configuration, pools: PoolSizes) -> int:
    """What is asked for, or enough for all conversations as they are, uncompressed."""
    if configuration.host_memory is not None:
        return parse_bytes(configuration.host_memory)
    needed = math.ceil(_HOST_MEMORY_SLACK * pools.total_tokens) * kv_token_bytes(configuration)
    return max(needed, _MIN_HOST_MEMORY_BYTES)


def kv_token_bytes(configuration: Configuration) -> int:
    """Bytes of one token's keys and values in all layers."""
    import torch
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(configuration.model_path)
    name = dtype(configuration)
    element = (
        model.dtype
        if name == "auto"
        else getattr(torch, {"half": "float16", "float": "float32"}.get(name, name))
    )
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(2 * model.num_hidden_layers * model.num_key_value_heads * head_dim * element.itemsize)
