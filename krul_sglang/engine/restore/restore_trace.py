"""Records when each stream of a restore worked on which layer, for the trace and for the cost estimates."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec

from krul_backend.device import Mark
from krul_backend.planner import OnlineCosts
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.engine.restore.load_batch import LayerTimes, LoadBatch
from krul_sglang.traced_restore import Part

MAX_TRACES = 16
"""How many restores are kept for ``krul-sglang trace``."""
_MAX_FORECASTS = 512
"""Of so many restores it is known how far they were from their plans."""


class RestoreTrace:
    """Collects marks on both streams while one batch of restores runs. It is read when that has ended.

    ``is_mixed``: requests that restore nothing share the forward, so its time says nothing about these.
    """

    def __init__(self, batch: LoadBatch, *, is_mixed: bool) -> None:
        self.batch = batch
        self.is_mixed = is_mixed
        self.end: Mark | None = None
        self._head_marks: list[tuple[int, Mark]] = []

    def mark_head_layer(self, layer: int) -> None:
        """Layer ``layer`` of a head's forward is launched now; for the number of layers, it has ended."""
        self._head_marks.append((layer, self.batch.clock.mark()))

    @cached_property
    def heads(self) -> list[Part]:
        """When each layer of the heads was recomputed, one chunk of tokens after another."""
        return [
            Part(layer, *_seconds(begin, end))
            for (layer, begin), (_, end) in pairwise(self._head_marks)
            if layer < self.batch.num_layers
        ]

    @cached_property
    def loads(self) -> list[Part]:
        return _parts(enumerate(self.batch.load_times))

    @cached_property
    def waits(self) -> list[Part]:
        """How long the engine's own forward waited for each layer that it came to."""
        return _parts(sorted(self.batch.wait_times.items()))

    @cached_property
    def own(self) -> list[Part]:
        """The engine's own forward, from the moment that it had a layer's KV to the next layer's wait.

        Empty if a load was given up and the forward ran twice: the second one waits for nothing.
        """
        assert self.end is not None
        if self.batch.is_abandoned or not self.waits:
            return []
        ends = [wait.begin_s for wait in self.waits[1:]] + [_seconds(self.end)[0]]
        return [Part(wait.layer, wait.end_s, end) for wait, end in zip(self.waits, ends, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Plain values: lengths in tokens, parts as ``[layer, begin_s, end_s]``."""
        assert self.end is not None
        return {
            "requests": [
                {
                    "rid": rid,
                    "device_tokens": load.device_tokens,
                    "restored_tokens": len(load.slots),
                    "head_ends": list(load.plan.head_ends),
                    "tiers": sorted({reader.source.tier for reader in load.readers}),
                    "planned_s": load.planned_s,
                }
                for rid, load in self.batch.loads.items()
            ],
            "is_mixed": self.is_mixed,
            "was_rescued": self.batch.is_abandoned,
            "end_s": _seconds(self.end)[0],
            "streams": msgspec.to_builtins(
                {"load": self.loads, "head": self.heads, "wait": self.waits, "own": self.own}
            ),
        }


class TraceLog:
    """Keeps the last restores of one rank, and corrects the costs by each when its times are known.

    The cost of the engine's own forward is taken from prefills that restore nothing: that is what a restore
    competes with. A load with a part in a lower tier corrects the cost of that tier and of decoding.
    ``on_settled`` is told of each restore when it began (nanoseconds, wall clock), and its ``as_dict``.
    """

    def __init__(self, costs: OnlineCosts, num_layers: int) -> None:
        self._costs = costs
        self._num_layers = num_layers
        self._prefills: deque[_Prefill] = deque(maxlen=MAX_TRACES)
        self._fresh: deque[RestoreTrace] = deque(maxlen=MAX_TRACES)
        self._done: deque[dict[str, Any]] = deque(maxlen=MAX_TRACES)
        # What restores took, over what was planned: of those that had a forward for themselves.
        self._ratios: deque[float] = deque(maxlen=_MAX_FORECASTS)
        self.on_settled: Callable[[int, dict[str, Any]], None] = lambda begin_ns, restore: None

    def add(self, trace: RestoreTrace) -> None:
        self._fresh.append(trace)

    def add_prefill(self, num_tokens: int, num_past: int, begin: Mark, end: Mark) -> None:
        """A forward of one request that restored nothing: how long the engine's own layers take."""
        self._prefills.append(_Prefill(num_tokens, num_past, begin, end))

    def settle(self) -> None:
        """Take the times of what has ended. Never waits for the device."""
        while self._prefills and self._prefills[0].end() is not None:
            prefill = self._prefills.popleft()
            begin_s, end_s = _seconds(prefill.begin, prefill.end)
            predicted_s = self._num_layers * self._costs.current().own.layer_s(
                prefill.num_tokens, prefill.num_past
            )
            self._costs.observe_own(predicted_s, end_s - begin_s)
        while self._fresh and self._fresh[0].end is not None and self._fresh[0].end() is not None:
            trace = self._fresh.popleft()
            self._done.append(trace.as_dict())
            self.on_settled(trace.batch.clock.begin_ns, self._done[-1])
            if not trace.batch.is_abandoned:
                self._learn(trace)
                if not trace.is_mixed:
                    planned_s = max(load.planned_s for load in trace.batch.loads.values())
                    assert trace.end is not None
                    self._ratios.append(_seconds(trace.end)[0] / planned_s)

    def as_list(self) -> list[dict[str, Any]]:
        return list(self._done)

    def accuracy(self) -> dict[str, Any]:
        """How far restores were from their plans: plain values for ``/server_info``. Mixed batches are left
        out, and those whose load failed."""
        errors = sorted(abs(ratio - 1) for ratio in self._ratios)
        if not errors:
            return {"restores": 0}
        return {
            "restores": len(errors),
            "median_ratio": statistics.median(self._ratios),
            **{f"error_p{share}": errors[-(-share * len(errors) // 100) - 1] for share in (50, 95)},
        }

    def _learn(self, trace: RestoreTrace) -> None:
        loads = list(trace.batch.loads.values())
        head_s = sum(load.forecast.head_s for load in loads)
        if head_s > 0 and (heads := trace.heads):
            self._costs.observe_head(head_s, _total_s(heads))
        load_s = sum(load.forecast.load_s for load in loads)
        decode_s = sum(load.forecast.decode_s for load in loads)
        tiers = {reader.source.tier for load in loads for reader in load.readers} - {DRAM_TIER}
        if load_s > 0 and (parts := trace.loads) and len(tiers) <= 1:
            decoded_s = _total_s(_parts(enumerate(trace.batch.decode_times)))
            self._costs.observe_decoding(decode_s, decoded_s)
            # Blocks that are decoded may come to the device as a part of that.
            if load_s >= 2 * decode_s:
                tier = next(iter(tiers), DRAM_TIER)
                self._costs.observe_tier(tier, load_s - decode_s, _total_s(parts) - decoded_s)
        # Plans are made as if each request came alone.
        if len(loads) == 1 and not trace.is_mixed and not tiers:
            assert trace.end is not None
            # Layers that no load disturbed would have been as slow if all had been computed.
            loaded_s = max((part.end_s for part in trace.loads), default=0.0)
            alone = [part for part in trace.own if part.begin_s >= loaded_s]
            late_s = _total_s(alone) - len(alone) * loads[0].forecast.own_layer_s
            self._costs.observe_overhead(loads[0].plan.end_s, _seconds(trace.end)[0] - late_s)


@dataclass(frozen=True)
class _Prefill:
    num_tokens: int
    num_past: int
    begin: Mark
    end: Mark


def _parts(times: Iterable[tuple[int, LayerTimes]]) -> list[Part]:
    return [Part(layer, *_seconds(of_layer.begin, of_layer.end)) for layer, of_layer in times]


def _total_s(parts: Iterable[Part]) -> float:
    return sum(part.seconds for part in parts)


def _seconds(*marks: Mark) -> tuple[float, ...]:
    """The times of marks that the device has passed."""
    seconds = [mark() for mark in marks]
    assert all(second is not None for second in seconds), "the device has not passed a mark"
    return tuple(second for second in seconds if second is not None)
