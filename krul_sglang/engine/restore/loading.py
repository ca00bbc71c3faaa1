"""Copies the tails of leased prefixes into device slots, layer by layer, on a thread of its own."""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

import torch

from krul_backend.codec.interface import TailGroup
from krul_backend.errors import KrulError
from krul_backend.store.interface import KVStore
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.block_checks import BlockChecks, DamagedBlockError
from krul_sglang.engine.restore.draft_loads import DraftLoads
from krul_sglang.engine.restore.layer_waits import LayerWaits
from krul_sglang.engine.restore.link import Link
from krul_sglang.engine.restore.load_batch import LayerTimes, Load, LoadBatch
from krul_sglang.engine.restore.segment_reader import SegmentReader
from krul_sglang.engine.restore.state_loads import StateLoads
from krul_sglang.engine.restore.tail_groups import TailGroups

logger = logging.getLogger(__name__)


MAX_STAGED_BYTES = 128 << 20
"""Of tails that are copied to the device while the forward before them runs."""
SWITCH_INTERVAL_S = 1e-4
"""While a load runs beside a GPU's forward, a thread that waits for the GIL gets it after this time. After
Python's 5 ms a bus would have copied 250 MB: the forward's thread seldom gives it back by itself."""
MAX_BYTES_TOGETHER = 32 << 20
"""Of layers that land at once: half a millisecond on a bus of 64 GB/s, for which a forward may wait."""


@dataclass
class LoadCounters:
    """``num_bytes`` were read from the store, for ``tokens`` that came back (heads and tails together).

    ``dram_tokens``: those of requests that had nothing to wait for in a lower tier when they were admitted.
    """

    requests: int = 0
    tokens: int = 0
    dram_tokens: int = 0
    num_bytes: int = 0
    failed_batches: int = 0


class LayerWiseLoader:
    """Fills the slots of loads; the forward waits for each layer through ``counter``.

    A load owns its lease, which is released when the load has ended or failed. Segments in a
    lower tier are fetched while the first layers are copied. If a part of a load does not come, the segments
    before it are loaded all the same, so that only the rest has to be computed.
    ``patience_s``, ``agreement``: see ``LoadBatch``. ``link``: slows loads down.
    ``drafts`` find the draft model's KV, which comes before the last layer: what reads it comes after that.
    ``states`` find the states of recurrent layers, which come before it, too: models that have them begin
    their forwards when all is loaded.
    ``before_layer(index, layer)`` is called in the loading thread before a layer is written; what it
    raises fails the batch.
    """

    def __init__(
        self,
        store: KVStore,
        pool: DevicePool,
        gate: TransferGate,
        patience_s: float | None = None,
        link: Link | None = None,
        agreement: RankAgreement | None = None,
        before_layer: Callable[[int, int], None] = lambda index, layer: None,
        drafts: DraftLoads | None = None,
        states: StateLoads | None = None,
    ) -> None:
        self.counters = LoadCounters()
        self.counter = LayerWaits(pool.num_layers, pool.layer_ids)
        self._store = store
        self._pool = pool
        self._gate = gate
        self._patience_s = patience_s
        self._link = link
        self._agreement = agreement
        self._before_layer = before_layer
        self._drafts = drafts
        self._states = states
        self._running: dict[int, Future[None]] = {}
        self._num_running, self._counting = 0, threading.Lock()
        self._switch_interval_s = sys.getswitchinterval()
        self._next_index = 0
        self._device = pool.streams
        self._num_cores = torch.get_num_threads()
        self._stream = self._device.new_stream()
        self._worker = self._new_worker()

    def start(self, loads: Mapping[str, Load], ready: Sequence[Any] = ()) -> int:
        """Start loads, by request, as one batch. Returns its counter index, -1 if there are none.

        ``ready``: events after which the slot indices are computed (the first one), and their earlier owners'
        KV is not used any more (the others): until then nothing is written, but the first copies are staged.
        """
        if not loads:
            return -1
        index, self._next_index = self._next_index, self._next_index + 1
        batch = LoadBatch(
            dict(loads),
            self._pool.num_layers,
            self._device,
            self._patience_s,
            lands_whole=self._device.shares_cores
            and self._link is None
            and all(load.lease.is_in_dram for load in loads.values()),
            agreement=self._agreement,
        )
        self.counter.batches[index] = batch
        self._note_running(1)
        self._running[index] = self._worker.submit(self._run, index, batch, ready)
        return index

    def batch(self, index: int) -> LoadBatch | None:
        """The batch of a counter index, while its forward may run."""
        return self.counter.batches.get(index)

    def finish(self, index: int) -> bool:
        """Whether all slots of batch ``index`` hold what they should for what comes after its forward.

        On a GPU nothing is waited for if the forward has passed the waits of all layers: what follows on its
        stream comes after the copies, and an error would have failed the forward. Else this waits until the
        batch has stopped writing.
        """
        self._forget_ended()
        batch = self.counter.batches.pop(index, None)
        if batch is None or (batch.is_ordered and not self._device.shares_cores):
            return True
        landed = batch.wait_end()
        running = self._running.pop(index)
        if batch.is_abandoned:
            if not running.done():
                # Its thread may stay stuck for long; later loads must not wait for it.
                self._worker.shutdown(wait=False)
                self._worker = self._new_worker()
            return batch.is_refilled
        running.result()
        return landed

    def num_pending(self) -> int:
        """Batches that have not ended."""
        self._forget_ended()
        return len(self._running)

    def discard_all(self) -> None:
        """Wait for what runs."""
        for index in list(self.counter.batches):
            self.finish(index)
        for running in self._running.values():
            running.result()
        self._running.clear()

    def close(self) -> None:
        self.discard_all()
        self._worker.shutdown(wait=True)

    def _forget_ended(self) -> None:
        """Drop finished batches whose thread has ended since."""
        for index, running in [*self._running.items()]:
            if index not in self.counter.batches and running.done():
                del self._running[index]
                running.result()

    def _new_worker(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="krul-load", initializer=self._device.bind_thread
        )

    def _run(self, index: int, batch: LoadBatch, ready: Sequence[Any]) -> None:
        loads = tuple(batch.loads.values())
        try:
            self._load(index, batch, ready)
        except Exception as error:
            self.counters.failed_batches += 1
            # Damage and slow tiers are expected to happen: a traceback would say nothing more.
            is_expected = isinstance(error, KrulError)
            logger.log(
                logging.WARNING if is_expected else logging.ERROR,
                "krul: loading %d request(s) failed; they are recomputed: %s",
                len(loads),
                error,
                exc_info=not is_expected,
            )
            batch.fail(error, self._salvage(batch, error))
        finally:
            batch.end()
            for load in loads:
                self._store.release(load.lease)
            self._note_running(-1)

    def _note_running(self, change: int) -> None:
        """So many more loads run. While any does, threads hand the GIL over sooner, unless they share cores
        with the forward."""
        with self._counting:
            self._num_running += change
            if not self._device.shares_cores:
                quick_s = min(SWITCH_INTERVAL_S, self._switch_interval_s)
                sys.setswitchinterval(quick_s if self._num_running else self._switch_interval_s)

    def _load(self, index: int, batch: LoadBatch, ready: Sequence[Any]) -> None:
        """Copy all layers of a batch, until it is abandoned."""
        loads = tuple(batch.loads.values())
        with (
            self._gate.restoring(lambda: not batch.is_abandoned),
            self._device.working_on(self._stream, ready[:1]),
            # A forward that waits for the whole load leaves its cores to decoders that can use them.
            self._device.on_cores(self._num_cores if batch.lands_whole and _any_decoded(loads) else 1),
        ):
            for load in loads:
                self._begin(load)
            readers = [reader for load in loads for reader in load.readers]
            of_drafts = {} if self._drafts is None else self._drafts.lease(batch.loads, self._begin)
            of_states = [] if self._states is None else self._states.lease(loads, self._begin)
            # What a CPU was told to do is done.
            free = () if self._device.shares_cores else ready[1:]

            def before_layer(layer: int) -> None:
                self._before_layer(index, layer)
                if of_states and layer == self._pool.num_layers - 1:
                    self._load_states(batch, of_states, free)
                if of_drafts and layer == self._pool.num_layers - 1:
                    self._load_drafts(batch, of_drafts)

            try:
                if not self._copy(batch, readers, batch.landed, before_layer, free):
                    return
            finally:
                for load in (*of_drafts.values(), *of_states):
                    self._store.release(load.lease)
        self._count(loads)

    def _load_states(self, batch: LoadBatch, loads: Sequence[Load], free: Sequence[Any]) -> None:
        """Load the states that belong to a batch. An error fails the batch."""
        assert self._states is not None
        states = self._states.states
        readers = [reader for load in loads for reader in load.readers]
        try:
            if self._copy(batch, readers, lambda times: batch.progressed(), free=free, pool=states.pool):
                states.counters.restored += len(loads)
        except Exception:
            states.counters.failed_loads += 1
            raise

    def _load_drafts(self, batch: LoadBatch, loads: Mapping[str, Load]) -> None:
        """Load the draft KV that belongs to a batch. An error fails nothing else."""
        assert self._drafts is not None
        draft = self._drafts.draft
        try:
            readers = [reader for load in loads.values() for reader in load.readers]
            if self._copy(batch, readers, lambda times: batch.progressed(), pool=draft.pool):
                batch.draft_tokens = {rid: len(load.slots) for rid, load in loads.items()}
        except Exception as error:
            draft.counters.failed_loads += 1
            logger.warning("krul: draft KV of %d request(s) could not be loaded: %s", len(loads), error)

    def _copy(
        self,
        batch: LoadBatch,
        readers: Sequence[SegmentReader],
        landed: Callable[[Sequence[LayerTimes]], None],
        before_layer: Callable[[int], None] = lambda layer: None,
        free: Sequence[Any] = (),
        pool: DevicePool | None = None,
    ) -> bool:
        """Copy all layers of these segments, and say of layers when they have ``landed``; False if the batch
        was abandoned. The slots may be written after the events ``free``. ``pool``: the target's, that of its
        drafts, or that of its states."""
        pool = self._pool if pool is None else pool
        checks = BlockChecks(self._device, batch.deadline_s, self._store.report_damage)
        tails, groups = TailGroups(readers, self._device), deque[list[TailGroup]]()
        layer, num_layers, num_announced, have_new = 0, pool.num_layers, 0, deque[bool]()
        is_moved = pool is self._pool and any(load.is_moved for load in batch.loads.values())

        def announce() -> None:
            """On a CPU this waits for the layer's blocks, and checks them: that is part of their load."""
            nonlocal num_announced
            while num_announced <= layer or (num_announced < num_layers and checks.want_more(sum(have_new))):
                groups.append(tails.of_layer(num_announced))
                blocks = [block for group in groups[-1] for block in group.blocks]
                have_new.append(checks.announce(blocks))
                num_announced += 1
            checks.start()

        # Closed before a failure is reported: recomputing may need the memory.
        with closing(checks), closing(tails):
            while layer < num_layers:
                marks = [batch.clock.mark()]
                announce()
                # The forward begins as soon as the first one is there.
                num_together = 1 if is_moved or not layer else self._num_together(groups, checks)
                if num_together > 1 and (copied := [*chain.from_iterable(islice(groups, num_together))]):
                    copied[0].fetch(self._device, copied[1:])
                for number in range(layer, layer + num_together):
                    before_layer(number)
                    if number == 0:
                        if not all(event.query() for event in free):
                            announce()
                            self._stage(batch, [*chain.from_iterable(groups)], readers, checks)
                        for event in free:
                            self._device.wait_for(event)
                    have_new.popleft()
                    of_layer, later = groups.popleft(), [*chain.from_iterable(groups)]
                    if not self._load_layer(batch, of_layer, later, readers, checks, pool):
                        return False
                    if is_moved and not self._rotate_keys(batch, number):
                        return False
                    marks.append(batch.clock.mark())
                layer += num_together
                if layer == num_layers:
                    # The check waits for what was decoded, and that for the forward before.
                    with batch.standing_still():
                        for event in free if tails.has_decoded else ():
                            event.synchronize()
                    # Before the last layer lands: a failed load fails the forward, and it runs again.
                    tails.check()
                with batch.writing() as is_wanted:
                    if not is_wanted:
                        return False
                    landed([LayerTimes(*of_layer) for of_layer in pairwise(marks)])
        return True

    def _num_together(self, groups: Sequence[Sequence[TailGroup]], checks: BlockChecks) -> int:
        """Count the next layers that can land at once: on a GPU those that are only copied, and were found to
        be right. The forward's thread then seldom waits for this one to give the GIL back."""
        num_bytes = 0
        for number, of_layer in enumerate(() if self._device.shares_cores or self._link else groups):
            blocks = [block for group in of_layer for block in group.blocks]
            num_bytes += sum(block.num_bytes for block in blocks)
            is_copied = not any(group.is_decoded or group.decodes_early for group in of_layer)
            if not is_copied or num_bytes > MAX_BYTES_TOGETHER or not checks.are_right(blocks):
                return max(1, number)
        return max(1, len(groups))

    def _salvage(self, batch: LoadBatch, error: Exception) -> dict[str, int]:
        """Load the segments before those that have not come; returns how many tokens of each request they
        complete. Nothing if memory ran out, on any other error, or if the state at their end is needed."""
        readers, salvaged = list[SegmentReader](), dict[str, int]()
        damaged_id = error.segment_id if isinstance(error, DamagedBlockError) else None
        try:
            if not isinstance(error, KrulError) or batch.is_abandoned or self._states is not None:
                return {}
            for rid, load in batch.loads.items():
                # Rotated keys would be rotated twice.
                for reader in load.readers if load.moved is None else ():
                    again = reader.again(load.plan.head_ends)
                    if again is None or again.block(0).source.segment_id == damaged_id:
                        break
                    readers.append(again)
                    salvaged[rid] = again.end_token - load.device_tokens
            with self._device.working_on(self._stream):
                return salvaged if readers and self._copy(batch, readers, lambda times: None) else {}
        except Exception as again_failed:
            logger.info("krul: nothing of a failed load can be used: %s", again_failed)
            return {}

    def _begin(self, load: Load) -> None:
        """Make a load's readers ready; what is in a lower tier is on its way from here on."""
        load.begin()
        if not load.lease.is_all_in_dram:
            # Fewer may be loaded than were leased: ranks agree on the shortest prefix.
            fetched = self._store.fetch(load.lease, [reader.tail() for reader in load.readers])
            for reader, source in zip(load.readers, fetched, strict=True):
                reader.take_blocks_of(source)

    def _stage(
        self,
        batch: LoadBatch,
        groups: Sequence[TailGroup],
        readers: Sequence[SegmentReader],
        checks: BlockChecks,
    ) -> None:
        """Upload what has been checked, as far as it may lie on the device before it is written."""
        num_bytes = 0
        for number, group in enumerate(groups):
            num_bytes += sum(block.num_bytes for block in group.blocks)
            if num_bytes > MAX_STAGED_BYTES or not checks.are_right(group.blocks):
                return
            self._fetch(batch, group, groups[number + 1 :], readers, checks)

    def _fetch(
        self,
        batch: LoadBatch,
        group: TailGroup,
        later: Sequence[TailGroup],
        readers: Sequence[SegmentReader],
        checks: BlockChecks,
    ) -> None:
        """Copy a group to the device, and of later ones in memory what is decoded with it. A block that
        several layers need passes the link once."""
        together = [each for each in later if group.decodes_early and each.decodes_early]
        together = [each for each in together if checks.are_near(each.blocks)]
        for each in together:
            checks.wait(each.blocks)
        num_before = 0 if self._link is None else _num_read(readers)
        with batch.decoding(group.decodes_early):
            group.fetch(self._device, together)
        if self._link is not None:
            self._link.carry(_num_read(readers) - num_before)

    def _load_layer(
        self,
        batch: LoadBatch,
        groups: Sequence[TailGroup],
        later: Sequence[TailGroup],
        readers: Sequence[SegmentReader],
        checks: BlockChecks,
        pool: DevicePool,
    ) -> bool:
        """Group after group, so that the device holds the blocks of few; False if given up."""
        for group in groups:
            checks.wait(group.blocks)
            self._fetch(batch, group, later, readers, checks)
            with batch.writing() as is_wanted, batch.decoding(group.is_decoded):
                if not is_wanted:
                    return False
                group.restore(pool)
        return True

    def _rotate_keys(self, batch: LoadBatch, layer: int) -> bool:
        """Rotate keys that were stored at other positions; False if given up."""
        with batch.writing() as is_wanted:
            for load in batch.loads.values() if is_wanted else ():
                if load.moved is not None and load.is_moved:
                    load.moved.rotate(self._pool, layer, load.tail_slots(layer), load.plan.head_ends[layer])
            return is_wanted

    def _count(self, loads: Sequence[Load]) -> None:
        self.counters.requests += len(loads)
        self.counters.tokens += sum(len(load.slots) for load in loads)
        self.counters.dram_tokens += sum(len(load.slots) for load in loads if load.lease.is_in_dram)
        self.counters.num_bytes += sum(_num_read(load.readers) for load in loads)


def _num_read(readers: Iterable[SegmentReader]) -> int:
    """Bytes that were read of these segments so far."""
    return sum(reader.num_bytes for reader in readers)


def _any_decoded(loads: Sequence[Load]) -> bool:
    """Whether any segment is more than copied."""
    return any(reader.decoder.uses_cores for load in loads for reader in load.readers)
