"""Writes encoded runs of pages to the store, as segments, and counts what was stored."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from krul_backend.codec.interface import EncodedRun
from krul_backend.device import Device
from krul_backend.planner import OnlineCosts
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Reservation, block_checksums
from krul_sglang.engine.save.turn import Turn

logger = logging.getLogger(__name__)

ROOM_WAIT_S = 1.0
"""Seconds for which room in host memory is waited for: turns behind it wait, too."""
LOOK_S = 0.02
"""Seconds between two looks whether there is room."""

Reading = Callable[[], AbstractContextManager[bool]]
"""Held while slots of the device are read; says whether they may be."""


@dataclass
class OffloadCounters:
    """Counts turns, and what was stored of them.

    ``num_bytes`` were stored, and ``fast_copy_bytes`` as they are, to be encoded later; ``left_out_bytes``
    were not stored: a restore recomputes them. ``dropped_turns`` are those that were not stored, or not all
    of it, by cause: ``evicted`` from the device while they waited, ``no room`` in host memory, ``no answer``
    of the daemon, an ``error``.
    """

    turns: int = 0
    segments: int = 0
    tokens: int = 0
    num_bytes: int = 0
    fast_copy_bytes: int = 0
    left_out_bytes: int = 0
    dropped_turns: dict[str, int] = field(default_factory=dict)
    failed_encodings: int = 0
    failed_trims: int = 0

    def drop(self, cause: str) -> None:
        """Count a turn that was not stored, or not all of it."""
        self.dropped_turns[cause] = self.dropped_turns.get(cause, 0) + 1


class SegmentWriter:
    """Takes room in the store for encoded runs, copies their blocks there, and commits them.

    Used by several threads, each with a stream of its own. ``committing`` is held while a segment that is
    still wanted is committed: what is not wanted by then is not stored. ``while_full()`` is entered while
    room is waited for. ``costs`` tell the store how long computing a segment takes; None: nobody has measured
    it.
    """

    def __init__(
        self,
        store: KVStore,
        device: Device,
        num_layers: int,
        counters: OffloadCounters,
        while_full: Callable[[], AbstractContextManager[None]],
        costs: OnlineCosts | None = None,
    ) -> None:
        self._while_full = while_full
        self._costs = costs
        self._store = store
        self._device = device
        self._num_layers = num_layers
        self._counters = counters
        self.committing = threading.Lock()

    def write(
        self,
        turn: Turn,
        pages: range,
        encoded: EncodedRun,
        stream: Any,
        *,
        is_fast_copy: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
        reading: Reading = lambda: nullcontext(True),
        on_read: Callable[[], None] | None = None,
        model: ModelIdentity | None = None,
        recompute_s: float | None = None,
    ) -> bool:
        """Store ``pages`` of a turn as a segment of ``model`` (None: of the turn's own); False if there is no
        room, or it is not wanted any more.

        Room is waited for, for ``ROOM_WAIT_S``. The device is read while ``reading()`` is held, if that says
        that it may be. What was read counts only if ``is_wanted()`` when the blocks have been copied;
        ``on_read`` is called then. ``recompute_s``: what a restore of these pages saves, if that is not what
        computing them takes.
        """
        model = turn.model if model is None else model
        page_size = model.page_size
        start, end = pages.start * page_size, pages.stop * page_size
        manifest = SegmentManifest(
            model=model,
            page_keys=tuple(turn.page_keys[pages.start : pages.stop]),
            parent_key=turn.page_keys[pages.start - 1] if pages.start else None,
            start_token=start,
            token_ids=turn.token_ids[start:end].copy(),
            codec=encoded.codec,
            layer_num_bytes=encoded.layer_num_bytes,
            codec_params=encoded.params,
            layer_first_token=encoded.layer_first_token,
            tenant=turn.tenant,
            recompute_s=self.recompute_s(start, end) if recompute_s is None else recompute_s,
        )
        reservation = self._store.reserve(encoded.layer_num_bytes, turn.tenant, is_fast_copy=is_fast_copy)
        if reservation is None:
            with self._while_full():
                reservation = self._wait_for_room(encoded, turn.tenant, is_fast_copy, is_wanted)
        if reservation is None:
            return False
        try:
            with reading() as is_right:
                for layer, block in encoded.blocks if is_right else ():
                    self._device.download(torch.from_numpy(reservation.blocks[layer]), block)
                self._device.synchronize(stream)
            is_right = is_right and is_wanted()
            if on_read is not None:
                on_read()
            checksums = block_checksums(reservation.blocks) if is_right else None
        except BaseException:
            self._give_back(reservation, stream)
            raise
        with self.committing:
            if checksums is None or not is_wanted():
                self._store.abort(reservation)
                return False
            self._store.commit(reservation, manifest, checksums)
            if is_fast_copy:
                self._counters.fast_copy_bytes += manifest.num_bytes
            else:
                self._counters.segments += 1
                self._counters.tokens += end - start
                self._counters.num_bytes += manifest.num_bytes
                self._counters.left_out_bytes += encoded.left_out_num_bytes
        return True

    def _wait_for_room(
        self, encoded: EncodedRun, tenant: str, is_fast_copy: bool, is_wanted: Callable[[], bool]
    ) -> Reservation | None:
        """What is leased, or waits for a lower tier or to be encoded, keeps its room for a moment."""
        end_s = time.monotonic() + ROOM_WAIT_S
        while is_wanted() and time.monotonic() < end_s:
            time.sleep(LOOK_S)
            reservation = self._store.reserve(encoded.layer_num_bytes, tenant, is_fast_copy=is_fast_copy)
            if reservation is not None:
                return reservation
        return None

    def _give_back(self, reservation: Reservation, stream: Any) -> None:
        """Abort a reservation once no copy writes to it: the store may hand out its bytes again at once."""
        try:
            self._device.synchronize(stream)
        except Exception:
            logger.exception("krul: %d reserved blocks may still be written to", len(reservation.blocks))
            return
        self._store.abort(reservation)

    def recompute_s(self, start: int, end: int) -> float:
        """Seconds that computing tokens ``[start, end)`` takes: what a restore of them saves."""
        if self._costs is None:
            return 0.0
        return self._num_layers * self._costs.current().own.layer_s(end - start, start)
