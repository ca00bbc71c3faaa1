"""Extends SGLang's unified radix cache: it stores whole turns when they end, instead of every insert."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str

from krul_sglang.adapter.linker import KrulLinker
from krul_sglang.adapter.linker_wrapper import KrulLinkerWrapper
from krul_sglang.adapter.look_ahead import LookAhead
from krul_sglang.adapter.request_spans import RequestSpans
from krul_sglang.engine.capture import QueryCapture
from krul_sglang.engine.save import owner_of


class KrulRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """The radix cache behind ``--radix-cache-backend krul``."""

    linker: KrulLinkerWrapper

    def __init__(self, params: Any, capture: QueryCapture | None) -> None:
        """``capture`` records attention of requests; None if nothing is recorded."""
        super().__init__(params)
        self.capture = capture

    def init_cache_linker(self, cache_linker: KrulLinker) -> None:
        self.linker = KrulLinkerWrapper(self, cache_linker)
        self.look_ahead = LookAhead(self, cache_linker)
        # SGLang compiles how it names pages at the first use, which takes seconds: not at the first request.
        get_storage_hash_str(RadixKey(array("q", [0])), None, page_size=1)
        spans = RequestSpans.if_traced(cache_linker.tp_rank)
        if spans is not None:
            self.linker.spans = spans
            cache_linker.restore_path.traces.on_settled = spans.restored

    def check_hicache_events(self) -> None:
        """Begin a scheduling step: take note of turns that have been stored, where SGLang does so."""
        steps = self.linker.cache_linker.steps
        steps.begin_step()
        self.linker.cache_linker.minute.tick()
        with steps.hooks:
            super().check_hicache_events()

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert as SGLang does; at the end of a turn also store it."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        self._store_ended(req)

    def _store_ended(self, req: Any) -> None:
        """Store what the tree has of a request, if its turn has ended well."""
        if _turn_ended_well(req):
            with self.linker.cache_linker.steps.hooks:
                self.linker.cache_linker.note_ended(req)
                self.linker.offload_turn(req)

    def claim_kv_row(self, req: Any) -> bool:
        """Leave the KV of a streaming session's turn to the session, as SGLang does, and store the turn."""
        slot = self.session.borrowed_slot(req) if _turn_ended_well(req) else None
        owner = None if slot is None else owner_of(req, self.linker.cache_linker.request_hints)
        request_slot = req.kv.req_pool_idx
        is_claimed: bool = super().claim_kv_row(req)
        if is_claimed and owner is not None:
            with self.linker.cache_linker.steps.hooks:
                self.linker.offload_session_turn(req, slot, owner)
        if self.capture is not None and is_claimed:
            self.capture.forget(req.rid, request_slot)
        return is_claimed

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """Give up a request's row, as SGLang does, and what was recorded of it unless its turn is stored."""
        super().on_release(req, checkpointed=checkpointed)
        if not checkpointed and self.supports_mamba():
            # Accepted drafts lie behind the answer's end, and there is a state behind them alone: the tree
            # goes up to the prompt.
            self._store_ended(req)
        self.linker.cache_linker.release(req.rid)
        if self.capture is not None:
            self.capture.forget(req.rid, req.kv.req_pool_idx)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Free slots that no tree node owns; a session's after the turns that are stored from them."""
        with self.linker.cache_linker.steps.hooks:
            self.linker.finish_reading(kv, ranges)
        super().free_kv_row(kv, ranges)

    def insert(self, params: Any) -> Any:
        """Insert as SGLang does; finish turns whose slots it gives up for those that are inserted."""
        if not self.supports_swa():
            return super().insert(params)
        result = super().insert(replace(params, track_adopted_ranges=True))
        adopted = (result.adopted_ranges or {}).get(ComponentType.FULL, ())
        if adopted and self.linker.pending_offloads:
            with self.linker.cache_linker.steps.hooks:
                self.linker.finish_replaced(params.key, min(start for start, _ in adopted))
        return result

    def evict(self, params: Any) -> Any:
        return self._evict_and_finish(params, super().evict)

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        evict = partial(super().evict_for_alloc, **kwargs)
        return self._evict_and_finish(params, evict)

    def _evict_and_finish(self, params: Any, evict: Callable[[Any], Any]) -> Any:
        """Evict, also the path that is kept for a probe if that is needed; finish turns that lose slots."""
        result = evict(params)
        missing = params.num_tokens - result.num_tokens_evicted
        if missing > 0 and self.linker.drop_probe_candidate():
            result.num_tokens_evicted += evict(EvictParams(num_tokens=missing)).num_tokens_evicted
        with self.linker.cache_linker.steps.hooks:
            self.linker.finish_evicted()
        return result

    def end_weights_change(self) -> None:
        """Called on every rank when the weights are complete."""
        allocator = self.token_to_kv_pool_allocator
        # A pool of windows comes with one of KV, which SGLang counts apart.
        pool = allocator.full_attn_allocator if self.supports_swa() else allocator
        is_pool_empty = pool.available_size() // pool.page_size == pool.size // pool.page_size
        self.linker.cache_linker.end_weights_change(is_pool_empty=is_pool_empty)


def _turn_ended_well(req: Any) -> bool:
    """Whether this insert is the last one of a turn that the next turn can build on.

    The turns of aborted requests are not stored: what made them abort may have spoiled their KV.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return req.finished() and not isinstance(req.finished_reason, FINISH_ABORT)
