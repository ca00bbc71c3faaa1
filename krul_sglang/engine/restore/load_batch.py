"""Tracks the loads of one forward: which layers have landed, and how the forward waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from krul_backend.codec.layout import put_rows
from krul_backend.codec.rotary import RotaryTable
from krul_backend.device import Device, Event, Mark, StreamClock
from krul_backend.errors import KrulError
from krul_backend.planner import RestorePlan
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.boundary_states import StateSlot
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore.held_lease import HeldLease
from krul_sglang.engine.restore.segment_reader import SegmentReader

_AGREEMENTS = 8
"""How often ranks exchange, during one load, which layers have landed everywhere; once if all have."""


class _Patience(NamedTuple):
    """Limits how many seconds a load may stand still beyond its plan: a share of the time that computing
    takes, but at least ``least_s``."""

    of_recompute: float
    least_s: float


_PATIENCE = _Patience(0.05, 0.05)
_DRAM_PATIENCE = _Patience(0.25, 0.25)
"""For loads that come from memory alone: these fail seldom, and stand still when the machine is busy."""
_STALLED_LAYERS = 3
"""A load stands still if the next layer takes so many times as long as those before."""

_ROTATED_AT_ONCE = 4096
"""Tokens whose keys are rotated together: it is done in float32, in memory beside SGLang's own budget."""


class LoadFailedError(KrulError):
    """A layer of a load will not land: its copy failed, or nothing moved for too long."""


@dataclass(frozen=True)
class Forecast:
    """Seconds that heads and loads of a restore should take, each without waiting for the other, and those
    that computing all of it with the new tokens would take. ``decode_s`` of those of loads is decoding, and
    ``overhead_s`` what restores have taken beyond their plans. ``own_layer_s``: a layer of new tokens."""

    head_s: float
    load_s: float
    recompute_s: float
    decode_s: float = 0.0
    overhead_s: float = 0.0
    own_layer_s: float = 0.0


@dataclass(frozen=True, eq=False)
class MovedKeys:
    """Says that what is loaded was stored ``shift`` tokens before its place in this prompt (behind it if
    negative): its keys are rotated to where they are now by ``rotary``, the model's embedding."""

    rotary: RotaryTable
    shift: int

    def rotate(self, pool: DevicePool, layer: int, slots: torch.Tensor, first_token: int) -> None:
        """Rotate the keys of a layer in ``slots`` (int64 ``[T]``), which are of the prompt's tokens from
        ``first_token`` on."""
        k_buffer, _ = pool.buffers(layer)
        for begin in range(0, len(slots), _ROTATED_AT_ONCE):
            part = slots[begin : begin + _ROTATED_AT_ONCE]
            positions = torch.arange(first_token + begin, first_token + begin + len(part), device=part.device)
            keys = pool.gather_keys(layer, part).float()
            put_rows(k_buffer, part, self.rotary.move(keys, positions - self.shift, positions))


@dataclass(frozen=True, eq=False)
class Load:
    """A leased prefix that is being copied into the pool.

    Tokens ``[device_tokens, device_tokens + len(slots))`` of the conversation go to ``slots`` (int64, on the
    pool's device): in each layer those from ``plan.head_ends[layer]`` on, which ``readers`` copy, one after
    another, out of the lease's segments. ``moved``: set if they are stored at other positions, or after
    other text; then the first of ``slots`` may be filled by heads alone. ``held`` was leased for the request,
    and names its pages. ``state``: where the state of recurrent layers goes that belongs to the last of these
    tokens, if the model has such layers.
    """

    lease: Lease
    readers: Sequence[SegmentReader]
    slots: torch.Tensor
    device_tokens: int
    plan: RestorePlan
    forecast: Forecast
    moved: MovedKeys | None = None
    held: HeldLease | None = None
    state: StateSlot | None = None

    @property
    def planned_s(self) -> float:
        """Seconds after which its forward should end."""
        return self.plan.end_s + self.forecast.overhead_s

    @property
    def is_moved(self) -> bool:
        """Whether keys come from other positions, and are rotated to theirs."""
        return self.moved is not None and self.moved.shift != 0

    def begin(self) -> None:
        """Say to the readers what they read, and where it goes."""
        for reader in self.readers:
            first = reader.first_token - self.device_tokens
            reader.begin(self.plan.head_ends, self.slots[first : first + reader.num_tokens])

    def tail_slots(self, layer: int) -> torch.Tensor:
        """The slots of what is loaded in a layer."""
        return self.slots[self.plan.head_ends[layer] - self.device_tokens :]


@dataclass(frozen=True)
class LayerTimes:
    """When work on a layer began and ended."""

    begin: Mark
    end: Mark


class LoadBatch:
    """Shares the progress of one batch of loads between the loader and the forward. Thread-safe.

    The loader writes each layer, and reports it with ``landed``, inside ``writing``; the forward calls
    ``wait_layer``. After ``abandon`` the batch no longer writes to the pool: on a GPU, not after that
    point of the stream which called it.

    It fails when waiting is not worth it any more (``deadline_s``). If it ``lands_whole``, the forward waits
    for the last layer before it enters the first: for a load that only takes cores from the forward, and
    hides nothing.
    ``agreement`` joins the threads of the ranks whose forwards wait; None: there is one rank.
    ``draft_tokens``: of how many tokens of each request, from the load's first one on, the draft KV has come,
    too.
    """

    def __init__(
        self,
        loads: Mapping[str, Load],
        num_layers: int,
        device: Device,
        patience_s: float | None,
        *,
        lands_whole: bool = False,
        agreement: RankAgreement | None = None,
    ) -> None:
        """``patience_s``: so long a load may stand still beyond its plan; None for a share of the time that
        computing it takes."""
        self.loads = loads
        self.clock = StreamClock(device)
        self.load_times: list[LayerTimes] = []
        self.decode_times: list[LayerTimes] = []
        self.wait_times: dict[int, LayerTimes] = {}
        self.num_layers = num_layers
        self.lands_whole = lands_whole
        self._device = device
        self._planned_s = sum(load.forecast.load_s for load in loads.values())
        self._recompute_s = sum(load.forecast.recompute_s for load in loads.values())
        self._counts_the_rest = patience_s is None
        if patience_s is None:
            share = _DRAM_PATIENCE if all(load.lease.is_in_dram for load in loads.values()) else _PATIENCE
            patience_s = max(share.least_s, share.of_recompute * self._recompute_s)
        self._patience_s = patience_s
        self.salvaged: dict[str, int] = {}
        self.draft_tokens: dict[str, int] = {}
        self._agreement = agreement or RankAgreement(None, num_ranks=1)
        self._num_agreed = 0
        self._changed = threading.Condition()
        self._pool_lock = threading.Lock()
        self._landed: list[Event] = []
        self._write_stream: Any | None = None
        self._start_s = self._progress_s = time.monotonic()
        self._is_standing = False
        self._error: BaseException | None = None
        self._is_abandoned = False
        self.is_refilled = False
        self._has_ended = False

    # ---- the loader's side ----

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Held while something is written to the pool, on the current stream.

        Yields False if the batch was abandoned: then write nothing.
        """
        with self._pool_lock:
            self._write_stream = self._device.current_stream()
            yield not self._is_abandoned

    @contextmanager
    def decoding(self, is_decoding: bool) -> Iterator[None]:
        """Held while the loader decodes, if it does: what that takes is told apart from copying."""
        begin = self.clock.mark() if is_decoding else None
        yield
        if begin is not None:
            self.decode_times.append(LayerTimes(begin, self.clock.mark()))

    def landed(self, times: Sequence[LayerTimes]) -> None:
        """The next layers are in the pool, or, on a GPU, their copies are queued on the current stream."""
        event = self._device.record()
        with self._changed:
            self.load_times += times
            self._landed += [event] * len(times)
            self._progress_s = time.monotonic()
            # To wake the forward in vain would take the lock of all Python threads from the loader.
            if not self.lands_whole or len(self._landed) == self.num_layers:
                self._changed.notify_all()

    def progressed(self) -> None:
        """A layer of the draft has come: the load does not stand still."""
        with self._changed:
            self._progress_s = time.monotonic()

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Held while the loader waits for an earlier forward: that time does not count."""
        begin_s = time.monotonic()
        with self._changed:
            self._is_standing = True
        try:
            yield
        finally:
            with self._changed:
                self._is_standing = False
                waited_s = time.monotonic() - begin_s
                self._start_s += waited_s
                self._progress_s += waited_s

    def deadline_s(self) -> float:
        """Until when, on ``time.monotonic``, it is worth waiting for the next layer.

        At first that is the planned time of all loading, and some patience. A load that comes more slowly is
        waited for as long as layers go on landing, and, unless patience was given, computing everything would
        take longer than the rest at this pace.
        """
        with self._changed:
            if self._is_standing:
                return time.monotonic() + self._planned_s + self._patience_s
            planned_s = self._start_s + self._planned_s + self._patience_s
            num_landed = len(self._landed)
            pace_s = (self._progress_s - self._start_s) / max(1, num_landed)
            rest_s = (self.num_layers - num_landed) * pace_s
            if not num_landed or (self._counts_the_rest and rest_s > self._recompute_s):
                return planned_s
            return max(planned_s, self._progress_s + max(self._patience_s, _STALLED_LAYERS * pace_s))

    def fail(self, error: BaseException, salvaged: Mapping[str, int] | None = None) -> None:
        """Nothing more lands. ``salvaged``: of each request, how many tokens of what should have been
        restored are complete in all layers, once the heads of the plan are."""
        with self._changed:
            self.salvaged.update(salvaged or {})
            # Frames of the traceback hold what was fetched: memory that recomputing may need.
            self._error = error.with_traceback(None)
            self._changed.notify_all()

    def end(self) -> None:
        """The loader does nothing more for this batch."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    # ---- the forward's side ----

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for a layer; on a CPU the thread. Later calls for it return at once.

        All ranks call it for the same layers in the same order.

        Raises:
            LoadFailedError: the layer will not land. On every rank at the same layer, if on one: none enters
                this layer's collectives.
        """
        if layer in self.wait_times or self._is_abandoned:
            return
        begin = self.clock.mark()
        if self._agreement.num_ranks == 1:
            event = self._wait_landed(layer)
        else:
            if layer >= self._num_agreed:
                self._num_agreed = self._agree(layer)
            # It has landed everywhere. That a later one failed here is told when all come to that one.
            event = self._landed[layer]
        self._device.wait_for(event)
        self.wait_times[layer] = LayerTimes(begin, self.clock.mark())

    def check(self) -> None:
        """Raises LoadFailedError if it has failed."""
        if self._error is not None:
            raise LoadFailedError(f"loading failed: {self._error}") from self._error

    def _left_s(self) -> float:
        """Seconds for which the forward still waits: longer than the loader, which then says what is there.

        Raises:
            LoadFailedError: none.
        """
        left_s = self.deadline_s() + self._patience_s - time.monotonic()
        if left_s <= 0:
            raise LoadFailedError(f"{len(self._landed)} of {self.num_layers} layers have landed in time")
        return left_s

    def _wait_landed(self, layer: int) -> Event:
        last = self.num_layers - 1 if self.lands_whole else layer
        with self._changed:
            while len(self._landed) <= last and self._error is None:
                self._changed.wait(self._left_s())
            self.check()
            return self._landed[last]

    def _agree(self, layer: int) -> int:
        """Wait for a layer and a few after it; the number of layers that have landed on every rank."""
        group = -(-self.num_layers // _AGREEMENTS)
        num_landed: torch.Tensor | None = None
        failure = "loading failed on another rank"
        try:
            self._wait_landed(min(layer + group, self.num_layers) - 1)
            num_landed = torch.tensor([len(self._landed)], dtype=torch.float64)
        except LoadFailedError as error:
            failure = str(error)
        of_ranks = self._agreement.gather(num_landed, (1,))
        if of_ranks is None:
            raise LoadFailedError(failure)
        return int(min(of_rank.item() for of_rank in of_ranks))

    def abandon(self, *, is_refilled: bool) -> None:
        """Give the batch up. Waits for a write that is under way, not for a read that is stuck before it.

        On a GPU the current stream waits for the writes that are queued.
        ``is_refilled``: whether the slots get their KV in another way.
        """
        with self._pool_lock, self._changed:
            self._is_abandoned = True
            self.is_refilled = is_refilled
            if self._write_stream is not None:
                # All that is queued, also of a layer that failed half-way.
                self._device.wait_for(self._device.record(self._write_stream))
            self._changed.notify_all()

    @property
    def is_abandoned(self) -> bool:
        return self._is_abandoned

    @property
    def is_ordered(self) -> bool:
        """Whether the forward has come to every layer, and all had landed there.

        Then what follows it on its stream comes after every write of this batch.
        """
        return len(self.wait_times) == self.num_layers and not self._is_abandoned

    def wait_end(self) -> bool:
        """Wait until nothing of this batch touches the pool; whether everything landed."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._is_abandoned)
            return self._error is None and not self._is_abandoned
