"""Runs a forward with restored prefixes: heads, then the engine's forward; all again if a load fails."""

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
from krul_sglang.engine.restore.head_recompute import Head, HeadRecompute
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
    """``head_tokens``: tokens of the first layer. ``rescued_requests``: a load failed, all was recomputed.

    ``out_of_memory``: forwards of heads that ran out of memory. ``lost_requests``: SGLang ended them with an
    error, because they could be neither loaded nor recomputed.
    """

    head_tokens: int = 0
    rescued_requests: int = 0
    rescued_tokens: int = 0
    out_of_memory: int = 0
    lost_requests: int = 0


class RestoreForward:
    """Runs forwards of batches that have loads under way. On the scheduler's thread, on every rank alike.

    ``heads`` is None if this model's heads cannot be recomputed: then the engine deals with a failed load, by
    aborting the request. ``chunk_tokens`` are recomputed in one forward at most.
    """

    def __init__(
        self,
        loader: LayerWiseLoader,
        heads: HeadRecompute | None,
        agreement: RankAgreement,
        traces: TraceLog,
        *,
        req_to_token: torch.Tensor,
        chunk_tokens: int,
    ) -> None:
        self.counters = ForwardCounters()
        self._loader = loader
        self._heads = heads
        self._agreement = agreement
        self._traces = traces
        self._req_to_token = req_to_token
        self._chunk_tokens = chunk_tokens
        self._warned: set[str] = set()

    def run(self, schedule_batch: Any, forward: Callable[[], Any]) -> Any:
        """``forward()``, with what it needs of a prefix recomputed before it or loaded while it runs.

        ``schedule_batch`` is SGLang's, ready for its forward. If a load fails, or stops, its whole prefix is
        recomputed and the forward runs again: it writes the same slots, and nothing was sampled yet.
        """
        batch = self._loader.batch(schedule_batch.hicache_consumer_index)
        if batch is None:
            return self._prefill(schedule_batch, forward)
        prefixes = list(self._prefixes(schedule_batch, batch))
        trace = RestoreTrace(batch, is_mixed=len(prefixes) < len(schedule_batch.reqs))
        batch.agreement = self._agreement
        # Models that write KV themselves ask SGLang's pool for its buffers: heads wait for no load.
        self._loader.counter.set_consumer(_NO_CONSUMER)
        has_failed = False
        try:
            self._recompute(prefixes, _Prefix.head_ends, trace)
            result = forward()
        except LoadFailedError as error:
            has_failed = True
            # As text: somebody may keep log records, and with an exception all that its frames hold.
            logger.warning("krul: %s; %d request(s) are recomputed", str(error), len(prefixes))
        except NoMemoryError as error:
            has_failed = True
            self._warn_once("krul: %s; %s request(s) are tried without their loads", error, len(prefixes))
        if has_failed:
            # Outside of the handlers: with the exception everything that the failed forward held is gone.
            self._rescue(batch, prefixes, trace)
            result = forward()
        trace.end = batch.clock.mark()
        self._traces.add(trace)
        return result

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
        for req, request_slot in zip(
            schedule_batch.reqs, schedule_batch.req_pool_indices_cpu.tolist(), strict=True
        ):
            load = batch.loads.get(req.rid)
            if load is not None:
                yield _Prefix(load, req.full_untruncated_fill_ids, self._req_to_token[request_slot])

    def _recompute(
        self, prefixes: Sequence[_Prefix], ends_of: Callable[[_Prefix], tuple[int, ...]], trace: RestoreTrace
    ) -> None:
        """Recompute a head of each prefix, in steps of at most ``chunk_tokens`` tokens for all together.

        When memory runs out, the rest goes on in smaller steps.

        Raises:
            NoMemoryError: there is not enough for the smallest step, or for the heads' indices. On every rank
                or none.
        """
        wanted = [
            (prefix, ends) for prefix in prefixes if (ends := ends_of(prefix))[0] > prefix.load.device_tokens
        ]
        if self._heads is None or not wanted:
            return
        heads = self._heads_on_device(wanted)
        longest = max(head.ends[0] - head.start for head in heads)
        step = min(longest, max(1, self._chunk_tokens // len(heads)))
        first = 0
        while first < longest:
            parts = [part for head in heads if (part := head.part(first, first + step)) is not None]
            if self._run_heads(self._heads, parts, trace):
                first += step
            elif step > 1 and step * len(heads) > _MIN_CHUNK_TOKENS:
                step //= 2
            else:
                raise NoMemoryError(f"no memory to recompute {step * len(heads)} tokens")
        self.counters.head_tokens += sum(head.ends[0] - head.start for head in heads)

    def _heads_on_device(self, wanted: Sequence[tuple[_Prefix, tuple[int, ...]]]) -> list[Head]:
        """Heads up to the given ends. With several ranks, all have theirs when one returns.

        Raises:
            NoMemoryError: on all ranks, if one has no memory for its indices.
        """
        heads: list[Head] = []
        mine: torch.Tensor | None = None
        try:
            heads = [prefix.head(ends) for prefix, ends in wanted]
            mine = torch.ones(1)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._count_out_of_memory(error)
        if self._agreement.gather(mine, (1,)) is None:
            raise NoMemoryError("no memory for the indices of recomputed tokens")
        return heads

    def _run_heads(self, recompute: HeadRecompute, parts: Sequence[Head], trace: RestoreTrace) -> bool:
        """Recompute these parts; False if memory ran out: then the caller writes the same slots again.

        With several ranks the error is raised: the others are inside of the same layer's collectives, and
        would wait there for this rank for ever. SGLang then ends the server, as when
        its own forward runs out of memory.
        """
        try:
            recompute.run(parts, trace.mark_head_layer)
        except Exception as error:
            if not is_out_of_memory(error) or self._agreement.num_ranks > 1:
                raise
            self._count_out_of_memory(error)
            return False
        return True

    def _count_out_of_memory(self, error: Exception) -> None:
        self.counters.out_of_memory += 1
        self._warn_once("krul: out of memory while recomputing heads; smaller steps follow: %s", error)

    def _warn_once(self, text: str, *values: object) -> None:
        """Log a warning once; later ones with the same text go to DEBUG, since counters count them."""
        level = logging.DEBUG if text in self._warned else logging.WARNING
        self._warned.add(text)
        logger.log(level, text, *map(str, values))

    def _rescue(self, batch: LoadBatch, prefixes: Sequence[_Prefix], trace: RestoreTrace) -> None:
        """Recompute all that a failed batch should have loaded; if that fails, SGLang ends its requests."""
        batch.abandon(is_refilled=False)
        if self._heads is None:
            return
        try:
            self._recompute(prefixes, _Prefix.whole_ends, trace)
        except NoMemoryError as error:
            self.counters.lost_requests += len(prefixes)
            self._warn_once("krul: %s; %s request(s) end with an error", error, len(prefixes))
            return
        batch.is_refilled = True
        self.counters.rescued_requests += len(prefixes)
        self.counters.rescued_tokens += sum(len(prefix.load.slots) for prefix in prefixes)


@dataclass(frozen=True, eq=False)
class _Prefix:
    """A request whose prefix is loaded. ``row``: its slots by position, as SGLang keeps them."""

    load: Load
    fill_ids: Sequence[int]
    row: torch.Tensor

    def head_ends(self) -> tuple[int, ...]:
        """Where the plan's heads end, by layer."""
        return self.load.plan.head_ends

    def whole_ends(self) -> tuple[int, ...]:
        """The end of the whole prefix, in every layer."""
        end = self.load.device_tokens + len(self.load.slots)
        return (end,) * len(self.load.plan.head_ends)

    def head(self, ends: tuple[int, ...]) -> Head:
        start, end = self.load.device_tokens, ends[0]
        token_ids = Device.of(self.row).from_list(list(self.fill_ids[start:end]))
        return Head(token_ids, self.row[:end].long(), start, ends)
