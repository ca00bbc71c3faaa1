"""Calls krul where SGLang matches, loads and evicts prefixes, and stores turns when they end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.utils import get_storage_hash_str

from krul_sglang.adapter.linker import KrulLinker
from krul_sglang.adapter.request_spans import RequestSpans
from krul_sglang.engine.common.moved_runs import MOVED_TOKENS, MovedRun, moved_key
from krul_sglang.engine.restore import Prompt
from krul_sglang.engine.save import Job, StoredPath, Turn, TurnOwner, owner_of
from krul_sglang.hints import tenant_of

WORTH_WAITING_SHARE = 0.5
"""So long at most the scheduler waits for a turn that is being stored before its slots are given away, as a
share of the time that computing what would be lost takes."""

WEIGHTS_WAIT_S = 1.0
"""So long at most other weights wait for turns that are being stored."""


class _PendingTurn(NamedTuple):
    """A turn that is being stored. The first ``num_in_tree`` tokens lie in the tree under ``key``, the others
    in the record ``kv`` of a session."""

    job: Job
    key: RadixKey
    num_in_tree: int
    kv: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.job.turn.token_ids)


@dataclass(frozen=True)
class _ProbeCandidate:
    """A stored path that stays on the device, locked, until the server is idle or needs the memory."""

    node: Any
    lock_params: Any
    turn: StoredPath


class KrulLinkerWrapper(UnifiedCacheLinkerWrapper):  # type: ignore[misc]
    """Calls a ``KrulLinker`` where SGLang matches, loads and stores prefixes of one radix cache.

    A turn that ends is stored from its slots, which are not locked meanwhile (``pending_offloads``, in the
    order in which turns ended, and the same on all ranks). When SGLang takes slots of one, the KV is still in
    them until the next forward, which this thread launches. So what is worth it is waited for then, and the
    rest is revoked: what was read of those slots does not count.

    ``spans`` is None unless SGLang traces requests.
    """

    cache_linker: KrulLinker
    pending_offloads: list[_PendingTurn]
    spans: RequestSpans | None = None
    _probe_candidate: _ProbeCandidate | None = None

    def match(self, key: Any, req: Any, result: Any) -> Any:
        # A page of an EAGLE server's tree is named by its tokens and the one after it.
        key, _ = key.maybe_to_bigram_view(self.cache.tree_core.is_eagle)
        # The hit of an earlier round is out of date if the prefix on the device has changed.
        self.hit_markers.pop(req.rid, None)
        if self.spans is not None:
            self.spans.look_up(req)
        page_size = self.cache.page_size
        start = result.device_prefix_len
        end = len(key) // page_size * page_size
        self.cache_linker.reasons.look_up(
            req.rid,
            len(req.full_untruncated_fill_ids),
            start,
            lambda: (
                tenant_of(key.extra_key, key.cache_salt),
                np.asarray(key.token_ids[:end], dtype=np.int64),
            ),
        )
        if start < end:
            prompt = Prompt(
                len(req.full_untruncated_fill_ids),
                start,
                lambda: np.asarray(key.token_ids[start:end], dtype=np.int64),
                None if self.cache_linker.runs is None else partial(self._find_run, key, start, end),
            )
            self.cache_linker.returning.expect(req.rid, prompt)
        with self.cache_linker.steps.hooks:
            result = super().match(key, req, result)
        if req.rid not in self.hit_markers:
            # Not every rank found it in this round.
            self.cache_linker.returning.set_aside(req.rid)
        return result

    def _sync_restorable_prefix(self, restorable: list[int], *, num_pages: int, device_hit_pages: int) -> int:
        """The longest prefix that all ranks can restore, in pages.

        SGLang intersects sets of lengths, page by page. Here every length up to a rank's longest is one,
        unless the model has recurrent layers, or a pool of windows.
        """
        if self.cache_linker.states is not None:
            return int(
                super()._sync_restorable_prefix(
                    restorable, num_pages=num_pages, device_hit_pages=device_hit_pages
                )
            )
        longest = torch.tensor([min(max(restorable, default=0), num_pages)])
        self.cache._all_reduce_attn_groups(longest, torch.distributed.ReduceOp.MIN)
        common = int(longest.item())
        return common if common > device_hit_pages else 0

    def load_back(self, req: Any) -> tuple[int, Any]:
        state_before = None
        if self.cache_linker.states is not None and not self.cache_linker.has_windows:
            # SGLang's own copy of this state is called off when the load is queued.
            state_before = req.kv.mamba_cow_src_index
            hit = self.hit_markers.get(req.rid)
            if hit is not None and hit.device_hit_len and state_before is None:
                # A load that fails could not be computed from there.
                del self.hit_markers[req.rid]
        try:
            result: tuple[int, Any] = super().load_back(req)
            self.cache_linker.note_state_before(req.rid, state_before)
            setattr(req, MOVED_TOKENS, self.cache_linker.num_moved(req.rid))
            if self.spans is not None and self.cache_linker.returning.queued_load(req.rid) is not None:
                self.spans.plan(req)
            return result
        finally:
            # Anything the load did not take over (no slots free, load refused) is not needed any more.
            self.cache_linker.end_lease(req.rid)

    def _find_run(self, key: Any, start: int, end: int, num_found: int) -> MovedRun | None:
        """The stored run that tokens ``[start, end)`` of a prompt repeat, after its pages that are found as
        they are."""
        size, runs = self.cache.page_size, self.cache_linker.runs
        assert runs is not None
        first = start + num_found * size
        tokens = np.asarray(key.token_ids[first:end], dtype=np.int64)
        found = runs.find(tenant_of(key.extra_key, key.cache_salt), tokens)
        if found is None:
            return None
        begin = first + found.offset
        num_tokens = (found.end - found.offset) // size * size
        token_ids = tokens[found.offset : found.offset + num_tokens]
        page_keys = get_storage_hash_str(key[begin : begin + len(token_ids)], found.prior_key, page_size=size)
        return MovedRun(begin, begin - found.stored_at, page_keys, token_ids, start)

    def _named(self, path: StoredPath, extra_key: str | None, cache_salt: str | None) -> StoredPath:
        """The path as it is stored: pages computed on top of a moved run have keys of their own."""
        provenance = self.cache_linker.provenance
        first = None if provenance is None else provenance.first_moved(path.slots)
        if first is None:
            return path
        size = self.cache.page_size
        page = first // size
        keys = get_storage_hash_str(
            RadixKey(path.token_ids[page * size :].tolist(), extra_key, cache_salt=cache_salt),
            moved_key(path.page_keys[page - 1] if page else None, tenant_of(extra_key, cache_salt)),
            page_size=size,
        )
        return replace(path, page_keys=[*path.page_keys[:page], *keys], moved_from=page)

    def offload_nodes(self, node_ids: Sequence[Any]) -> None:
        """Does nothing: prompt chunks and split prefixes are not stored; the whole turn is, when it ends."""

    def offload_turn(self, req: Any) -> None:
        """Store the path that ``req``'s last insert ended on."""
        cache = self.cache
        node = req.last_node
        if node == cache.root_node_handle(req.extra_key) or not self.cache_linker.model.is_settled:
            return
        page_keys = [*cache.tree_core.get_prefix_hash_values(node), *cache.tree_core.get_hash_values(node)]
        num_tokens = len(page_keys) * cache.page_size
        token_ids = np.asarray(req.full_untruncated_fill_ids[:num_tokens], dtype=np.int64)
        slots = cache.path_device_indices(node)
        assert len(slots) == len(token_ids) == num_tokens, (len(slots), len(token_ids), num_tokens)
        path = self._named(StoredPath(page_keys, token_ids, slots), req.extra_key, req.cache_salt)
        owner = owner_of(req, self.cache_linker.request_hints)
        state_slots = self._state_slots(req, node, num_tokens, slots)
        turn = self.cache_linker.ended_turn(path, owner, state_slots)
        after = req.full_untruncated_fill_ids[num_tokens : num_tokens + 1] if cache.tree_core.is_eagle else ()
        self._submit(turn, req, num_tokens, after=after)
        if self._probe_candidate is None and self.cache_linker.wants_probe():
            self._probe_candidate = _ProbeCandidate(node, cache.inc_lock_ref(node).to_dec_params(), path)

    def _state_slots(self, req: Any, node: Any, num_tokens: int, slots: torch.Tensor) -> dict[int, Any]:
        """Find the slots of the states that the tree has after a turn's ``num_tokens`` tokens in ``slots``,
        where ``node`` ends, and after its prompt. Returns them by number of tokens."""
        states = self.cache_linker.states
        if states is None:
            return {}
        tree = self.cache.tree_core
        # With drafts from hidden states the token after a page names it, too: it must be the prompt's.
        size = self.cache.page_size
        num_prompt = (len(req.origin_input_ids) - tree.is_eagle) // size * size
        if states.window_pages is not None:
            allocator, longest = self.cache.token_to_kv_pool_allocator, states.window_pages * states.page_size
            return {
                end: allocator.translate_swa_indices_for_transfer(slots[max(0, end - longest) : end])
                for end in dict.fromkeys((num_tokens, num_prompt))
                if 0 < end <= num_tokens
            }
        ends = {num_tokens: node}
        if 0 < num_prompt < num_tokens:
            ids = array("q", req.origin_input_ids[:num_prompt])
            key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
            num_found, last, num_of_nodes = tree.match_full_device_prefix(key)
            if num_found == num_of_nodes == num_prompt:
                ends[num_prompt] = last
        found = {
            end: tree.get_component_device_value(last, ComponentType.MAMBA) for end, last in ends.items()
        }
        return {end: slot for end, slot in found.items() if slot is not None}

    def offload_session_turn(self, req: Any, slot: Any, owner: TurnOwner) -> None:
        """Store a turn that ended in a streaming session, whose KV SGLang keeps out of the tree.

        ``slot`` is the session's. Its record owns the KV that the tree does not, and may free it at any time:
        see ``finish_reading``.
        """
        cache = self.cache
        num_pages = slot.kv.kv_committed_len // cache.page_size
        if not num_pages or not self.cache_linker.model.is_settled:
            return
        num_tokens = num_pages * cache.page_size
        ids = (req.origin_input_ids + req.output_ids)[:num_tokens]
        page_keys = get_storage_hash_str(
            RadixKey(ids, req.extra_key, cache_salt=req.cache_salt), None, page_size=cache.page_size
        )
        row = cache.req_to_token_pool.req_to_token[slot.kv.req_pool_idx, :num_tokens]
        path = StoredPath(page_keys, np.asarray(ids, dtype=np.int64), row.to(torch.int64, copy=True))
        path = self._named(path, req.extra_key, req.cache_salt)
        num_in_tree = 0 if slot.lock is None else len(cache.path_device_indices(slot.lock.node))
        turn = self.cache_linker.ended_turn(path, owner, {})
        self._submit(turn, req, min(num_in_tree, num_tokens), kv=slot.kv)

    def _submit(
        self, turn: Turn, req: Any, num_in_tree: int, kv: Any = None, after: Sequence[int] = ()
    ) -> None:
        """Have a turn of ``req`` stored. ``after``: the token after it, if it names the last page, too."""
        ids = array("q", [*turn.token_ids.tolist(), *after])
        key = RadixKey(ids, req.extra_key, self.cache.tree_core.is_eagle, cache_salt=req.cache_salt)
        job = self.cache_linker.offloader.submit(turn)
        if self.spans is not None:
            job.future.add_done_callback(self.spans.saving(req, len(turn.token_ids)))
        self.pending_offloads.append(_PendingTurn(job, key, num_in_tree, kv))

    def commit_completed_offloads(self, successes: Sequence[bool]) -> None:
        """Forget turns that are not being stored any more, and note those that are stored."""
        done = self.pending_offloads[: len(successes)]
        del self.pending_offloads[: len(successes)]
        for pending, is_stored in zip(done, successes, strict=True):
            if is_stored:
                self.cache.look_ahead.note_stored(pending.job.turn.token_ids)

    def _release_pending_offloads(self) -> None:
        """Forget what was being stored: nothing of it is locked."""
        self.pending_offloads.clear()

    def finish_evicted(self) -> None:
        """Finish turns of which SGLang has just evicted something; none of it is overwritten yet."""
        tree = self.cache.tree_core
        lost = [
            (pending.job, num_left, pending.num_in_tree)
            for pending in self.pending_offloads
            if not pending.job.has_read.is_set()
            and (num_left := tree.match_full_device_prefix(pending.key)[0]) < pending.num_in_tree
        ]
        self._finish(lost)

    def finish_replaced(self, key: Any, start: int) -> None:
        """Finish turns that begin like ``key``, and whose slots from token ``start`` on SGLang has just given
        up for those of a request that computed the same tokens: windows before them had left its pool."""
        key, _ = key.maybe_to_bigram_view(self.cache.tree_core.is_eagle)
        lost = [
            (pending.job, start, pending.num_in_tree)
            for pending in self.pending_offloads
            if not pending.job.has_read.is_set()
            and (pending.key.extra_key, pending.key.cache_salt) == (key.extra_key, key.cache_salt)
            and start < min(pending.key.match(key), pending.num_in_tree)
        ]
        self._finish(lost)

    def finish_reading(self, kv: Any, ranges: Sequence[tuple[int, int]]) -> None:
        """Finish turns that still read these ranges of a session's record ``kv``, which will be freed."""
        reading = [
            (pending.job, pending.num_in_tree, pending.num_tokens)
            for pending in self.pending_offloads
            if pending.kv is kv and any(start < min(end, pending.num_tokens) for start, end in ranges)
        ]
        self._finish([] if kv is None else reading)

    def _finish(self, lost: Sequence[tuple[Job, int, int]]) -> None:
        """Wait until turns are read, as long as that is worth it, and revoke those that are not by then.

        ``lost``: of each the job, and between which tokens it loses its slots.
        """
        if not lost:
            return
        recompute_s = self.cache_linker.offloader.writer.recompute_s
        wait_s = WORTH_WAITING_SHARE * sum(recompute_s(start, end) for _, start, end in lost)
        self._finish_jobs([job for job, _, _ in lost], wait_s)

    def _finish_jobs(self, jobs: Sequence[Job], wait_s: float) -> None:
        """Wait so long until turns are read, for those that need the daemon only while it is prompt."""
        is_prompt = self.cache_linker.asking.patience.is_prompt
        self.cache_linker.offloader.finish(
            jobs, wait_s, is_store_prompt=is_prompt, make_room=self.cache_linker.returning.give_copies_back
        )

    def probe_when_idle(self) -> None:
        """Let the linker probe the path that is kept for it, if any. Called when no request runs or waits."""
        candidate = self._probe_candidate
        if candidate is None or self.pending_offloads:
            return
        if not self._on_all_ranks(not self.cache_linker.offloader.num_pending()):
            return
        try:
            self.cache_linker.probe(candidate.turn)
        finally:
            self.drop_probe_candidate()

    def _on_all_ranks(self, flag: bool) -> bool:
        """Whether a flag is set on every rank. All of them ask at the same point."""
        flags = torch.tensor([int(flag)])
        self.cache._all_reduce_attn_groups(flags, torch.distributed.ReduceOp.MIN)
        return bool(flags.item())

    def drop_probe_candidate(self) -> bool:
        """Unlock the path that is kept for a probe; False if there is none."""
        candidate, self._probe_candidate = self._probe_candidate, None
        if candidate is not None:
            self.cache.dec_lock_ref(candidate.node, candidate.lock_params)
        return candidate is not None

    def begin_weights_change(self) -> None:
        """Finish reading KV of the old weights, then give the model a new identity.

        Called on every rank before the engine writes weights, or releases their memory or the pool's.
        """
        self.drop_probe_candidate()
        self._finish_jobs([pending.job for pending in self.pending_offloads], WEIGHTS_WAIT_S)
        self.pending_offloads.clear()
        self.cache_linker.begin_weights_change()

    def reset(self) -> None:
        self.drop_probe_candidate()
        super().reset()

    def release_request(self, rid: str) -> None:
        super().release_request(rid)
        self.cache_linker.release(rid)
