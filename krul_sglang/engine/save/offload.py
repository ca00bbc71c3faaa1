"""Stores finished turns on a thread of its own: reads device slots, encodes, copies to the store, commits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from enum import Enum, auto

import torch

from krul_backend.codec.layout import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.segment import SegmentManifest
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.hint import NO_HINT, Hint, SessionName
from krul_backend.tiers.common.interface import Reservation, block_checksums
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.moved_runs import RunIndex
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.transfer_gate import Patience, TransferGate
from krul_sglang.engine.save.allocation import SpaceAllocation, trim_path
from krul_sglang.engine.save.strategy_choice import ChoiceCounters, Decision
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import TokenRun, TurnEncoding

logger = logging.getLogger(__name__)

MAX_LAYER_BYTES = 32 << 20
"""Of one layer of a segment, as the pool holds it. Longer runs of tokens become several segments: storing and
loading hold a layer of a segment, or both of a pair, on the device at a time, beside SGLang's own budget."""


class Outcome(Enum):
    """What became of a turn: every page of it is stored; it was not taken (no room, ``drop``); an error."""

    STORED = auto()
    SKIPPED = auto()
    FAILED = auto()


@dataclass
class OffloadCounters:
    """Counts turns. ``num_bytes`` were stored, and ``fast_copy_bytes`` a second time, to be loaded sooner;
    ``left_out_bytes`` were not stored: a restore recomputes them."""

    turns: int = 0
    segments: int = 0
    tokens: int = 0
    num_bytes: int = 0
    fast_copy_bytes: int = 0
    left_out_bytes: int = 0
    skipped_turns: int = 0
    failed_turns: int = 0
    failed_trims: int = 0


class TurnOffloader:
    """Stores what the store does not hold yet of each submitted turn, in order, on one worker thread.

    With an ``allocation``, tokens that a restore would recompute are not stored, and dropped from earlier
    turns. It may be set after the offloader is made, before the first turn; so may ``costs``, from which the
    store is told how long computing a segment takes. ``keeps_fast_copies``, off at first, may change at any
    time: whether turns are stored as fast copies, too. If ``runs`` is set, it remembers what is stored where.

    Every ``submit`` yields exactly one completion, whatever happens to the turn, because tensor-parallel
    ranks pair their completions by order.
    """

    def __init__(
        self,
        store: KVStore,
        model: ServedModel,
        pool: DevicePool,
        codec: SegmentCodec,
        decision: Decision,
        *,
        max_pending_tokens: int,
        allocation: SpaceAllocation | None = None,
        gate: TransferGate | None = None,
        max_layer_bytes: int = MAX_LAYER_BYTES,
    ) -> None:
        self.counters = OffloadCounters()
        self.choices = ChoiceCounters()
        self._store = store
        self._model = model
        self._pool = pool
        self._codec = codec
        self._decision = decision
        self._max_pending_tokens = max_pending_tokens
        self.allocation = allocation
        self.costs: OnlineCosts | None = None
        self.keeps_fast_copies = False
        self.runs: RunIndex | None = None
        self._gate = TransferGate() if gate is None else gate
        self._pending_tokens = 0
        self._queue: deque[tuple[Future[Outcome], int]] = deque()
        page_bytes = (pool.shape.k_token_bytes + pool.shape.v_token_bytes) * model.identity.page_size
        self._segment_pages = max(1, max_layer_bytes // page_bytes)
        self._device = pool.streams
        self._stream = self._device.new_stream()
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="krul-offload", initializer=self._device.bind_background_thread
        )

    def submit(self, turn: Turn) -> None:
        """Queue a turn. Pages that are stored already are never read or encoded again."""
        self.counters.turns += 1
        page_size = self._model.identity.page_size
        missing = sum(map(len, self._store.find_missing(self._model.identity, turn.page_keys))) * page_size
        # A lone turn is always taken, however long it is: it cannot starve the pool more than its own
        # request did while it ran.
        has_room = not self._pending_tokens or self._pending_tokens + missing <= self._max_pending_tokens
        has_room = has_room and not turn.hint.drop
        num_tokens = missing if has_room else 0
        self._pending_tokens += num_tokens
        self._queue.append((self._worker.submit(self._store_turn, turn, has_room), num_tokens))

    def num_completed(self) -> int:
        """Completed turns at the front of the queue: ``pop_completed`` takes these without waiting."""
        count = 0
        for future, _ in self._queue:
            if not future.done():
                break
            count += 1
        return count

    def num_pending(self) -> int:
        return len(self._queue)

    def pop_completed(self) -> bool:
        """Take the oldest completion, after waiting for it: whether every page of that turn is stored now."""
        future, num_tokens = self._queue.popleft()
        self._pending_tokens -= num_tokens
        outcome = future.result()
        self.counters.skipped_turns += outcome is Outcome.SKIPPED
        self.counters.failed_turns += outcome is Outcome.FAILED
        return outcome is Outcome.STORED

    def wait(self) -> None:
        """Block until every submitted turn can be popped."""
        wait_for_futures([future for future, _ in self._queue])

    def end_session(self, session: SessionName) -> None:
        """Demote a named conversation, after the turns that were submitted before. Does not wait."""

        def demote() -> None:
            try:
                self._store.advise(Hint(demote=True), session=session)
            except KeyError:
                logger.debug("krul: a session was closed of which nothing is stored")
            except Exception:
                logger.exception("krul: the conversation of a closed session could not be demoted")

        self._worker.submit(demote)

    def discard_all(self) -> None:
        """Wait until no slot is read any more and forget all completions.

        Turns that have not begun are stored too: ranks would not cancel the same ones, and wait for each
        other.
        """
        self.wait()
        self._queue.clear()
        self._pending_tokens = 0

    def close(self) -> None:
        self.discard_all()
        self._worker.shutdown(wait=True)

    def _store_turn(self, turn: Turn, has_room: bool) -> Outcome:
        try:
            with self._device.working_on(self._stream, turn.ready):
                missing = self._missing_segments(turn) if has_room else None
                encoding = self._choose(turn, missing)
                head_ends = self._head_ends(len(turn.token_ids), encoding)
                if turn.hint.drop:
                    self._advise(turn)
                if missing is None:
                    return Outcome.FAILED if has_room else Outcome.SKIPPED
                can_wait = False
                if self.keeps_fast_copies and encoding.fast_copy is not None:
                    is_found = self._store_fast_copies(turn, missing, encoding.fast_copy, head_ends)
                    # Encoding can wait for an idle server, where it would take the forward's cores. But turns
                    # that wait hold their slots.
                    can_wait = (
                        is_found
                        and self._device.shares_cores
                        and self._pending_tokens <= self._max_pending_tokens / 2
                    )
                patience = self._gate.patience(until_idle=can_wait)
                is_stored = all(
                    self._store_run(turn, index, run, encoding, head_ends, patience)
                    for index, run in enumerate(missing)
                )
        except Exception:
            logger.exception("krul: a turn of %d tokens could not be stored", len(turn.token_ids))
            return Outcome.FAILED
        if not is_stored:
            return Outcome.SKIPPED
        if head_ends is not None:
            self._trim(turn, head_ends)
        if turn.session is not None or turn.hint != NO_HINT:
            self._advise(turn)
        return Outcome.STORED

    def _choose(self, turn: Turn, missing: Sequence[range] | None) -> TurnEncoding:
        """How the missing runs of pages are stored. Without any, too: ranks decide together, and each of them
        must take part."""
        try:
            encoding = self._decision.decide(None if missing is None else turn, missing or ())
            if missing is not None:
                self.choices.add(encoding.stored_as)
                logger.debug("krul: %d tokens are stored as %s", len(turn.token_ids), encoding.stored_as)
            return encoding
        finally:
            if turn.attention is not None:
                turn.attention.release()

    def _head_ends(self, num_tokens: int, encoding: TurnEncoding) -> tuple[int, ...] | None:
        return None if self.allocation is None else self.allocation.head_ends(num_tokens, encoding)

    def _trim(self, turn: Turn, head_ends: tuple[int, ...]) -> None:
        """Drop heads from earlier turns. An error does not fail the turn: the heads only take space."""
        try:
            trim_path(self._store, self._model.identity, self._codec, turn.page_keys, head_ends)
        except Exception:
            self.counters.failed_trims += 1
            logger.exception("krul: a conversation of %d tokens could not be trimmed", len(turn.token_ids))

    def _advise(self, turn: Turn) -> None:
        """Hand the turn's hint and name to the store. An error does not fail the turn."""
        try:
            self._store.advise(
                turn.hint, model=self._model.identity, page_keys=turn.page_keys, session=turn.session
            )
        except Exception:
            logger.exception("krul: a hint about %d tokens could not be given", len(turn.token_ids))

    def _missing_segments(self, turn: Turn) -> list[range] | None:
        """Runs of pages to be stored, cut so that a layer of none is larger than the device should hold.

        None if the store cannot say. Asked again here: an earlier turn in the queue may have stored a common
        prefix since this one was submitted.
        """
        try:
            runs = self._store.find_missing(self._model.identity, turn.page_keys)
        except Exception:
            logger.exception("krul: a turn of %d tokens could not be stored", len(turn.token_ids))
            return None
        return [
            range(first, min(first + self._segment_pages, run.stop))
            for run in runs
            for first in range(run.start, run.stop, self._segment_pages)
        ]

    def _store_fast_copies(
        self,
        turn: Turn,
        missing: Sequence[range],
        encoding: TurnEncoding,
        head_ends: tuple[int, ...] | None,
    ) -> bool:
        """Store the missing pages as fast copies, as far as there is space; returns whether all are stored.

        An error does not fail the turn: it may only come back later.
        """
        patience = self._gate.patience()
        try:
            return all(
                self._store_run(turn, index, run, encoding, head_ends, patience, is_fast_copy=True)
                for index, run in enumerate(missing)
            )
        except Exception:
            logger.exception("krul: no fast copy of a conversation of %d tokens", len(turn.token_ids))
            return False

    def _store_run(
        self,
        turn: Turn,
        index: int,
        run: range,
        encoding: TurnEncoding,
        head_ends: tuple[int, ...] | None,
        patience: Patience,
        *,
        is_fast_copy: bool = False,
    ) -> bool:
        """Store run number ``index`` of the missing pages as a segment; False if there is no space for it."""
        page_size = self._model.identity.page_size
        start, end = run.start * page_size, run.stop * page_size

        def read(layer: int) -> LayerKV:
            return self._pool.gather(layer, turn.slots[start:end])

        encoded = encoding.encode(
            index,
            TokenRun(read, start, end - start, head_ends),
            lambda: self._gate.give_way(patience),
        )
        manifest = SegmentManifest(
            model=self._model.identity,
            page_keys=tuple(turn.page_keys[run.start : run.stop]),
            parent_key=turn.page_keys[run.start - 1] if run.start else None,
            start_token=start,
            token_ids=turn.token_ids[start:end].copy(),
            codec=encoded.codec,
            layer_num_bytes=encoded.layer_num_bytes,
            codec_params=encoded.params,
            layer_first_token=encoded.layer_first_token,
            tenant=turn.tenant,
            recompute_s=self._recompute_s(start, end),
        )
        reservation = self._store.reserve(encoded.layer_num_bytes, turn.tenant, is_fast_copy=is_fast_copy)
        if reservation is None:
            return False
        try:
            for layer, block in encoded.blocks:
                self._device.download(torch.from_numpy(reservation.blocks[layer]), block)
            self._device.synchronize(self._stream)
            checksums = block_checksums(reservation.blocks)
        except BaseException:
            self._give_back(reservation)
            raise
        self._store.commit(reservation, manifest, checksums)
        if self.runs is not None:
            self.runs.add(turn.tenant, turn.page_keys, turn.token_ids, run, turn.moved_from)
        if is_fast_copy:
            self.counters.fast_copy_bytes += manifest.num_bytes
            return True
        self.counters.segments += 1
        self.counters.tokens += end - start
        self.counters.num_bytes += manifest.num_bytes
        self.counters.left_out_bytes += encoded.left_out_num_bytes
        return True

    def _give_back(self, reservation: Reservation) -> None:
        """Abort a reservation once no copy writes to it: the store may hand out its bytes again at once."""
        try:
            self._device.synchronize(self._stream)
        except Exception:
            logger.exception("krul: %d reserved blocks may still be written to", len(reservation.blocks))
            return
        self._store.abort(reservation)

    def _recompute_s(self, start: int, end: int) -> float:
        """Seconds that computing tokens ``[start, end)`` takes: what a restore of them saves."""
        if self.costs is None:
            return 0.0
        return self._pool.num_layers * self.costs.current().own.layer_s(end - start, start)
