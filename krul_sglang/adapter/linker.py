"""Implements SGLang's cache linker on top of a krul store: lookups, loads, and turns to be stored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from krul_backend.codec.pairs.selectors import make_selector
from krul_backend.codec.registry import ModelCodecs
from krul_backend.errors import HintError
from krul_backend.memory import format_bytes
from krul_backend.segment import ModelIdentity
from krul_backend.strategy.strategy import Precision
from krul_backend.tiers.common.hint import SessionName
from krul_sglang.adapter.probe_forward import ProbeForwards
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.config import AUTO
from krul_sglang.engine.budget.error_budget import ErrorBudget
from krul_sglang.engine.budget.probing import Prober
from krul_sglang.engine.budget.provenance import KvProvenance
from krul_sglang.engine.budget.served_bases import ServedBases
from krul_sglang.engine.common.asking import AskingThread, DaemonPatience, LatestAnswer
from krul_sglang.engine.common.moved_runs import RunIndex
from krul_sglang.engine.common.step_times import StepTimes, timed
from krul_sglang.engine.restore.draft_loads import DraftLoads
from krul_sglang.engine.restore.loading import LayerWiseLoader, Link
from krul_sglang.engine.restore.restore_path import RestorePath
from krul_sglang.engine.restore.returning_requests import ReturningRequests
from krul_sglang.engine.save.draft_saving import DraftSaver
from krul_sglang.engine.save.later_encoding import copy_room
from krul_sglang.engine.save.offload import MAX_LAYER_BYTES, TurnOffloader
from krul_sglang.engine.save.request_hints import RequestHints
from krul_sglang.engine.save.strategy_choice import Decision, SelectorDecision
from krul_sglang.engine.save.turn import StoredPath, Turn, TurnOwner

logger = logging.getLogger(__name__)

MAX_TENANTS_OF_SESSIONS = 10_000
"""How many named conversations of tenants are known to be closed by name."""

STATS_PATIENCE_S = 1.0
"""Longest wait for the daemon's counters of now; once it was late, its last ones are shown."""

MAX_AHEAD_SHARE = 2 / 3
"""Share of host memory that may be pinned for requests that wait, so that turns can still be stored."""


class KrulLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Moves KV between the device pool and a krul store for one rank's radix cache.

    Life of a request: ``lookup`` (each scheduling round; the first one has the store asked for a lease),
    ``load`` (plans what to do with the lease), ``start_layer_wise_loading``, ``finish_layer_wise_loading``:
    see ``returning``. When its turn ends, ``ended_turn``, which the ``offloader`` stores.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Iterable[Any],
        extra_config: Any,
        forward_stream: Any = None,
    ) -> None:
        """Called by SGLang's linker factory; ``params`` carry the ``KrulRuntime`` of this rank."""
        runtime = KrulRuntime.of(params)
        runtime.linker = self
        self.steps = StepTimes()
        self.model = runtime.model
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: params.token_to_kv_pool_allocator.get_kvcache()}
        self._pool = runtime.pool
        self._connection = runtime.connection
        self._agreement = runtime.restore_agreement
        self._store = runtime.connection.store
        self._capture = runtime.capture
        self._bases = runtime.bases
        self.codec = ModelCodecs(
            self._pool.shape,
            self._pool.num_layers,
            runtime.rotary,
            subspace=None if self._bases is None else self._bases.subspace,
        )
        self._budget: ErrorBudget | None = None
        if self._bases is not None or runtime.config.truncation_reuse:
            keys, _ = self._pool.buffers(0)
            runtime.provenance = KvProvenance(
                len(keys),
                self._pool.streams,
                lambda index: self.loader.batch(index),
                params.req_to_token_pool.req_to_token,
            )
        self.provenance = runtime.provenance
        if self._bases is not None:
            assert runtime.provenance is not None
            group = params.tp_cache_group if runtime.model.identity.tp_size > 1 else None
            self._budget = _error_budget(runtime, self.codec, self._bases, runtime.provenance, group)
        num_ranks = runtime.num_ranks_here
        stats = self._store.stats()
        capacity_bytes = stats.capacity_bytes // num_ranks
        self._decision: Decision = self._budget or _selector_decision(runtime, self.codec)
        self.offloader = TurnOffloader(
            self._store,
            self.model,
            self._pool,
            self.codec,
            self._decision,
            gate=runtime.gate,
            copy_room=partial(copy_room, self._store, capacity_bytes, num_ranks),
            keeps_copies=runtime.config.fast_copies == AUTO,
        )
        identity = self.model.identity
        self.runs = RunIndex(identity.page_size) if runtime.config.truncation_reuse else None
        self.offloader.runs = self.runs
        self.draft = runtime.draft
        if self.draft is not None:
            self.offloader.drafts = DraftSaver(self._store, self.draft, MAX_LAYER_BYTES)
        self.loader = LayerWiseLoader(
            self._store,
            self._pool,
            runtime.gate,
            patience_s=runtime.config.load_timeout,
            link=None if not runtime.config.link_mbs else Link(runtime.config.link_mbs),
            drafts=None if self.draft is None else DraftLoads(self._store, self.draft),
        )
        self._restore_path: RestorePath | None = None
        self.asking = AskingThread(DaemonPatience(), trial=self._store.stats)
        # Nothing that serves requests waits for statistics: those of a prompt daemon are those of now.
        self._stats = LatestAnswer(self.asking, self._store.stats, before=stats, longest_s=STATS_PATIENCE_S)
        max_ahead_bytes = int(capacity_bytes * MAX_AHEAD_SHARE)
        self.returning = ReturningRequests(
            self._store, self.model, self.asking, max_ahead_bytes=max_ahead_bytes
        )
        self.request_hints = RequestHints()
        self._tenant_of_session: dict[str, str] = {}
        shape = self._pool.shape
        token_bytes = (shape.k_token_bytes + shape.v_token_bytes) * self._pool.num_layers
        logger.info(
            "krul: rank %d/%d keeps about %s of KV on host memory (%d tokens of %s before compression)",
            identity.tp_rank,
            identity.tp_size,
            format_bytes(capacity_bytes),
            capacity_bytes // token_bytes,
            identity.name,
        )

    @property
    def layer_done_counter(self) -> Any:
        return self.loader.counter

    # ---- restore ----

    @timed
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The longest prefix, in pages, that can be restored, if any; so can every shorter one.

        ``returning`` expects the request.
        """
        self.steps.note_work()
        num_pages = self.returning.look_up(rid, transfers[0].keys)
        return [num_pages] if num_pages else []

    def attach_restore(self, restore_path: RestorePath) -> None:
        """Set what plans and runs restores. Called once, before the first request."""
        self._restore_path = restore_path
        self.returning.max_head_tokens = restore_path.planning.max_head_tokens
        self.offloader.writer.costs = restore_path.planning.costs
        if self.offloader.drafts is not None:
            self.offloader.drafts.writer.costs = restore_path.planning.costs

    @timed
    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load of the leased pages to ``transfers[0].device_indices``; False if SGLang computes them.

        SGLang computes them if that is faster, if what is stored cannot be read, or if nothing is leased.
        """
        keys, slots = transfers[0].keys, transfers[0].device_indices
        held = self.returning.take(rid)
        if held is None:
            return False
        prompt = self.returning.prompt(rid)
        try:
            assert self._restore_path is not None
            with self.steps.planning:
                load = self._restore_path.plan_load(
                    held,
                    keys[0],
                    slots,
                    device_tokens=prompt.device_tokens,
                    new_tokens=prompt.num_tokens - prompt.device_tokens - len(slots),
                )
            if load is not None:
                self.returning.make_room(held)
        except BaseException:
            self._store.release(held.lease)
            raise
        if load is None:
            self._store.release(held.lease)
            return False
        self.returning.queue_load(rid, load)
        return True

    def num_moved(self, rid: str) -> int:
        """How many tokens the queued load of ``rid`` brings back at another place than where they were
        stored."""
        load = self.returning.queued_load(rid)
        return 0 if load is None or load.moved is None else len(load.tail_slots(-1))

    @timed
    def start_layer_wise_loading(self) -> int:
        # Called before every prefill batch: events are recorded only when there is something to load.
        loads = self.returning.start_loads()
        if self._restore_path is not None:
            self._restore_path.planning.start_batch()
        return self.loader.start(loads, self.record_offload_ready() if loads else ())

    @timed
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        has_landed = self.loader.finish(counter_index)
        if self._restore_path is not None:
            self._restore_path.traces.settle()
        return has_landed

    def cancel_queued_load(self, rid: str) -> bool:
        return self.returning.cancel_load(rid)

    @timed
    def end_lease(self, rid: str) -> None:
        """The lease of ``rid`` is not needed, or a load has it."""
        self.returning.end_lease(rid)

    @timed
    def release(self, rid: str) -> None:
        """Forget ``rid``: it has ended, or was aborted."""
        self.returning.release(rid)

    # ---- store ----

    def note_draft(self, forward: Any) -> None:
        """Note of which tokens of a forward (SGLang's batch) the draft model has, or will have, KV."""
        assert self.draft is not None
        batch = None
        if forward.forward_mode.is_extend_without_speculative():
            batch = self.loader.batch(forward.hicache_consumer_index)
        if batch is not None:
            for rid, load in batch.loads.items():
                self.draft.note_restored(load.slots, batch.draft_tokens.get(rid, 0))
        if forward.out_cache_loc is not None:
            self.draft.note_computed(forward.out_cache_loc)

    def note_ended(self, req: Any) -> None:
        """Count how much of SGLang's request ``req``, whose turn has ended, was drafted rightly."""
        if self.draft is not None:
            self.draft.note_ended(
                is_restored=req.cached_tokens_host > 0,
                num_forwards=req.spec_verify_ct,
                num_accepted=req.spec_num_correct_drafts,
            )

    @timed
    def ended_turn(self, path: StoredPath, owner: TurnOwner) -> Turn:
        """A turn that has just ended, with what was captured of its attention, to be stored."""
        capture = self._capture
        attention = None if capture is None else capture.take(owner.rid, owner.request_slot)
        if owner.session is not None and owner.tenant:
            self._note_tenant(owner.session)
        return Turn(
            **vars(path),
            ready=self.record_offload_ready(),
            attention=attention,
            tenant=owner.tenant,
            session=owner.session,
            hint=owner.hint,
        )

    def end_session(self, name: str) -> None:
        """A client has closed the session of this name: its conversation is finished."""
        with suppress(HintError):
            self.offloader.end_session(SessionName(self._tenant_of_session.pop(name, ""), name))

    def _note_tenant(self, session: SessionName) -> None:
        """Remember whose a named conversation is: who closes it does not say."""
        self._tenant_of_session.pop(session.name, None)
        self._tenant_of_session[session.name] = session.tenant
        if len(self._tenant_of_session) > MAX_TENANTS_OF_SESSIONS:
            del self._tenant_of_session[next(iter(self._tenant_of_session))]

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Refuses: nodes know neither positions nor token ids. See ``KrulLinkerWrapper.offload_turn``."""
        raise RuntimeError(
            "KrulLinker stores whole turns; it needs KrulRadixCache (--radix-cache-backend krul)"
        )

    def num_completed_offloads(self) -> int:
        return self.offloader.num_completed()

    @timed
    def pop_completed_offload(self) -> bool:
        """Take the oldest completion, after waiting for it; False if its turn is to be submitted again."""
        return self.offloader.pop_completed()

    # ---- probes ----

    def wants_probe(self) -> bool:
        """Whether the turn just submitted should stay on the device for ``probe``. Asked once per turn."""
        return self._budget is not None and self._budget.wants_probe()

    def probe(self, path: StoredPath) -> None:
        """Measure what compression does to a stored conversation. On every rank at once, while idle."""
        if self._budget is None:
            return
        try:
            self._budget.probe(path, is_encoded=not self.offloader.num_pending())
        except Exception:
            logger.exception("krul: a probe failed; there will be no more")
            self._budget.stop_probes()

    # ---- lifecycle ----

    def reset(self) -> None:
        """Drop all stored KV of this model: after a flush it must not come back."""
        self.offloader.discard_all()
        self.loader.discard_all()
        self.returning.release_all()
        self._forget_runs()
        # If the weights have just changed, nothing was stored under their identity yet.
        if self.model.is_settled:
            self._clear(self._identities())
        self.model.empty_pool()

    def begin_weights_change(self) -> None:
        """Weights will be written: from here on nothing is stored or found under the old identity.

        Called on every rank at the same point, when no turn waits to be stored. Stored KV of the old weights
        stays for other servers that have them; it is dropped only if there can be no such server.
        """
        self.offloader.discard_all()
        was_settled = self.model.is_settled
        self.model.begin_change()
        if not was_settled:
            return  # the identity is new, and nothing has been stored under it
        before, was_lasting = self._identities(), self.model.is_lasting
        self.model.rename(self._agreement.broadcast(os.urandom(16)))
        self.returning.release_all()
        self._forget_runs()
        self._decision.forget_model()
        if not was_lasting:
            self._clear(before)

    def _identities(self) -> list[ModelIdentity]:
        """Those under which KV is stored: the model's, and its draft model's."""
        return [self.model.identity, *([] if self.draft is None else [self.draft.identity])]

    def _clear(self, identities: Iterable[ModelIdentity]) -> None:
        for identity in identities:
            self._store.clear(identity)

    def _forget_runs(self) -> None:
        if self.runs is not None:
            self.runs.clear()

    def end_weights_change(self, *, is_pool_empty: bool) -> None:
        """The weights are complete. ``is_pool_empty``: no KV of the old weights is on the device."""
        self.model.end_change(is_pool_empty=is_pool_empty)
        fingerprint = self.model.identity.fingerprint
        if self.model.is_settled:
            logger.info("krul: other weights; KV is stored as that of model %s", fingerprint)
        else:
            logger.warning(
                "krul: other weights, while the cache holds KV of the old ones: nothing is stored until "
                "/flush_cache"
            )

    def close(self) -> None:
        if self._bases is not None:
            self._bases.close()
        self.offloader.close()
        self.loader.close()
        self.returning.release_all()
        self.asking.close()
        self._connection.close()

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, as plain values: the store's, the offloader's and the loader's."""
        return {
            "tp_rank": self.model.identity.tp_rank,
            "tp_size": self.model.identity.tp_size,
            "weights": {
                "fingerprint": self.model.identity.fingerprint,
                "is_lasting": self.model.is_lasting,
                "is_settled": self.model.is_settled,
            },
            **asdict(self._stats()),
            "daemon": self._connection.as_dict(),
            "offload": {
                **asdict(self.offloader.counters),
                "pending": self.offloader.num_pending(),
                "waiting_copies": len(self.offloader.encoder),
                "waiting_bytes": self.offloader.encoder.waiting_bytes,
            },
            "compression": {
                **self.offloader.choices.as_dict(),
                "estimator": None if self._capture is None else {"name": "sampled"},
                "budget": None if self._budget is None else self._budget.as_dict(),
            },
            "draft": None if self.draft is None else self.draft.as_dict(),
            "load": {**asdict(self.loader.counters), "pending": self.loader.num_pending()},
            "restore": None if self._restore_path is None else self._restore_path.as_dict(),
            "waiting_leases": self.returning.num_leases,
            "scheduler": self.steps.as_dict(),
            "request_hints": self.request_hints.as_dict(),
        }

    def traces(self) -> list[dict[str, Any]]:
        """The last restores of this rank, see ``RestoreTrace.as_dict``."""
        return [] if self._restore_path is None else self._restore_path.traces.as_list()


def _selector_decision(runtime: KrulRuntime, codec: ModelCodecs) -> SelectorDecision:
    """For every strategy but ``subspace``."""
    config = runtime.config
    selector = make_selector(
        config.strategy, layer_ratio=config.r_l, gamma=config.gamma, precision=Precision(config.precision)
    )
    return SelectorDecision(
        selector,
        codec,
        runtime.pool,
        runtime.agreement,
        num_heads=0 if runtime.capture is None else runtime.capture.num_heads,
    )


def _error_budget(
    runtime: KrulRuntime,
    codec: ModelCodecs,
    bases: ServedBases,
    provenance: KvProvenance,
    group: Any | None,
) -> ErrorBudget:
    """For the strategy ``subspace``. ``group`` joins the ranks while they probe; None for a single rank."""
    config, pool, store = runtime.config, runtime.pool, runtime.connection.store
    forwards = ProbeForwards(runtime.model_runner, runtime.capture)
    return ErrorBudget(
        limit=config.error_budget,
        probe_share=config.probe_share,
        store=store,
        provenance=provenance,
        model=runtime.model,
        pool=pool,
        codec=codec,
        bases=bases,
        prober=Prober(forwards.prepare, pool, codec, store, runtime.model, group),
        agreement=runtime.agreement,
    )
