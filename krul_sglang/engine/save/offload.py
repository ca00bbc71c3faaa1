"""Stores finished turns on a thread of its own: reads device slots, copies to the store, commits."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.errors import StoreClosedError
from krul_backend.planner import OnlineCosts
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.hint import NO_HINT, Hint, SessionName
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.moved_runs import RunIndex
from krul_sglang.engine.common.transfer_gate import Patience, TransferGate
from krul_sglang.engine.save.allocation import SpaceAllocation, trim_path
from krul_sglang.engine.save.companion_saving import CompanionSaver
from krul_sglang.engine.save.later_encoding import ExactCopy, LaterEncoder
from krul_sglang.engine.save.segment_writer import LOOK_S, OffloadCounters
from krul_sglang.engine.save.strategy_choice import ChoiceCounters, Decision
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import TurnEncoding
from krul_sglang.reasons import Reasons, StoredTokens

logger = logging.getLogger(__name__)

MAX_LAYER_BYTES = 32 << 20
"""Of one layer of a segment, as the pool holds it. Longer runs of tokens become several segments: storing and
loading hold a layer of a segment, or both of a pair, on the device at a time, beside SGLang's own budget."""


class Job:
    """Stores one turn. ``future`` says whether it was stored, all of it.

    ``has_read`` is set when it will not read the turn's slots any more. ``is_revoked``, once set, ends the
    job soon: what it has read of the device since does not count. In both cases the slots may be given away.
    ``needs_store`` is False as soon as only copying is left to be done before ``has_read``. The first
    ``num_stored`` pages of the turn are stored, as far as it has come.
    """

    def __init__(self, turn: Turn, patience: Patience, start: Callable[[Job], Future[bool]]) -> None:
        self.turn = turn
        self.patience = patience
        self.has_read = threading.Event()
        self.is_revoked = False
        self.needs_store = True
        self.num_stored = 0
        self._reading = threading.Lock()
        self.future = start(self)

    def is_wanted(self) -> bool:
        return not self.is_revoked

    @contextmanager
    def reading(self, *, is_last: bool = False) -> Iterator[bool]:
        """Held while slots are read, ``is_last`` for the last time; yields whether they may be read."""
        with self._reading:
            self.needs_store = not is_last
            yield not self.is_revoked

    def wait_unread(self) -> None:
        """Wait until a job that is revoked queues no more reads of slots."""
        with self._reading:
            pass


@dataclass(frozen=True, eq=False)
class _MissingRun:
    """Pages of a turn that become a segment, number ``index`` of ``encoding``; the turn's last one if
    ``is_last``. ``head_ends``: see ``TokenRun``."""

    pages: range
    index: int
    is_last: bool
    encoding: TurnEncoding
    head_ends: tuple[int, ...] | None


class TurnOffloader:
    """Stores what the store does not hold yet of each submitted turn, in order, on one worker thread.

    A turn whose encoding loses something, or takes long, is stored as it is, and ``encoder`` encodes that
    later: its slots are free as soon as they were copied. Unless it ``stores``, another rank does, and this
    one only takes part in what they decide. With an ``allocation``, tokens that a restore would recompute are
    not stored, and dropped from earlier turns. ``runs``, if there are any, remember what is stored where.
    ``companions`` store what belongs to a turn beside its KV. ``costs``: see ``SegmentWriter``. ``reasons``
    hear what was stored of each turn.

    Every ``submit`` yields exactly one completion, whatever happens to the turn, because tensor-parallel
    ranks pair their completions by order.
    """

    def __init__(
        self,
        store: KVStore,
        page_size: int,
        pool: DevicePool,
        codec: ModelCodecs,
        decision: Decision,
        *,
        allocation: SpaceAllocation | None = None,
        runs: RunIndex | None = None,
        costs: OnlineCosts | None = None,
        gate: TransferGate | None = None,
        max_layer_bytes: int = MAX_LAYER_BYTES,
        copy_room: Callable[[], int] = lambda: sys.maxsize,
        keeps_copies: bool = True,
        stores: bool = True,
        companions: Sequence[CompanionSaver] = (),
        reasons: Reasons | None = None,
    ) -> None:
        self.counters = OffloadCounters()
        self.choices = ChoiceCounters()
        self._store = store
        self._pool = pool
        self._codec = codec
        self._decision = decision
        self._stores = stores
        self._allocation = allocation
        self._runs = runs
        self._companions = companions
        self._reasons = reasons
        self._gate = TransferGate() if gate is None else gate
        self._queue: deque[Job] = deque()
        layer_token_bytes = pool.shape.k_token_bytes + pool.shape.v_token_bytes
        self.page_bytes = layer_token_bytes * page_size * pool.num_layers
        self._segment_pages = max(1, max_layer_bytes // (layer_token_bytes * page_size))
        # Two copies: one is encoded while the next one is stored.
        self._copy_pages = min(self._segment_pages, max(1, copy_room() // 2 // self.page_bytes))
        self._device = pool.streams
        self._stream = self._device.new_stream()
        self.encoder = LaterEncoder(
            store,
            pool,
            codec,
            self.counters,
            self._gate,
            costs,
            copy_room=copy_room,
            keeps_copies=keeps_copies,
        )
        self.writer = self.encoder.writer
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="krul-offload", initializer=self._device.bind_background_thread
        )

    def submit(self, turn: Turn) -> Job:
        """Queue a turn. Pages that are stored already are never read or encoded again. Does not wait."""
        self.counters.turns += 1
        job = Job(turn, self._gate.patience(), lambda job: self._worker.submit(self._store_turn, job))
        self._queue.append(job)
        return job

    def finish(
        self,
        jobs: Sequence[Job],
        timeout_s: float,
        *,
        is_store_prompt: bool,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until the slots of turns have been read. Jobs that take over ``timeout_s`` are revoked.

        So are jobs that still need the store, at once, unless ``is_store_prompt``. ``make_room`` is called
        now and then while one of them waits for room in host memory.
        """
        self._hurry()
        end_s = time.monotonic() + timeout_s
        for job in jobs:
            until_s = end_s if is_store_prompt or not job.needs_store else -math.inf
            while not job.has_read.wait(max(0.0, min(LOOK_S, until_s - time.monotonic()))):
                if time.monotonic() >= until_s:
                    job.is_revoked = True
                    break
                if self.encoder.lacks_room:
                    make_room()
        self.encoder.wake()

    def num_completed(self) -> int:
        """Completed turns at the front of the queue: ``pop_completed`` takes these without waiting."""
        count = 0
        for job in self._queue:
            if not job.future.done():
                break
            count += 1
        return count

    def num_pending(self) -> int:
        """Turns and exact copies that wait."""
        return len(self._queue) + len(self.encoder)

    def pop_completed(self) -> bool:
        """Take the oldest completion, after waiting for it; whether its turn was stored."""
        job = self._queue.popleft()
        self._gate.hurry(job.patience)
        return job.future.result()

    def wait(self) -> None:
        """Block until every submitted turn can be popped, and all that waits is encoded."""
        wait_for_futures([job.future for job in self._queue])
        self.encoder.wait()

    def _hurry(self) -> None:
        for job in self._queue:
            self._gate.hurry(job.patience)

    def end_session(self, session: SessionName) -> None:
        """Demote a named conversation, after the turns that were submitted before. Does not wait."""

        def demote() -> None:
            if self._reasons is not None:
                self._reasons.lose("demoted", session)
            try:
                self._store.advise(Hint(demote=True), session=session)
            except KeyError:
                logger.debug("krul: a session was closed of which nothing is stored")
            except Exception:
                logger.exception("krul: the conversation of a closed session could not be demoted")

        self._worker.submit(demote)

    def discard_all(self) -> None:
        """Wait until no slot is read any more, and forget all completions and what waits to be encoded.

        What is being stored is not committed any more. The store is not waited for.
        """
        for job in self._queue:
            job.is_revoked = True
        self.forget_read()
        self.encoder.discard_all()

    def forget_read(self) -> None:
        """Forget all completions. Turns that have been read are still stored; all others must be revoked."""
        self.encoder.wake()
        self._hurry()
        for job in self._queue:
            job.wait_unread()
        self._device.synchronize(self._stream)
        self._queue.clear()

    def clear(self, models: Sequence[ModelIdentity]) -> None:
        """Drop all that is stored of these models, once what is being committed is stored."""
        with ExitStack() as committing:
            for writer in (self.writer, *(each.writer for each in self._companions)):
                committing.enter_context(writer.committing)
            for model in models:
                self._store.clear(model)

    def close(self) -> None:
        wait_for_futures([job.future for job in self._queue])
        self._queue.clear()
        self._worker.shutdown(wait=True)
        self.encoder.close()

    def _store_turn(self, job: Job) -> bool:
        turn = job.turn
        noted = None
        try:
            noted = self._noted(turn)
            pause = partial(self._gate.give_way, job.patience)
            with self._device.working_on(self._stream, turn.ready):
                # First, since the slots may be given away when the target's KV has been read.
                for companion in self._companions:
                    companion.save(turn, self._stream, pause, job.is_wanted, job.reading)
                cause = self._store_missing(job)
        except StoreClosedError as error:
            logger.warning("krul: a turn of %d tokens: %s", len(turn.token_ids), error)
            cause = "no answer"
        except Exception:
            logger.exception("krul: a turn of %d tokens could not be stored", len(turn.token_ids))
            cause = "error"
        finally:
            job.has_read.set()
            # Makes room for what is captured of another turn.
            if turn.attention is not None:
                turn.attention.release()
            for companion in self._companions:
                companion.release(turn)
        if cause is not None:
            cause = "evicted" if job.is_revoked else cause
            self.counters.drop(cause)
        num_stored = job.num_stored * turn.model.page_size
        logger.debug(
            "krul: request %s: of %d tokens %d are stored; the others: %s",
            turn.rid,
            len(turn.token_ids),
            num_stored,
            "none" if num_stored == len(turn.token_ids) else cause or "as its hint said",
        )
        if noted is not None:
            noted.num_stored, noted.cause = num_stored, "hint" if cause is None else f"dropped: {cause}"
        return cause is None

    def _noted(self, turn: Turn) -> StoredTokens | None:
        """What the reasons have of a turn that is going to be stored; None without them, or on a rank that
        stores nothing."""
        if self._reasons is None or not self._stores:
            return None
        gone = "demoted" if turn.hint.demote else ""
        fingerprint = turn.model.fingerprint
        return self._reasons.store(turn.rid, turn.tenant, turn.token_ids, fingerprint, turn.session, gone)

    def _store_missing(self, job: Job) -> str | None:
        """Store a turn; returns why that failed, None if it did not."""
        turn = job.turn
        is_to_store = self._stores and not turn.hint.drop
        missing = self._missing_segments(turn) if is_to_store and not job.is_revoked else None
        # Ranks decide together. So each of them takes part for each job, also where nothing is to be stored.
        with job.reading() as may_read:
            missing = missing if may_read else None
            encoding = self._decision.decide(None if missing is None else turn, missing or ())
        head_ends = None
        if self._allocation is not None:
            head_ends = self._allocation.head_ends(len(turn.token_ids), encoding)
        if missing is None:
            if is_to_store:
                return "no answer"
        else:
            self.choices.add(encoding.stored_as)
            for index, pages in enumerate(missing):
                run = _MissingRun(pages, index, index == len(missing) - 1, encoding, head_ends)
                job.num_stored = pages.start
                if not self._has_stored(job, run):
                    return "no room"
            job.num_stored = len(turn.page_keys)
            self._trim(turn, head_ends)
        if self._stores:
            self._advise(turn)
        return None

    def _has_stored(self, job: Job, run: _MissingRun) -> bool:
        """Store a run of a turn's pages; False if there is no room, or the turn is revoked."""
        if run.encoding.exact is None:
            return self._write(job, run)
        num_bytes = len(run.pages) * self.page_bytes
        if not self.encoder.take_room(num_bytes, job.is_wanted):
            return False
        copy = None
        try:
            if self._write(job, replace(run, encoding=run.encoding.exact, head_ends=None)):
                copy = self._exact_copy(job.turn, run)
        finally:
            if copy is None:
                self.encoder.give_room_back(num_bytes)
        return copy is not None and self.encoder.add(copy, job.is_wanted)

    def _exact_copy(self, turn: Turn, run: _MissingRun) -> ExactCopy | None:
        """The copy of a run that was just stored, pinned; None if it has gone."""
        model, page_size, pages = turn.model, turn.model.page_size, run.pages
        lease = self._store.lease(
            model,
            turn.page_keys[pages.start : pages.stop],
            turn.token_ids[pages.start * page_size : pages.stop * page_size],
            fast_copies="only",
        )
        if lease is None or lease.num_pages < len(pages):
            if lease is not None:
                self._store.release(lease)
            return None
        return ExactCopy(
            turn=turn,
            pages=pages,
            index=run.index,
            encoding=run.encoding,
            head_ends=run.head_ends,
            lease=lease,
            num_bytes=len(pages) * self.page_bytes,
            on_encoded=lambda codec: self.choices.note_encoded(codec) if run.index == 0 else None,
            on_stored=partial(self._note_encoded, turn, run.head_ends) if run.is_last else (lambda: None),
            since_s=time.monotonic(),
        )

    def _write(self, job: Job, run: _MissingRun) -> bool:
        """Store a run of a turn's pages from the device; False if there is no room, or it is revoked."""
        turn, page_size, pages = job.turn, job.turn.model.page_size, run.pages
        start, end = pages.start * page_size, pages.stop * page_size
        slots = turn.slots[start:end]

        def read(layer: int) -> LayerKV:
            return self._pool.gather(layer, slots)

        encoded = run.encoding.encode(
            run.index,
            TokenRun(read, start, end - start, run.head_ends, (self._pool, slots)),
            lambda: self._gate.give_way(job.patience),
        )
        is_stored = self.writer.write(
            turn,
            pages,
            encoded,
            self._stream,
            is_fast_copy=run.encoding.is_copy,
            is_wanted=job.is_wanted,
            reading=partial(job.reading, is_last=run.is_last),
            on_read=job.has_read.set if run.is_last else None,
        )
        if is_stored and self._runs is not None:
            self._runs.add(turn.tenant, turn.page_keys, turn.token_ids, pages, turn.moved_from)
        return is_stored

    def _note_encoded(self, turn: Turn, head_ends: tuple[int, ...] | None) -> None:
        """Nothing of a turn waits to be encoded any more."""
        self._trim(turn, head_ends)
        self._advise(turn)

    def _trim(self, turn: Turn, head_ends: tuple[int, ...] | None) -> None:
        """Drop heads, if any, from earlier turns. An error does not fail the turn: they only take space."""
        if head_ends is None:
            return
        try:
            trim_path(self._store, turn.model, self._codec, turn.page_keys, head_ends)
        except Exception:
            self.counters.failed_trims += 1
            logger.exception("krul: a conversation of %d tokens could not be trimmed", len(turn.token_ids))

    def _advise(self, turn: Turn) -> None:
        """Hand the turn's hint and name, if any, to the store. An error does not fail the turn."""
        if turn.session is None and turn.hint == NO_HINT:
            return
        try:
            self._store.advise(turn.hint, model=turn.model, page_keys=turn.page_keys, session=turn.session)
        except Exception:
            logger.exception("krul: a hint about %d tokens could not be given", len(turn.token_ids))

    def _missing_segments(self, turn: Turn) -> list[range] | None:
        """Runs of pages that are neither stored nor wait to be encoded, cut so that a layer of none is larger
        than the device should hold, nor any larger than the encoder has room for; None if the store cannot
        say."""
        try:
            missing = self._store.find_missing(turn.model, turn.page_keys)
        except Exception:
            logger.exception("krul: the store does not say what it has of %d tokens", len(turn.token_ids))
            return None
        return [
            range(first, min(first + self._copy_pages, run.stop))
            for run in self.encoder.without_waiting(turn, missing)
            for first in range(run.start, run.stop, self._copy_pages)
        ]
