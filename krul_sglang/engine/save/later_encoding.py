"""Encodes segments that were stored as they are, later, when the server idles or memory asks for room."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.vectors import BlockReads
from krul_backend.codec.unit_restore import NativeTail, NativeTails
from krul_backend.codec.units import UnitDecoder
from krul_backend.errors import CodecError, StoreClosedError
from krul_backend.planner import OnlineCosts
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import MAX_FAST_COPY_SHARE, Block, Lease, SegmentSlice
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.save.segment_writer import OffloadCounters, SegmentWriter
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import TurnEncoding

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.1
"""Share of a core for encoding while forwards run and memory has room."""
SMALL_SHARE = 3 / 4
"""Copies that take less of their room than this wait for an idle server: encoding takes time of forwards."""
MAX_IDLE_WAIT_S = 60.0
"""Seconds after which an exact copy is encoded even if the server has not been idle: only then it is written
to lower tiers."""
USED_SHARE = 0.9
"""Of memory that nothing encoded takes: it may lie in pieces, and what is encoded needs some."""
_CLOSING_S = 5.0
"""Seconds for which a server that ends still encodes: what is not encoded is not written to lower tiers."""
_LOOK_S = 0.05


@dataclass(frozen=True, eq=False)
class ExactCopy:
    """Pages ``pages`` of a turn, which lie in host memory as they are, pinned by ``lease``, to be encoded.

    They are run number ``index`` of ``encoding``. ``head_ends``: see ``TokenRun``. ``num_bytes`` of room are
    taken. ``on_encoded`` is told the codec that it turns out to be stored with; ``on_stored`` is called when
    it is stored, or cannot be.
    """

    turn: Turn
    pages: range
    index: int
    encoding: TurnEncoding
    head_ends: tuple[int, ...] | None
    lease: Lease
    num_bytes: int
    on_encoded: Callable[[str], None]
    on_stored: Callable[[], None]
    since_s: float

    @property
    def page_keys(self) -> Sequence[str]:
        return self.turn.page_keys[self.pages.start : self.pages.stop]


def copy_room(store: KVStore, rank_bytes: int, num_ranks: int) -> int:
    """The bytes of host memory that exact copies of one of ``num_ranks`` may take while they wait.

    That is what nothing encoded takes now, and at least the part of ``rank_bytes``, a rank's share of the
    memory, that copies may take from other segments.
    """
    stats = store.stats()
    unused_bytes = stats.capacity_bytes - stats.stored_bytes
    return max(int(rank_bytes * MAX_FAST_COPY_SHARE), int(unused_bytes * USED_SHARE) // num_ranks)


class LaterEncoder:
    """Encodes exact copies in the order in which they were stored, on a thread of its own.

    A copy waits until the server is idle, or until those that wait take ``SMALL_SHARE`` of the room that they
    may take: ``copy_room()`` bytes, asked before each copy. While forwards run, the thread works for a share
    of a core: ``LEAST_SHARE``, or as much as there is of that room taken; half of it if requests wait; all of
    it while a turn waits for room, or while the oldest copy is one of a daemon that has died, whose successor
    does not know it. A copy stays findable, before and after it is encoded: then it is the
    first to leave when memory needs room, or leaves at once unless ``keeps_copies``. ``writer`` is hurried by
    those that wait for room: see there, also for ``costs``.
    """

    def __init__(
        self,
        store: KVStore,
        pool: DevicePool,
        codec: ModelCodecs,
        counters: OffloadCounters,
        gate: TransferGate,
        costs: OnlineCosts | None,
        *,
        copy_room: Callable[[], int],
        keeps_copies: bool = True,
    ) -> None:
        self.writer = SegmentWriter(store, pool.streams, pool.num_layers, counters, self.hurried, costs)
        self.room_bytes = copy_room()
        self._copy_room = copy_room
        self.keeps_copies = keeps_copies
        self._store = store
        self._pool = pool
        self._codec = codec
        self._counters = counters
        self._gate = gate
        self._changed = threading.Condition()
        self._waiting: deque[ExactCopy] = deque()
        self._waiting_keys: set[str] = set()
        self._taken_bytes = 0
        # Who waits for room.
        self._num_wanting = 0
        self._is_ending = False
        self._is_hurried = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """How many copies wait."""
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Room in host memory that is taken by copies that wait."""
        return self._taken_bytes

    @property
    def lacks_room(self) -> bool:
        """True while a turn waits for room in host memory."""
        return self._num_wanting > 0

    def take_room(self, num_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        """Take room for a copy, as soon as there is some; a copy that is larger than all of the room waits
        until nothing else takes any. False if it is not wanted any more: see ``wake``."""
        room_bytes = self._copy_room()
        with self._changed:
            self.room_bytes = room_bytes
            while self._is_full_for(num_bytes) and is_wanted():
                with self.hurried():
                    self._changed.wait()
            if not is_wanted():
                return False
            self._taken_bytes += num_bytes
            return True

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Encode at full speed while this is held: a turn waits for room."""
        with self._changed:
            self._num_wanting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_wanting -= 1

    def _is_full_for(self, num_bytes: int) -> bool:
        return self._taken_bytes > 0 and self._taken_bytes + num_bytes > self.room_bytes

    def wake(self) -> None:
        """Have those that wait for room look again whether they are wanted."""
        with self._changed:
            self._changed.notify_all()

    def give_room_back(self, num_bytes: int) -> None:
        """Give back room for which there will be no copy."""
        with self._changed:
            self._taken_bytes -= num_bytes
            self._changed.notify_all()

    def add(self, copy: ExactCopy, is_wanted: Callable[[], bool]) -> bool:
        """Have a copy encoded, for which room was taken; False if it is not wanted any more. The lease and
        the room are the encoder's from here on."""
        with self._changed:
            self._waiting_keys.update(copy.page_keys)
            if not is_wanted():
                self._forget(copy)
            else:
                self._waiting.append(copy)
                self._changed.notify_all()
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="krul-encode", daemon=True)
                    self._thread.start()
                return True
        self._store.release(copy.lease)
        return False

    def without_waiting(self, turn: Turn, missing: list[range]) -> list[range]:
        """The runs of a turn's pages without those that wait here: the store counts these as missing."""
        with self._changed:
            if not self._waiting_keys:
                return missing
            kept: list[range] = []
            for page in (page for run in missing for page in run):
                if turn.page_keys[page] in self._waiting_keys:
                    continue
                if kept and kept[-1].stop == page:
                    kept[-1] = range(kept[-1].start, page + 1)
                else:
                    kept.append(range(page, page + 1))
            return kept

    def wait(self, timeout_s: float | None = None) -> bool:
        """Encode all that waits, at full speed; False if it takes longer."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._waiting, timeout_s)
            finally:
                self._is_hurried = False

    def discard_all(self) -> None:
        """Forget what waits: it stays an exact copy until memory needs its room."""
        with self._changed:
            discarded = list(self._waiting)
            self._waiting.clear()
            for copy in discarded:
                self._forget(copy)
        for copy in discarded:
            self._store.release(copy.lease)

    def close(self) -> None:
        self.wait(_CLOSING_S)
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
        self.discard_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        device = self._pool.streams
        device.bind_background_thread()
        stream = device.new_stream()
        while (copy := self._next()) is not None:
            try:
                with device.working_on(stream):
                    self._encode(copy, stream)
            except StoreClosedError as error:
                self._counters.drop("no answer")
                logger.warning("krul: %d encoded pages: %s", len(copy.pages), error)
            except Exception:
                self._counters.failed_encodings += 1
                logger.exception("krul: %d pages could not be encoded", len(copy.pages))
            with self._changed:
                was_discarded = not self._waiting or self._waiting[0] is not copy
                if not was_discarded:
                    self._waiting.popleft()
                    self._forget(copy)
            if not was_discarded:
                self._end(copy)

    def _end(self, copy: ExactCopy) -> None:
        """A copy is done with. An error here must not keep others from being encoded."""
        try:
            self._store.release(copy.lease)
            copy.on_stored()
        except Exception:
            logger.exception("krul: the end of %d encoded pages could not be noted", len(copy.pages))

    def _forget(self, copy: ExactCopy) -> None:
        self._waiting_keys.difference_update(copy.page_keys)
        self._taken_bytes -= copy.num_bytes
        self._changed.notify_all()

    def _next(self) -> ExactCopy | None:
        """Wait until the oldest copy should be encoded; None when the encoder ends."""
        with self._changed:
            while not self._is_ending:
                if self._waiting and self._is_time_for(self._waiting[0]):
                    return self._waiting[0]
                self._changed.wait(_LOOK_S if self._waiting else None)
        return None

    def _is_time_for(self, copy: ExactCopy) -> bool:
        return (
            self._has_full_speed()
            or self._taken_bytes >= SMALL_SHARE * self.room_bytes
            or time.monotonic() >= copy.since_s + MAX_IDLE_WAIT_S
        )

    def _has_full_speed(self) -> bool:
        return self._is_hurried or self.lacks_room or self._gate.is_idle() or self._has_lost_copy()

    def _has_lost_copy(self) -> bool:
        """Whether nobody can find the oldest copy until it is encoded: others were lost before it, if any."""
        with self._changed:
            return bool(self._waiting) and not self._store.is_held(self._waiting[0].lease)

    def _share(self) -> float:
        """Share of a core that encoding may take now."""
        if self._has_full_speed():
            return 1.0
        share = min(1.0, max(LEAST_SHARE, self._taken_bytes / self.room_bytes))
        return share / 2 if self._gate.has_queue else share

    def _encode(self, copy: ExactCopy, stream: Any) -> None:
        """Store a copy once more, encoded; also as it is if its daemon has died."""
        page_size = copy.turn.model.page_size
        start, end = copy.pages.start * page_size, copy.pages.stop * page_size
        patience = self._gate.patience()
        began_s = time.thread_time()

        def pause() -> None:
            nonlocal began_s
            share = self._share()
            if share < 1.0:
                self._gate.rest((time.thread_time() - began_s) * (1.0 / share - 1.0))
            if not self.lacks_room:
                self._gate.give_way(patience)
            began_s = time.thread_time()

        def is_wanted() -> bool:
            return bool(self._waiting) and self._waiting[0] is copy

        run = TokenRun(_CopyReader(copy, self._codec, self._pool), start, end - start, copy.head_ends)
        if not self._store.is_held(copy.lease) and copy.encoding.exact is not None:
            exact = copy.encoding.exact.encode(copy.index, run, pause)
            self.writer.write(copy.turn, copy.pages, exact, stream, is_fast_copy=True, is_wanted=is_wanted)
        encoded = copy.encoding.encode(copy.index, run, pause)
        copy.on_encoded(encoded.codec)
        if self.writer.write(copy.turn, copy.pages, encoded, stream, is_wanted=is_wanted):
            if not self.keeps_copies:
                self._store.drop_fast_copies(copy.turn.model, copy.page_keys)
        elif is_wanted():
            self._counters.drop("no room")


class _CopyReader(BlockReads):
    """Reads the layers of an exact copy, which may lie in several segments."""

    def __init__(self, copy: ExactCopy, codec: ModelCodecs, pool: DevicePool) -> None:
        self._device = pool.streams
        self._parts: list[tuple[SegmentSlice, UnitDecoder, range]] = []
        for source in copy.lease.slices:
            header, page_size = source.header, copy.turn.model.page_size
            decoder = codec.native.open(
                header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
            )
            rows = range(source.first_page * page_size, source.end_page * page_size)
            self._parts.append((source, decoder, rows))
        self._checked: set[int] = set()

    @cached_property
    def rows(self) -> NativeTails:
        tails = []
        for _, decoder, rows in self._parts:
            unit = decoder.native_units[0]
            assert unit is not None, "an exact copy is native"
            tails.append(NativeTail(unit, rows.start, rows.stop))
        return NativeTails(tails, self._device)

    def __call__(self, layer: int) -> LayerKV:
        """The KV of a layer, ``[T, ...]`` on the pool's device.

        Raises:
            CodecError: the bytes in host memory are damaged.
        """
        return self._decoded(layer, sys.maxsize, self._device.upload)

    def first_tokens(self, layer: int, num_tokens: int) -> LayerKV:
        return self._decoded(layer, num_tokens, lambda block: block)

    def blocks(self, layer: int) -> list[Block]:
        self._check(layer)
        sizes = [tail.num_bytes for tail in self.rows.tails]
        blocks = [source.blocks[layer] for source, _, _ in self._parts]
        return [block[block.nbytes - size :] for block, size in zip(blocks, sizes, strict=True)]

    def _decoded(self, layer: int, num_tokens: int, moved: Callable[[torch.Tensor], torch.Tensor]) -> LayerKV:
        """The KV of a layer in the first tokens, where ``moved`` puts the blocks."""
        self._check(layer)
        parts = []
        for source, decoder, rows in self._parts:
            end = min(rows.stop, rows.start + num_tokens)
            if rows.start < end:
                block = moved(torch.from_numpy(source.blocks[layer]))
                parts.append(decoder.decode(layer, {layer: block}, rows.start, end))
                num_tokens -= end - rows.start
        if len(parts) == 1:
            return parts[0]
        return LayerKV(torch.cat([part.k for part in parts]), torch.cat([part.v for part in parts]))

    def _check(self, layer: int) -> None:
        for source, _, _ in self._parts:
            if layer not in self._checked and not source.is_right(layer):
                raise CodecError(f"layer {layer} of an exact copy is damaged")
        self._checked.add(layer)
