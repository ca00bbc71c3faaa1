"""Loads, leases and a pool without an engine, for the tests of restoring."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.registry import ModelCodecs
from krul_backend.device import Device
from krul_backend.planner.interface import RestorePlan
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import Lease
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.dram.host_store import HostStore
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.load_batch import Forecast, LayerTimes, Load
from krul_sglang.engine.restore.segment_reader import SegmentReader, open_segments
from krul_sglang.engine.restore.tail_groups import TailGroups

T = TypeVar("T")

NO_FORECAST = Forecast(0.0, 0.0, 0.0)
PATIENCE_S = 30.0
"""How long a test waits for what must happen. No test waits so long unless it fails."""


@contextmanager
def computing(gate: TransferGate) -> Iterator[None]:
    """The server runs forwards while this is held, and is idle after that."""
    gate.note_forward()
    try:
        yield
    finally:
        gate.note_idle()


class TensorPool:
    """What the loader and head attention use of ``DevicePool``: random rows of every layer, on the CPU."""

    is_scaled = False

    def __init__(
        self, shape: LayerShape, num_layers: int, num_slots: int, seed: int = 0, device: Device | None = None
    ) -> None:
        self.shape = shape
        self.num_layers = num_layers
        self.device = torch.device("cpu")
        self.streams = Device(self.device) if device is None else device
        generator = torch.Generator().manual_seed(seed)
        self._layers = [
            tuple(
                torch.randn(num_slots, shape.num_kv_heads, head_dim, generator=generator).to(shape.dtype)
                for head_dim in (shape.k_head_dim, shape.v_head_dim)
            )
            for _ in range(num_layers)
        ]

    @property
    def layer_ids(self) -> range:
        return range(self.num_layers)

    def buffers(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self._layers[layer]

    def gather(self, layer: int, slots: torch.Tensor) -> LayerKV:
        k, v = self._layers[layer]
        return LayerKV(k[slots], v[slots])

    def gather_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self._layers[layer][0][slots]

    def attended(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.buffers(layer)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for buffer, rows in zip(self._layers[layer], (k, v), strict=True):
            buffer[slots] = rows.to(buffer.dtype)

    def copy(self) -> list[LayerKV]:
        """Every row of every layer as it is now."""
        return [LayerKV(k.clone(), v.clone()) for k, v in self._layers]


def make_store(capacity_bytes: int, tiers: Sequence[LowerTier] = ()) -> TieredStore:
    """A store in this process, of DRAM alone if there are no ``tiers`` below it."""
    return TieredStore(HostStore(capacity_bytes), tiers)


def make_load(
    lease: Lease, codec: ModelCodecs, slots: torch.Tensor, head_ends: Sequence[int] | None = None
) -> Load:
    """The first ``len(slots)`` tokens of a lease; everything is loaded unless ``head_ends`` say otherwise."""
    readers = open_segments(lease, codec, len(slots))
    first = readers[0].first_token
    ends = (first,) * codec.num_layers if head_ends is None else tuple(head_ends)
    return Load(lease, readers, slots, first, RestorePlan(ends, 1.0), NO_FORECAST)


def read_tails(
    lease: Lease,
    readers: Sequence[SegmentReader],
    head_ends: Sequence[int],
    slots: torch.Tensor,
    pool: TensorPool,
    after_layer: Callable[[TailGroups], None] = lambda tails: None,
) -> None:
    """Reads as the loader does: all groups of a layer, then those of the next layer."""
    plan = RestorePlan(tuple(head_ends), 1.0)
    load = Load(lease, readers, slots, readers[0].first_token, plan, NO_FORECAST)
    load.begin()
    tails = TailGroups(readers, pool.streams)
    for layer in range(pool.num_layers):
        for group in tails.of_layer(layer):
            group.fetch(pool.streams)
            group.restore(pool)
        after_layer(tails)
    tails.check()


def check_tails(
    expected: Sequence[LayerKV],
    first_token: int,
    head_ends: Sequence[int],
    slots: torch.Tensor,
    before: Sequence[LayerKV],
    pool: TensorPool,
    *,
    tolerance: float = 0.0,
) -> None:
    """Slots of the tokens from each head's end on have the rows of ``expected``; all others are as before.

    ``expected``: of the whole conversation. ``slots`` are those of its tokens from ``first_token`` on.
    """
    positions = torch.arange(first_token, first_token + len(slots))
    for layer, (wanted, old) in enumerate(zip(expected, before, strict=True)):
        is_tail = positions >= head_ends[layer]
        for now, was, rows in zip(pool.buffers(layer), (old.k, old.v), (wanted.k, wanted.v), strict=True):
            should_be = was.clone()
            should_be[slots[is_tail]] = rows[positions[is_tail]]
            if tolerance:
                torch.testing.assert_close(now, should_be, rtol=tolerance, atol=tolerance)
            is_other = torch.ones(len(now), dtype=torch.bool)
            is_other[slots[is_tail]] = tolerance == 0
            assert torch.equal(now[is_other], should_be[is_other])


def bare_load(
    device_tokens: int,
    num_tokens: int,
    head_ends: Sequence[int],
    first_slot: int = 0,
    forecast: Forecast = NO_FORECAST,
) -> Load:
    """A load of which nobody reads the lease."""
    lease: Any = None
    slots = torch.arange(first_slot, first_slot + num_tokens)
    return Load(lease, (), slots, device_tokens, RestorePlan(tuple(head_ends), 1.0), forecast)


def layer_times(begin_s: float = 0.0, end_s: float = 0.0) -> LayerTimes:
    return LayerTimes(lambda: begin_s, lambda: end_s)


@contextmanager
def in_threads() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    """Starts functions in threads of their own; all have ended when the block is left."""
    with ThreadPoolExecutor(max_workers=4) as threads:
        yield threads.submit


class MeetingPoint:
    """Where two threads exchange what they have."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_S)
        self._values: dict[int, object] = {}

    def exchange(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait()
        values = [self._values[0], self._values[1]]
        self._barrier.wait()
        return values


class ThreadAgreement(RankAgreement):
    """Two ranks in two threads; tensors of different shapes do not meet, as in a real collective."""

    def __init__(self, rank: int, meeting: MeetingPoint) -> None:
        super().__init__(None, num_ranks=2)
        self.rank = rank
        self._meeting = meeting

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor] | None:
        met = self._meeting.exchange(self.rank, (values, tuple(shape)))
        of_ranks = [part for part in met if isinstance(part, tuple)]
        assert [shape for _, shape in of_ranks] == [tuple(shape)] * 2
        tensors = [part for part, _ in of_ranks if part is not None]
        assert all(part.shape == torch.Size(shape) for part in tensors)
        return tensors if len(tensors) == 2 else None

    def broadcast(self, content: bytes) -> bytes:
        first = self._meeting.exchange(self.rank, content)[0]
        assert isinstance(first, bytes)
        return first


class Meeting(RankAgreement):
    """Ranks in threads of one process. A rank that does not come breaks the barrier for all."""

    def __init__(self, rank: int, contents: dict[int, bytes], barrier: threading.Barrier) -> None:
        super().__init__(None, barrier.parties)
        self.rank = rank
        self._contents = contents
        self._barrier = barrier

    def gather_bytes(self, content: bytes) -> list[bytes]:
        self._contents[self.rank] = content
        self._barrier.wait()
        gathered = [self._contents[rank] for rank in range(self.num_ranks)]
        self._barrier.wait()
        return gathered
