"""A forward whose prefixes are being restored: heads first, then the engine's own forward, whatever fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from krul_sglang.engine.agreement import RankAgreement
from krul_sglang.engine.clock import StreamClock
from krul_sglang.engine.head_recompute import Head, HeadRecompute
from krul_sglang.engine.load_batch import Load, LoadBatch, LoadFailedError
from krul_sglang.engine.loading import LayerWiseLoader
from krul_sglang.engine.restore_trace import RestoreTrace, TraceLog

logger = logging.getLogger(__name__)

_MIN_TIMED_TOKENS = 32
"""Shorter prompts say more about what surrounds a forward than about its layers."""


@dataclass
class ForwardCounters:
    """``head_tokens``: tokens of the first layer. ``rescued_requests``: a load failed, all was recomputed."""

    head_tokens: int = 0
    rescued_requests: int = 0
    rescued_tokens: int = 0


class RestoreForward:
    """Runs forwards of batches that have loads under way. On the scheduler's thread, on every rank alike.

    ``heads`` is None if this model's heads cannot be recomputed: then a failed load is the engine's to deal
    with (it aborts the request). ``chunk_tokens`` are recomputed in one forward at most. ``skip_heads`` does
    not recompute them, so that a test can show that it would notice.
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
        skip_heads: bool = False,
    ) -> None:
        self.counters = ForwardCounters()
        self._loader = loader
        self._heads = heads
        self._agreement = agreement
        self._traces = traces
        self._req_to_token = req_to_token
        self._chunk_tokens = chunk_tokens
        self._skip_heads = skip_heads

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
        try:
            if not self._skip_heads:
                self._recompute([prefix.head() for prefix in prefixes], trace)
            self._agree(batch)
            result = forward()
        except LoadFailedError as error:
            logger.warning("krul: %s; %d request(s) are recomputed", error, len(prefixes))
            batch.abandon(is_refilled=self._heads is not None)
            if self._heads is not None:
                self._rescue(prefixes, trace)
            result = forward()
        trace.end = batch.clock.mark()
        self._traces.add(trace)
        return result

    def _prefill(self, schedule_batch: Any, forward: Callable[[], Any]) -> Any:
        """A forward that restores nothing; of one request it tells how long the engine's layers take."""
        self._traces.settle()
        lengths = schedule_batch.extend_lens
        if len(lengths) != 1 or lengths[0] < _MIN_TIMED_TOKENS:
            return forward()
        clock = StreamClock(self._req_to_token.device)
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

    def _recompute(self, heads: Sequence[Head], trace: RestoreTrace) -> None:
        """Recompute heads, so many tokens of each at a time that a forward stays small."""
        heads = [head for head in heads if head.ends[0] > head.start]
        if not heads or self._heads is None:
            return
        self.counters.head_tokens += sum(head.ends[0] - head.start for head in heads)
        chunk_tokens = max(1, self._chunk_tokens // len(heads))
        for first in range(0, max(head.ends[0] - head.start for head in heads), chunk_tokens):
            parts = [part for head in heads if (part := head.part(first, first + chunk_tokens)) is not None]
            self._heads.run(parts, trace.mark_head_layer)

    def _agree(self, batch: LoadBatch) -> None:
        """With several ranks: none begins a forward that another one cannot end.

        Raises:
            LoadFailedError: on all ranks, if the load of one of them will not land.
        """
        if self._agreement.num_ranks == 1:
            return
        error: LoadFailedError | None = None
        try:
            batch.wait_queued()
        except LoadFailedError as failed:
            error = failed
        has_landed = torch.tensor([error is None], dtype=torch.float64)
        of_ranks = self._agreement.gather(has_landed, (1,))
        assert of_ranks is not None
        if error is not None:
            raise error
        if not all(of_rank.item() for of_rank in of_ranks):
            raise LoadFailedError("loading failed on another rank")

    def _rescue(self, prefixes: Sequence[_Prefix], trace: RestoreTrace) -> None:
        self.counters.rescued_requests += len(prefixes)
        self.counters.rescued_tokens += sum(len(prefix.load.slots) for prefix in prefixes)
        self._recompute([prefix.whole() for prefix in prefixes], trace)


@dataclass(frozen=True, eq=False)
class _Prefix:
    """A request whose prefix is loaded. ``row``: its slots by position, as SGLang keeps them."""

    load: Load
    fill_ids: Sequence[int]
    row: torch.Tensor

    def head(self) -> Head:
        return self._head(self.load.plan.head_ends)

    def whole(self) -> Head:
        """Everything that the load was to bring, in every layer."""
        end = self.load.device_tokens + len(self.load.slots)
        return self._head((end,) * len(self.load.plan.head_ends))

    def _head(self, ends: tuple[int, ...]) -> Head:
        start, end, device = self.load.device_tokens, ends[0], self.load.slots.device
        token_ids = torch.tensor(list(self.fill_ids[start:end]), dtype=torch.int64)
        return Head(token_ids.to(device), self.row[:end].long(), start, ends)
