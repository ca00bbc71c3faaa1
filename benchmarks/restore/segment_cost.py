"""What a returning prefix costs the host by the number of turns that it was stored in, at equal tokens.

The engine's own loader fills a pool of a model's shape from a store in this process; nothing is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks.restore.configuration import RestoreBenchmarkError, WrongRestoreError
from benchmarks.restore.model import SHAPES, KVPool, scattered_slots
from benchmarks.restore.setting import spread
from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitPlan
from krul_backend.device import Device
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import ComputeCost, RestoreCosts, RestorePlan, TierCost
from krul_backend.planner.planners import make_planner
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.tiered_store import TieredStore
from krul_backend.strategy.strategy import Strategy
from krul_backend.tiers.common.interface import DRAM_TIER, block_checksum, block_checksums
from krul_backend.tiers.dram.host_store import HostStore
from krul_sglang.demo.environment import about_run
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.load_batch import Forecast, Load
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.restore.restore_planning import DecodeCosts, RestorePlanning
from krul_sglang.engine.restore.segment_reader import open_segments

T = TypeVar("T")

_PAGE_SIZE = 1
"""SGLang's on a CPU: the most keys that a lookup can have."""
_WARM_UPS = 2
_LONG = ("load", "total")
_SPREAD = ("median", "min", "p90")
_COSTS = RestoreCosts(
    head=ComputeCost(1e-4, 1e-6, 1e-10),
    own=ComputeCost(1e-4, 1e-6, 1e-10),
    tiers={DRAM_TIER: TierCost(1e-5, 1e-10)},
)
"""Only for the time that planning takes: what is loaded is everything, whatever the plan."""


@dataclass(frozen=True)
class SegmentCostConfiguration:
    """``shapes`` as ``NAME:DTYPE``. Prefixes of ``history_tokens``, stored as each of ``segments``.

    Raises:
        RestoreBenchmarkError: an unknown shape or dtype, or fewer tokens than segments.
    """

    segments: tuple[int, ...]
    shapes: tuple[str, ...] = ("smollm2-135m:float32", "smollm2-135m:bfloat16", "llama3-8b:bfloat16")
    history_tokens: tuple[int, ...] = (1024, 3072)
    repeats: int = 15
    threads: int = 1

    def __post_init__(self) -> None:
        for text in self.shapes:
            name, _, dtype = text.partition(":")
            if name not in SHAPES or dtype not in ("float32", "float16", "bfloat16"):
                raise RestoreBenchmarkError(
                    f"{text!r} is no NAME:DTYPE with a shape of {', '.join(SHAPES)} and a float type"
                )
        if min(self.segments) < 1 or max(self.segments) > min(self.history_tokens) or self.repeats < 1:
            raise RestoreBenchmarkError(
                f"{self.history_tokens} tokens cannot be stored as {self.segments} segments"
            )


def run_segment_cost(configuration: SegmentCostConfiguration) -> dict[str, Any]:
    """Measure every shape and length.

    Raises:
        WrongRestoreError: what came back is not what was stored, to the bit.
    """
    started_s = time.monotonic()
    torch.set_num_threads(configuration.threads)
    rows: list[dict[str, Any]] = []
    for shape in configuration.shapes:
        for num_tokens in configuration.history_tokens:
            rows += _Bench(shape, num_tokens, configuration).rows()
    return {
        **about_run(("torch",)),
        "configuration": asdict(configuration),
        "duration_s": round(time.monotonic() - started_s, 1),
        "rows": rows,
    }


def summarize_segment_cost(result: dict[str, Any]) -> dict[str, Any]:
    """``result`` with the median of each step, and the spread of those that take longest."""
    rows = []
    for row in result["rows"]:
        of_steps = {
            step: {name: of_step[name] for name in (_SPREAD if step in _LONG else _SPREAD[:1])}
            for step, of_step in row["seconds"].items()
        }
        rows.append({**row, "seconds": of_steps})
    return {**result, "rows": rows}


class _Pool(KVPool):
    """What the engine's loader uses of ``DevicePool``."""

    @property
    def streams(self) -> Device:
        return Device(self.device)

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[layer], self.v[layer]


class _Bench:
    """One prefix of one model, stored once for each number of segments."""

    def __init__(self, shape: str, num_tokens: int, configuration: SegmentCostConfiguration) -> None:
        name, _, dtype = shape.partition(":")
        model = SHAPES[name]
        kv_shape = model.kv_shape(getattr(torch, dtype))
        self._shape, self._num_tokens, self._configuration = shape, num_tokens, configuration
        self._num_layers = model.num_layers
        self._num_bytes = num_tokens * model.kv_token_bytes(kv_shape.dtype)
        self._codec = ModelCodecs(kv_shape, model.num_layers, None)
        self._identity = ModelIdentity(
            name, "bench", dtype, model.num_layers, model.num_kv_heads, model.head_dim, model.head_dim,
            _PAGE_SIZE, 0, 1,
        )  # fmt: skip
        self._token_ids = np.arange(num_tokens, dtype=np.int32)
        generator = torch.Generator().manual_seed(0)
        size = (num_tokens, model.num_kv_heads, model.head_dim)
        self._rows = LayerKV(*(torch.rand(size, generator=generator).to(kv_shape.dtype) for _ in ("k", "v")))
        self._slots = scattered_slots(2 * num_tokens, 1, seed=1, device=torch.device("cpu"))[:num_tokens]
        self._pool = _Pool(kv_shape, model.num_layers, 2 * num_tokens, torch.device("cpu"))
        self._store = TieredStore(HostStore(len(configuration.segments) * (self._num_bytes + (4 << 20))), ())
        self._planning = RestorePlanning(
            make_planner("local-search"),
            OnlineCosts(_COSTS),
            DecodeCosts({}, {}),
            self._codec,
            RankAgreement(None, num_ranks=1),
            page_size=_PAGE_SIZE,
            max_head_tokens=num_tokens,
            max_new_tokens=num_tokens,
            tier_costs=dict,
        )
        # As the engine's: it knows the pool by what it does.
        pool: Any = self._pool
        self._loader = LayerWiseLoader(self._store, pool, TransferGate(), patience_s=60.0)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each number of segments; in each repeat all of them once, so that drift meets all."""
        keys = {number: self._put(number) for number in self._configuration.segments}
        samples: dict[int, list[dict[str, float]]] = {number: [] for number in keys}
        try:
            for repeat in range(_WARM_UPS + self._configuration.repeats):
                for number, of_number in keys.items():
                    sample = self._restore(of_number)
                    if repeat >= _WARM_UPS:
                        samples[number].append(sample)
        finally:
            self._loader.close()
            self._store.close()
        return [
            {
                "shape": self._shape,
                "tokens": self._num_tokens,
                "segments": number,
                "num_bytes": self._num_bytes,
                "seconds": {step: spread([sample[step] for sample in of_number]) for step in of_number[0]},
            }
            for number, of_number in samples.items()
        ]

    def _kv(self, layer: int, tokens: slice) -> LayerKV:
        """The KV of a layer: that of another layer is another one."""
        return LayerKV(self._rows.k[tokens] + layer, self._rows.v[tokens] - layer)

    def _put(self, num_segments: int) -> list[str]:
        """Store the prefix as so many segments of about equal length; returns its page keys."""
        keys = [f"{num_segments}-{token}" for token in range(self._num_tokens)]
        strategy = Strategy.from_pairs(self._num_layers)
        ends = [self._num_tokens * number // num_segments for number in range(num_segments + 1)]
        for first, end in pairwise(ends):
            read = partial(self._kv, tokens=slice(first, end))
            encoding = self._codec.native.encode(TokenRun(read, first, end - first), UnitPlan(strategy))
            reservation = self._store.reserve(encoding.layer_num_bytes)
            assert reservation is not None
            for layer, block in encoding.blocks:
                reservation.blocks[layer][:] = block.numpy()
            self._store.commit(
                reservation,
                SegmentManifest(
                    self._identity,
                    tuple(keys[first:end]),
                    keys[first - 1] if first else None,
                    first,
                    self._token_ids[first:end],
                    "krul",
                    encoding.layer_num_bytes,
                    encoding.params,
                ),
                block_checksums(reservation.blocks),
            )
        return keys

    def _restore(self, keys: Sequence[str]) -> dict[str, float]:
        """Seconds of each step of one restore, and of checking and copying its bytes and nothing else."""
        lookup_s, lease = _timed(lambda: self._store.lease(self._identity, keys, self._token_ids))
        assert lease is not None
        bytes_s, _ = _timed(lambda: self._copy_bytes(lease.slices))
        open_s, readers = _timed(lambda: open_segments(lease, self._codec, self._num_tokens))
        plan_s, _ = _timed(lambda: self._planning.plan(readers, device_tokens=0, new_tokens=64))
        plan = RestorePlan((0,) * self._num_layers, 1.0)
        for buffer in (*self._pool.k, *self._pool.v):
            buffer.zero_()

        def load() -> bool:
            return self._loader.finish(
                self._loader.start({"r": Load(lease, readers, self._slots, 0, plan, Forecast(0.0, 0.0, 0.0))})
            )

        cpu_s = time.process_time()
        load_s, has_landed = _timed(load)
        cpu_s = time.process_time() - cpu_s
        self._check(has_landed)
        return {
            "lookup": lookup_s,
            "open": open_s,
            "plan": plan_s,
            "load": load_s,
            "load_cpu": cpu_s,
            "bytes": bytes_s,
            "total": lookup_s + open_s + plan_s + load_s,
        }

    def _copy_bytes(self, slices: Sequence[Any]) -> None:
        for layer in range(self._num_layers):
            for part in slices:
                block_checksum(part.blocks[layer], part.header.range_bytes)
            np.concatenate([part.blocks[layer] for part in slices])

    def _check(self, has_landed: bool) -> None:
        for layer in range(self._num_layers):
            found, stored = self._pool.gather(layer, self._slots), self._kv(layer, slice(None))
            if not has_landed or not torch.equal(found.k, stored.k) or not torch.equal(found.v, stored.v):
                raise WrongRestoreError(f"layer {layer} came back otherwise than it was stored")


def _timed(step: Callable[[], T]) -> tuple[float, T]:
    begin_s = time.perf_counter()
    result = step()
    return time.perf_counter() - begin_s, result
