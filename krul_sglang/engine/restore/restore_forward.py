"""Runs a forward with restored prefixes: heads before it; if a load fails, the engine computes them whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.device import Device, StreamClock
from krul_backend.errors import KrulError
from krul_backend.memory import is_out_of_memory
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.restore.heads import Head, RunHeads, RunPrefix
from krul_sglang.engine.restore.load_batch import Load, LoadBatch, LoadFailedError
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.restore.restore_trace import RestoreTrace, TraceLog

logger = logging.getLogger(__name__)

_MIN_TIMED_TOKENS = 32
"""Shorter prompts are not timed: overhead outweighs the time of their layers."""


_MIN_CHUNK_TOKENS = 64
"""Steps are not made smaller than this when memory runs out."""

_NO_CONSUMER = -1


class NoMemoryError(KrulError):
    """There is no memory to recompute even a few tokens at a time."""


@dataclass
class ForwardCounters:
    """``head_tokens``: tokens of the first layer. ``rescued_requests``: a load failed, all was computed;
    their ``rescued_tokens`` should have been loaded.

    ``out_of_memory``: forwards of heads, or of a rescue, that ran out of memory. ``lost_requests``: SGLang
    ended them with an error, because they could be neither loaded nor computed.
    """

    head_tokens: int = 0
    rescued_requests: int = 0
    rescued_tokens: int = 0
    out_of_memory: int = 0
    lost_requests: int = 0


class RestoreForward:
    """Runs forwards of batches that have loads under way. On the scheduler's thread, on every rank alike.

    ``heads`` is None if this model's heads cannot be recomputed: then no plan has any, and a forward begins
    when all is loaded, since it is not known what such a model does with an error amid its layers.
    ``prefill`` computes what a failed load should have brought. ``chunk_tokens`` are computed in one forward
    at most. ``states`` are those of recurrent layers, if the model has any: what is computed instead of a
    load begins with the state before it. ``on_failure(rid, error, end)`` is called with each request whose
    load failed, and the end of what had come of it.
    """

    def __init__(
        self,
        loader: LayerWiseLoader,
        heads: RunHeads | None,
        prefill: RunPrefix,
        agreement: RankAgreement,
        traces: TraceLog,
        *,
        req_to_token: torch.Tensor,
        chunk_tokens: int,
        states: BoundaryStates | None = None,
        on_failure: Callable[[str, str, int], None] = lambda rid, error, end: None,
    ) -> None:
        self._on_failure = on_failure
        self.counters = ForwardCounters()
        self._loader = loader
        self._heads = heads
        self._prefill_anew = prefill
        self._agreement = agreement
        self._traces = traces
        self._req_to_token = req_to_token
        self._chunk_tokens = chunk_tokens
        self._states = states
        self._warned: set[str] = set()

    def run(self, schedule_batch: Any, forward: Callable[[], Any]) -> Any:
        """``forward()``, with what it needs of a prefix recomputed before it or loaded while it runs.

        ``schedule_batch`` is SGLang's, ready for its forward. If a load fails, or stops, its whole prefix is
        computed by the engine and the forward runs again: it writes the same slots, and nothing was sampled
        yet.
        """
        batch = self._loader.batch(schedule_batch.hicache_consumer_index)
        if batch is None:
            return self._prefill(schedule_batch, forward)
        prefixes = list(self._prefixes(schedule_batch, batch))
        trace = RestoreTrace(batch, is_mixed=len(prefixes) < len(schedule_batch.reqs))
        # Models that write KV themselves ask SGLang's pool for its buffers: heads wait for no load.
        self._loader.counter.set_consumer(_NO_CONSUMER)
        has_heads, failure = False, ""
        try:
            if self._agreement.num_ranks == 1:
                batch.check()
            self._recompute(prefixes, trace)
            has_heads = True
            if self._heads is None:
                _wait_for_all(batch)
            result = forward()
        except LoadFailedError as error:
            failure = str(error)
            # As text: somebody may keep log records, and with an exception all that its frames hold.
            logger.warning("krul: %s; %d request(s) are computed", failure, len(prefixes))
        except NoMemoryError as error:
            failure = str(error)
            self._warn_once("krul: %s; %s request(s) are tried without their loads", error, len(prefixes))
        if failure:
            # Outside of the handlers: with the exception everything that the failed forward held is gone.
            self._rescue(schedule_batch, batch, prefixes, failure, has_heads=has_heads)
            result = forward()
        trace.end = batch.clock.mark()
        self._traces.add(trace)
        return result

    def load_before(self, rid: str, load: Load, ready: Sequence[Any]) -> LoadBatch | None:
        """Load a request's prefix before any forward is made of it; None if that failed, on all ranks of
        ``agreement`` or none. Then nothing more is written to its slots.

        For ranks whose forwards begin and end together with those of others, which have requests of their
        own: one that computed a failed load would be alone in that forward, and wait for ever.
        ``ready``: see ``LayerWiseLoader.start``.
        """
        index = self._loader.start({rid: load}, ready)
        batch = self._loader.batch(index)
        assert batch is not None
        # Its own forward comes later, and with others'.
        trace = RestoreTrace(batch, is_mixed=True)
        try:
            _wait_for_all(batch)
        except LoadFailedError as error:
            logger.warning("krul: %s; 1 request(s) are computed", error)
            batch.abandon(is_refilled=False)
            self._on_failure(rid, str(error), load.device_tokens)
            self.counters.rescued_requests += 1
            self.counters.rescued_tokens += len(load.slots)
        trace.end = batch.clock.mark()
        self._traces.add(trace)
        return batch if self._loader.finish(index) else None

    def _prefill(self, schedule_batch: Any, forward: Callable[[], Any]) -> Any:
        """Run a forward that restores nothing; with a single request, time it for the engine's own cost."""
        self._traces.settle()
        lengths = schedule_batch.extend_lens
        if len(lengths) != 1 or lengths[0] < _MIN_TIMED_TOKENS:
            return forward()
        clock = StreamClock(Device.of(self._req_to_token))
        begin = clock.mark()
        result = forward()
        self._traces.add_prefill(lengths[0], schedule_batch.prefix_lens[0], begin, clock.mark())
        return result

    def _prefixes(self, schedule_batch: Any, batch: LoadBatch) -> Iterator[_Prefix]:
        slots = schedule_batch.req_pool_indices_cpu.tolist()
        for index, (req, request_slot) in enumerate(zip(schedule_batch.reqs, slots, strict=True)):
            load = batch.loads.get(req.rid)
            if load is not None:
                row = self._req_to_token[request_slot]
                yield _Prefix(req.rid, load, index, req.full_untruncated_fill_ids, row)

    def _recompute(self, prefixes: Sequence[_Prefix], trace: RestoreTrace) -> None:
        """Recompute the heads of the plans, in steps of at most ``chunk_tokens`` tokens for all together.

        Raises:
            NoMemoryError: there is not enough for the smallest step, or for the heads' indices. On every rank
                or none.
            LoadFailedError: the loads have failed meanwhile.
        """
        wanted = [prefix for prefix in prefixes if prefix.head_ends[0] > prefix.load.device_tokens]
        if not wanted:
            return
        recompute = self._heads
        assert recompute is not None, [prefix.head_ends for prefix in wanted]
        heads = self._heads_on_device(wanted)

        def on_layer(layer: int) -> None:
            trace.mark_head_layer(layer)
            # Of several ranks none may leave the others inside of a layer.
            if self._agreement.num_ranks == 1:
                trace.batch.check()

        def run(first: int, end: int) -> None:
            parts = [part for head in heads if (part := head.part(first, end)) is not None]
            recompute(parts, on_layer)

        self._in_steps(max(head.ends[0] - head.start for head in heads), len(heads), run)
        self.counters.head_tokens += sum(head.ends[0] - head.start for head in heads)

    def _heads_on_device(self, wanted: Sequence[_Prefix]) -> list[Head]:
        """The heads of the plans. With several ranks, all have theirs when one returns.

        Raises:
            NoMemoryError: on all ranks, if one has no memory for its indices.
        """
        heads: list[Head] = []
        mine: torch.Tensor | None = None
        try:
            heads = [prefix.head() for prefix in wanted]
            mine = torch.ones(1)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._count_out_of_memory(error)
        if self._agreement.gather(mine, (1,)) is None:
            raise NoMemoryError("no memory for the indices of recomputed tokens")
        return heads

    def _in_steps(self, num_tokens: int, num_requests: int, run: Callable[[int, int], None]) -> None:
        """Call ``run(first, end)`` for tokens 0 to ``num_tokens`` of so many requests, in steps of at most
        ``chunk_tokens`` for all together. When memory runs out, the rest goes on in smaller steps; all of it
        if the model has states, which a step that broke off has changed.

        Raises:
            NoMemoryError: there is not enough for the smallest step.
        """
        step = min(num_tokens, max(1, self._chunk_tokens // num_requests))
        first = 0
        while first < num_tokens:
            end = min(first + step, num_tokens)
            if self._has_memory(run, first, end):
                first = end
            elif step > 1 and step * num_requests > _MIN_CHUNK_TOKENS:
                step //= 2
                first = first if self._states is None else 0
            else:
                raise NoMemoryError(f"no memory to compute {step * num_requests} tokens")

    def _has_memory(self, run: Callable[[int, int], None], first: int, end: int) -> bool:
        """Run a step; False if memory ran out: then the caller writes the same slots again.

        With several ranks the error is raised: the others are inside of the same layer's collectives, and
        would wait there for this rank for ever. SGLang then ends the server, as when
        its own forward runs out of memory.
        """
        try:
            run(first, end)
        except Exception as error:
            if not is_out_of_memory(error) or self._agreement.num_ranks > 1:
                raise
            self._count_out_of_memory(error)
            return False
        return True

    def _count_out_of_memory(self, error: Exception) -> None:
        self.counters.out_of_memory += 1
        self._warn_once("krul: out of memory while computing a prefix; smaller steps follow: %s", error)

    def _warn_once(self, text: str, *values: object) -> None:
        """Log a warning once; later ones with the same text go to DEBUG, since counters count them."""
        level = logging.DEBUG if text in self._warned else logging.WARNING
        self._warned.add(text)
        logger.log(level, text, *map(str, values))

    def _rescue(
        self,
        schedule_batch: Any,
        batch: LoadBatch,
        prefixes: Sequence[_Prefix],
        failure: str,
        *,
        has_heads: bool,
    ) -> None:
        """Compute what a failed batch should have restored, after the tokens that are complete in all layers;
        if that fails, SGLang ends its requests. ``has_heads``: the heads of the plans are in the pool."""
        batch.abandon(is_refilled=False)
        complete = self._complete_tokens(batch, prefixes) if has_heads else [0] * len(prefixes)
        for prefix, done in zip(prefixes, complete, strict=True):
            self._on_failure(prefix.rid, failure, prefix.load.device_tokens + done)
        num_tokens = [len(prefix.load.slots) - done for prefix, done in zip(prefixes, complete, strict=True)]
        try:
            for prefix, done, num_missing in zip(prefixes, complete, num_tokens, strict=True):

                def run(first: int, end: int, prefix: _Prefix = prefix, done: int = done) -> None:
                    self._prefill_part(schedule_batch, prefix, done + first, done + end)

                self._in_steps(num_missing, 1, run)
        except NoMemoryError as error:
            self.counters.lost_requests += len(prefixes)
            self._warn_once("krul: %s; %s request(s) end with an error", error, len(prefixes))
            return
        batch.is_refilled = True
        self.counters.rescued_requests += len(prefixes)
        self.counters.rescued_tokens += sum(num_tokens)

    def _complete_tokens(self, batch: LoadBatch, prefixes: Sequence[_Prefix]) -> list[int]:
        """Of each prefix, how many tokens from its beginning a failed load has completed on every rank."""
        mine = torch.tensor([batch.salvaged.get(prefix.rid, 0) for prefix in prefixes], dtype=torch.float64)
        of_ranks = self._agreement.gather(mine, (len(prefixes),))
        assert of_ranks is not None
        return [int(least) for least in torch.stack(of_ranks).amin(0).tolist()]

    def _prefill_part(self, schedule_batch: Any, prefix: _Prefix, first: int, end: int) -> None:
        start, state = prefix.load.device_tokens, prefix.load.state
        if state is not None and first == 0:
            assert self._states is not None
            self._states.reset(state)
        self._prefill_anew(schedule_batch, prefix.index, start + first, start + end)


def _wait_for_all(batch: LoadBatch) -> None:
    """Make the current stream wait for all layers; raises LoadFailedError if one will not land."""
    for layer in range(batch.num_layers):
        batch.wait_layer(layer)


@dataclass(frozen=True, eq=False)
class _Prefix:
    """A request whose prefix is loaded. ``index``: its place in SGLang's batch; ``row``: its slots by
    position, as SGLang keeps them."""

    rid: str
    load: Load
    index: int
    fill_ids: Sequence[int]
    row: torch.Tensor

    @property
    def head_ends(self) -> tuple[int, ...]:
        """Where the plan's heads end, by layer."""
        return self.load.plan.head_ends

    def head(self) -> Head:
        start, end = self.load.device_tokens, self.head_ends[0]
        token_ids = Device.of(self.row).from_list(list(self.fill_ids[start:end]))
        return Head(token_ids, self.row[:end].long(), start, self.head_ends)
