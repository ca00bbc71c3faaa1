"""The servers that a run compares: how each is started, when it is idle, what it has stored."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import orjson
import psutil

from benchmarks.planners import COMPARED
from benchmarks.serving.configuration import (
    SPECULATIVE,
    Configuration,
    ServingBenchmarkError,
    has_variant,
    is_krul,
)
from benchmarks.serving.slow_ssd import SlowSsdDaemon
from demo.run import default_dtype
from demo.server import KrulState, ServerProcess, krul_states, stored_amounts, wait_for_saves
from demo.sizing import PoolSizes
from krul_backend.memory import parse_bytes
from krul_backend.strategy.strategy import SUBSPACE
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.config import DAEMON_MARK, KrulConfig

logger = logging.getLogger(__name__)

WITHOUT_PREFETCH = "benchmarks.serving.without_prefetch"
WITH_PLANNERS = "benchmarks.planners"
_READY_TIMEOUT_S = 600.0
_SETTLE_TIMEOUT_S = 120.0
_HOST_MEMORY_SLACK = 1.25
_MIN_HOST_MEMORY_BYTES = 128 << 20


@dataclass(frozen=True)
class Counts:
    """krul's counters of one server, all replicas together.

    ``hit_pages`` by tier, ``dram_tokens`` (of loads that waited for no lower tier) and ``prefetched_bytes``
    by whether they were found later ("useful") or evicted before ("wasted") count what happened;
    ``num_bytes`` and ``num_pages`` are what each tier holds.
    """

    hit_pages: Mapping[str, int]
    dram_tokens: int
    prefetched_bytes: Mapping[str, int]
    num_bytes: Mapping[str, int]
    num_pages: Mapping[str, int]


@dataclass
class Server:
    """A running server. ``options``: krul's; None without krul. ``daemon``: one that it joins, if any."""

    name: str
    pool_tokens: int
    options: Mapping[str, Any] | None
    process: ServerProcess
    daemon: SlowSsdDaemon | None = None
    first_counts: Counts | None = None

    def settle(self) -> None:
        """Wait until nothing is left of what krul does after an answer: turns are stored, on every tier.

        Raises:
            ServerError: after two minutes something is still left.
        """
        wait_for_saves(self.process, timeout_s=_SETTLE_TIMEOUT_S)

    def krul_states(self) -> list[KrulState]:
        return krul_states(self.process.server_info())

    def mark(self) -> None:
        """Let ``counts`` count from now on."""
        self.first_counts = self._counts()

    def counts(self) -> Counts | None:
        """What happened since ``mark``, and what the tiers hold; None without krul."""
        now, first = self._counts(), self.first_counts
        if now is None or first is None:
            return now
        return replace(
            now,
            hit_pages=_minus(now.hit_pages, first.hit_pages),
            dram_tokens=now.dram_tokens - first.dram_tokens,
            prefetched_bytes=_minus(now.prefetched_bytes, first.prefetched_bytes),
        )

    def _counts(self) -> Counts | None:
        states = self.krul_states()
        if not states:
            return None
        hit_pages: Counter[str] = Counter()
        prefetched: Counter[str] = Counter()
        num_bytes: Counter[str] = Counter()
        num_pages: Counter[str] = Counter()
        for state in states:
            hit_pages.update(state["tier_hit_pages"])
            prefetched.update(
                {outcome: state[f"prefetch_{outcome}_bytes"] for outcome in ("useful", "wasted")}
            )
            for tier in ({**state, "name": DRAM_TIER}, *state["tiers"]):
                num_bytes[tier["name"]] += tier["stored_bytes"]
                num_pages[tier["name"]] += tier["num_pages"]
        dram_tokens = sum(state["load"]["dram_tokens"] for state in states)
        return Counts(hit_pages, dram_tokens, prefetched, num_bytes, num_pages)

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
            "turns_not_stored": sum(sum(state["offload"]["dropped_turns"].values()) for state in states),
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
    is_reference = name.split("+")[0] == "device"
    pool_tokens = pools.reference_tokens if is_reference else pools.device_tokens
    args = [
        *("--page-size", str(configuration.page_size)),
        *("--dtype", dtype(configuration)),
        *configuration.server_args,
        *("--max-total-tokens", str(pool_tokens)),
    ]
    if has_variant(name, SPECULATIVE):
        args += _speculation(configuration, folder)
    options = daemon = None
    if is_krul(name):
        options = configuration.options_of(name)
        values = {
            "cache_dir": str(folder / name),
            "host_memory": host_memory_bytes(configuration, pools, name),
            **options,
        }
        if options.get("strategy") == SUBSPACE:
            _bring_bases(configuration.model_path, folder / name)
        _bring_costs(name, folder)
        ssd_capacity: str | int | None = configuration.ssd
        if ssd_capacity is None and configuration.ssd_share is not None:
            ssd_capacity = _share_bytes(configuration.ssd_share, configuration, pools)
        if ssd_capacity is not None:
            values |= {"ssd_dir": str(folder / f"{name}-ssd"), "ssd_capacity": ssd_capacity}
        if configuration.ssd_read_mbs is not None:
            daemon = _slow_daemon(values, folder / f"{name}-daemon", configuration.ssd_read_mbs)
            values = _without_daemon_options(values) | {"endpoint": str(daemon.runtime_dir)}
        args += ["--radix-cache-backend", "krul"]
        args += ["--unified-cache-external-linker-config", orjson.dumps(values).decode()]
    process = ServerProcess(configuration.model_path, args=args, ready_timeout_s=_READY_TIMEOUT_S)
    module = "sglang.launch_server"
    if has_variant(name, "no-prefetch"):
        module = WITHOUT_PREFETCH
    elif options is not None and options.get("planner") in COMPARED:
        module = WITH_PLANNERS
    process.command[process.command.index("sglang.launch_server")] = module
    return Server(name, pool_tokens, options, process, daemon)


def _speculation(configuration: Configuration, folder: Path) -> list[str]:
    """Arguments of a server that drafts. Drafts of an EAGLE with random weights are not accepted: restores
    take the same time."""
    algorithm, load_format = configuration.speculative, "auto"
    if algorithm == "NGRAM":
        # SGLang's default capacity takes 2 GB; with pages of several tokens it takes no broader trees.
        return [
            *("--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", "4"),
            *("--speculative-ngram-capacity", "100000", "--speculative-ngram-max-bfs-breadth", "1"),
        ]
    draft = configuration.draft_model or Path(configuration.model_path)
    if configuration.draft_model is None and algorithm != "STANDALONE":
        draft, load_format = _random_eagle(draft, folder / "draft", is_third=algorithm == "EAGLE3"), "dummy"
    return [
        *("--speculative-algorithm", str(algorithm), "--speculative-draft-model-path", str(draft)),
        *("--speculative-draft-load-format", load_format, "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ]


def _random_eagle(model: Path, draft: Path, *, is_third: bool) -> Path:
    """A folder of a draft for a Llama: one layer like the model's, without weights."""
    draft.mkdir(exist_ok=True)
    for path in model.glob("*token*"):
        shutil.copyfile(path, draft / path.name)
    config = orjson.loads((model / "config.json").read_bytes())
    last = config["num_hidden_layers"] - 1
    config |= {"tie_word_embeddings": False, "num_hidden_layers": 1}
    config["architectures"] = [f"LlamaForCausalLMEagle{'3' * is_third}"]
    if is_third:
        layers = {"eagle_aux_hidden_state_layer_ids": [0, last // 2, last - 1]}
        config |= {"draft_vocab_size": None, "eagle_config": layers}
    (draft / "config.json").write_bytes(orjson.dumps(config))
    return draft


def _slow_daemon(values: Mapping[str, Any], runtime_dir: Path, read_mbs: float) -> SlowSsdDaemon:
    """The daemon that a server with these options would start, but for its disk."""
    from krul_sglang.engine.common.store_connection import daemon_arguments

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


def _bring_costs(name: str, folder: Path) -> None:
    """Let a variant plan with the costs that an earlier variant of the same server has measured."""
    from krul_sglang.adapter.attach import COSTS_FILE

    measured = sorted(folder.glob(f"{name.split('+')[0]}*/{COSTS_FILE}"))
    if measured and not (folder / name / COSTS_FILE).exists():
        (folder / name).mkdir(exist_ok=True)
        shutil.copyfile(measured[0], folder / name / COSTS_FILE)


def check_pool(server: Server, page_size: int) -> None:
    """Raises ServingBenchmarkError if the device pool is another one than asked for."""
    got = server.process.server_info().get("max_total_num_tokens")
    if got is None or abs(got - server.pool_tokens) > page_size:
        raise ServingBenchmarkError(
            f"{server.name}: a device pool of {got} tokens where {server.pool_tokens} were asked for; use "
            "fewer --users, or give it more memory (--server-arg=--mem-fraction-static=...)"
        )


def _minus(now: Mapping[str, int], first: Mapping[str, int]) -> dict[str, int]:
    return {name: number - first.get(name, 0) for name, number in now.items()}


def dtype(configuration: Configuration) -> str:
    return default_dtype() if configuration.dtype is None else configuration.dtype


def host_memory_bytes(configuration: Configuration, pools: PoolSizes, name: str = "native") -> int:
    """What is asked for, or enough for all conversations as they are, uncompressed, on the server ``name``:
    a draft model has KV of its own, at most as much."""
    if configuration.host_memory is not None:
        return parse_bytes(configuration.host_memory)
    if configuration.host_share is not None:
        return _share_bytes(configuration.host_share, configuration, pools)
    needed = math.ceil(_HOST_MEMORY_SLACK * pools.total_tokens) * kv_token_bytes(configuration)
    needed *= 2 if has_variant(name, SPECULATIVE) else 1
    return max(needed, _MIN_HOST_MEMORY_BYTES)


def _share_bytes(share: float, configuration: Configuration, pools: PoolSizes) -> int:
    """A share of what all conversations take uncompressed."""
    return math.ceil(share * pools.total_tokens) * kv_token_bytes(configuration)


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
