"""SGLang's unified radix cache, with turns instead of inserts as the unit of storing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    UnifiedCacheLinkerWrapper,
    _PendingOffload,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from krul_sglang.engine.linker import KrulLinker
from krul_sglang.engine.request_hints import owner_of
from krul_sglang.engine.restore import Returning
from krul_sglang.engine.turn import StoredPath


@dataclass(frozen=True)
class _ProbeCandidate:
    """A stored path that stays on the device, locked, until the server is idle or needs the memory."""

    node: Any
    lock_params: Any
    turn: StoredPath


class KrulLinkerWrapper(UnifiedCacheLinkerWrapper):  # type: ignore[misc]
    """Drives a ``KrulLinker`` for one radix cache."""

    cache_linker: KrulLinker
    _probe_candidate: _ProbeCandidate | None = None

    def match(self, key: Any, req: Any, result: Any) -> Any:
        # What an earlier round promised may not hold any more (the device prefix moved).
        self.hit_markers.pop(req.rid, None)
        page_size = self.cache.page_size
        start = result.device_prefix_len
        end = len(key) // page_size * page_size
        if start < end:
            self.cache_linker.expect_tokens(
                req.rid, lambda: np.asarray(key.token_ids[start:end], dtype=np.int32)
            )
        result = super().match(key, req, result)
        if req.rid not in self.hit_markers:
            self.cache_linker.release(req.rid)
        return result

    def load_back(self, req: Any) -> tuple[int, Any]:
        hit = self.hit_markers.get(req.rid)
        if hit is not None:
            prefix_len = hit.device_hit_len + len(hit.tail_hashes) * self.cache.page_size
            new_tokens = len(req.full_untruncated_fill_ids) - prefix_len
            self.cache_linker.expect_load(req.rid, Returning(hit.device_hit_len, new_tokens))
        try:
            return super().load_back(req)  # type: ignore[no-any-return]
        finally:
            # Anything the load did not take over (no slots free, load refused) is not needed any more.
            self.cache_linker.release(req.rid)

    def offload_nodes(self, node_ids: Sequence[Any]) -> None:
        """Inserts (prompt chunks, split prefixes) are not stored: the turn is, when it ends."""

    def offload_turn(self, req: Any) -> None:
        """Store the path that ``req``'s last insert ended on, and keep it locked until that is done."""
        cache = self.cache
        node = req.last_node
        if node == cache.root_node_handle(req.extra_key):
            return
        page_keys = [*cache.tree_core.get_prefix_hash_values(node), *cache.tree_core.get_hash_values(node)]
        num_tokens = len(page_keys) * cache.page_size
        token_ids = np.asarray(req.full_untruncated_fill_ids[:num_tokens], dtype=np.int32)
        slots = cache.path_device_indices(node)
        assert len(slots) == len(token_ids) == num_tokens, (len(slots), len(token_ids), num_tokens)
        lock_params = cache.inc_lock_ref(node).to_dec_params()
        try:
            self.cache_linker.offload_turn(StoredPath(page_keys, token_ids, slots), owner_of(req))
        except BaseException:
            cache.dec_lock_ref(node, lock_params)
            raise
        self.pending_offloads.append(_PendingOffload(node, lock_params, []))
        if self._probe_candidate is None and self.cache_linker.wants_probe():
            self._probe_candidate = _ProbeCandidate(
                node, cache.inc_lock_ref(node).to_dec_params(), StoredPath(page_keys, token_ids, slots)
            )

    def probe_when_idle(self) -> None:
        """Called when no request runs or waits: let the linker probe a stored path, if one is kept for it."""
        candidate = self._probe_candidate
        if candidate is not None and not self.pending_offloads:
            try:
                self.cache_linker.probe(candidate.turn)
            finally:
                self.drop_probe_candidate()

    def drop_probe_candidate(self) -> None:
        candidate, self._probe_candidate = self._probe_candidate, None
        if candidate is not None:
            self.cache.dec_lock_ref(candidate.node, candidate.lock_params)

    def reset(self) -> None:
        self.drop_probe_candidate()
        super().reset()

    @property
    def holds_memory(self) -> bool:
        """Whether paths are locked that nothing but krul needs."""
        return bool(self.pending_offloads) or self._probe_candidate is not None

    def settle_offloads(self) -> None:
        """Wait for every pending offload and unlock its nodes.

        Tensor-parallel ranks call this at the same point, so their queues stay in step: all are empty after.
        """
        self.cache_linker.wait_for_offloads()
        self.commit_completed_offloads(self.take_completed_offloads(len(self.pending_offloads)))

    def release_request(self, rid: str) -> None:
        super().release_request(rid)
        self.cache_linker.release(rid)


class KrulRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """The radix cache behind ``--radix-cache-backend krul``."""

    linker: KrulLinkerWrapper | None

    def init_cache_linker(self, cache_linker: KrulLinker) -> None:
        self.linker = KrulLinkerWrapper(self, cache_linker)

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert as SGLang does; at the end of a turn also store it."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if self.linker is not None and not self.disable and _turn_ended_well(req):
            self.linker.offload_turn(req)

    def evict(self, params: Any) -> Any:
        return self._evict_despite_offloads(params, super().evict)

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        evict = partial(super().evict_for_alloc, **kwargs)
        return self._evict_despite_offloads(params, evict)

    def _evict_despite_offloads(self, params: Any, evict: Callable[[Any], Any]) -> Any:
        """Evict; if turns that wait to be stored hold the memory that is needed, wait for them once.

        The alternative would be worse than a short wait: SGLang would retract or abort running requests.
        """
        result = evict(params)
        missing = params.num_tokens - result.num_tokens_evicted
        if missing > 0 and self.linker is not None and self.linker.holds_memory:
            self.linker.drop_probe_candidate()
            self.linker.settle_offloads()
            result.num_tokens_evicted += evict(EvictParams(num_tokens=missing)).num_tokens_evicted
        return result

    def probe_when_idle(self) -> None:
        """Called when no request runs or waits."""
        if self.linker is not None:
            self.linker.probe_when_idle()

    def krul_stats(self) -> dict[str, Any]:
        return self.krul_linker.stats()

    @property
    def krul_linker(self) -> KrulLinker:
        assert self.linker is not None
        return self.linker.cache_linker


def _turn_ended_well(req: Any) -> bool:
    """Whether this insert is the last one of a turn that the next turn can build on.

    Aborted requests are left alone: what made them abort may have touched their KV.
    """
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return req.finished() and not isinstance(req.finished_reason, FINISH_ABORT)
