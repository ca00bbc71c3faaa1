"""Implements SGLang's cache linker on top of a krul store: lookups, loads, and turns to be stored."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from krul_backend.errors import HintError
from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.hint import SessionName
from krul_sglang.adapter.minute_log import MinuteLog
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.engine.budget import show
from krul_sglang.engine.common.asking import LatestAnswer
from krul_sglang.engine.common.boundary_states import BoundaryStates, CopiedState, StateSlot
from krul_sglang.engine.common.step_times import StepTimes, timed
from krul_sglang.engine.restore import Load
from krul_sglang.engine.save import RequestHints, StoredPath, Turn, TurnOwner
from krul_sglang.reasons import Run

logger = logging.getLogger(__name__)

MAX_TENANTS_OF_SESSIONS = 10_000
"""How many named conversations of tenants are known to be closed by name."""

STATS_PATIENCE_S = 1.0
"""Longest wait for the daemon's counters of now; once it was late, its last ones are shown."""


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
        engine = KrulRuntime.of(params).engine
        setup = engine.setup
        self.steps = StepTimes()
        self.agreement = setup.restore_agreement
        self.tp_rank = setup.restore_agreement.rank
        self.model = setup.model
        self.forward_stream = forward_stream
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.pools = {PoolName.KV: pool}
        self.asking = engine.asking
        self.draft = setup.draft
        self.states = setup.states
        if self.has_windows:
            self.pools[PoolName.SWA] = pool.swa_kv_pool
        self.loader = engine.loader
        self.offloader = engine.offloader
        self.provenance = engine.provenance
        self.restore_path = engine.restore_path
        self.returning = engine.returning
        self.runs = engine.runs
        self.reasons = engine.reasons
        self.minute = MinuteLog(self.offloader.counters, self.loader.counters)
        self.request_hints = RequestHints()
        self._store = setup.connection.store
        self._setup = setup
        self._budget = engine.budget
        self._decision = engine.decision
        # Nothing that serves requests waits for statistics: those of a prompt daemon are those of now.
        self._stats = LatestAnswer(
            self.asking, self._store.stats, before=self._store.stats(), longest_s=STATS_PATIENCE_S
        )
        self._tenant_of_session: dict[str, str] = {}

    @property
    def has_windows(self) -> bool:
        """True if SGLang keeps the KV of layers with a sliding window in a pool of their own."""
        return self.states is not None and self.states.window_pages is not None

    @property
    def layer_done_counter(self) -> Any:
        return self.loader.counter

    # ---- restore ----

    @timed
    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """The longest prefix, in pages, that can be restored, if any; so can every shorter one.

        A model with recurrent layers, or a pool of windows, can go on after the returned numbers of pages
        alone. ``returning`` expects the request.
        """
        self.steps.note_work()
        num_pages = self.returning.look_up(rid, transfers[0].keys)
        boundaries = self.returning.boundaries(rid) if num_pages else ()
        return [num_pages] if boundaries is None else list(boundaries)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Queue a load of the leased pages to ``transfers[0].device_indices``; False if SGLang computes them.

        SGLang computes them if that is faster, if what is stored cannot be read, or if nothing is leased.
        With DP attention, or a pool of windows, the load is waited for, and SGLang computes them, too, if it
        fails. ``transfers[1]`` has the slots of the state after them, if the model has states or windows.
        """
        load = self._planned_load(rid, transfers[0].keys, transfers[0].device_indices)
        if load is None:
            return False
        if self.states is not None:
            load = replace(load, state=StateSlot(transfers[1].device_indices.long()))
        if self._setup.loads_before_forwards:
            batch = self.restore_path.forward.load_before(rid, load, self.record_offload_ready())
            if batch is not None and self.draft is not None:
                self.draft.note_restored(load.slots, batch.draft_tokens.get(rid, 0))
            return batch is not None
        self.returning.queue_load(rid, load)
        return True

    @timed
    def _planned_load(self, rid: str, keys: Sequence[str], slots: torch.Tensor) -> Load | None:
        """The load of leased pages to ``slots`` (int64 ``[T]``), which has their lease; None if SGLang
        computes them."""
        held = self.returning.take(rid)
        if held is None:
            self.reasons.decline(rid, "given back")
            return None
        prompt = self.returning.prompt(rid)
        try:
            with self.steps.planning:
                load = self.restore_path.plan_load(
                    held,
                    keys[0],
                    slots,
                    device_tokens=prompt.device_tokens,
                    new_tokens=prompt.num_tokens - prompt.device_tokens - len(slots),
                    make_room=self.returning.make_room,
                )
        except BaseException:
            self._store.release(held.lease)
            raise
        if load is None:
            self._store.release(held.lease)
            self.reasons.decline(rid, self.restore_path.planning.declined)
            return None
        runs = [Run(reader.first_token, reader.end_token, reader.source.tier) for reader in load.readers]
        head_ends = load.plan.head_ends
        self.reasons.load(rid, runs, (head_ends[0], head_ends[-1]))
        logger.debug(
            "krul: request %s: tokens %d to %d are restored, up to %d as a head, planned in %.1f ms",
            rid,
            load.device_tokens,
            load.device_tokens + len(slots),
            head_ends[0],
            1e3 * load.planned_s,
        )
        return load

    def note_state_before(self, rid: str, slot: Any) -> None:
        """The tokens before the queued load of ``rid``, if any, have their state in ``slot`` (int64 ``[1]``,
        or None), which stays there until the load has ended."""
        load = self.returning.queued_load(rid)
        if load is not None and load.state is not None and slot is not None:
            self.returning.queue_load(rid, replace(load, state=replace(load.state, before=slot.long())))

    def num_moved(self, rid: str) -> int:
        """How many tokens the queued load of ``rid`` brings back at another place than where they were
        stored."""
        load = self.returning.queued_load(rid)
        return 0 if load is None or load.moved is None else len(load.tail_slots(-1))

    @timed
    def start_layer_wise_loading(self) -> int:
        # Called before every prefill batch: events are recorded only when there is something to load.
        loads = self.returning.start_loads()
        self.restore_path.planning.start_batch()
        return self.loader.start(loads, self.record_offload_ready() if loads else ())

    @timed
    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        has_landed = self.loader.finish(counter_index)
        self.restore_path.traces.settle()
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
        self.reasons.end(rid)

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
            for name, (meaning, value) in self.draft.gauges().items():
                show(f"draft_{name}", meaning, value, self._setup.start_agreement.rank)

    @timed
    def ended_turn(self, path: StoredPath, owner: TurnOwner, state_slots: Mapping[int, Any]) -> Turn:
        """A turn that has just ended, with what was captured of its attention, to be stored.

        ``state_slots`` (int64, see ``StateSlot``): where the states of recurrent layers, or windows, lie
        after so many tokens. They are copied, on the forward's stream, before SGLang gives the slots away.
        """
        states = {}
        if self.states is not None:
            for end, slot in state_slots.items():
                if (state := self._copied_state(self.states, slot.long())) is not None:
                    states[end] = state
        capture = self._setup.capture
        attention = None if capture is None else capture.take(owner.rid, owner.request_slot)
        if owner.session is not None and owner.tenant:
            self._note_tenant(owner.session)
        return Turn(
            **vars(path),
            model=self.model.identity,
            ready=self.record_offload_ready(),
            attention=attention,
            states=states,
            rid=owner.rid,
            tenant=owner.tenant,
            session=owner.session,
            hint=owner.hint,
        )

    def _copied_state(self, states: BoundaryStates, slot: Any) -> CopiedState | None:
        """Copy the state in ``slot`` after the forwards that were launched, and before those that will be."""
        stream, device = self.forward_stream, self._setup.pool.streams
        if stream is None:
            return states.copy(slot)
        device.wait_for(device.record(), stream)
        with device.on_stream(stream):
            return states.copy(slot)

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
        """Drop all stored KV of this model: after a flush it must not come back.

        A daemon that is late is not waited for: it is asked before any later lookup is.
        """
        self.offloader.discard_all()
        self.loader.discard_all()
        self.returning.release_all()
        self._forget_runs()
        self.reasons.lose("cleared")
        # If the weights have just changed, nothing was stored under their identity yet.
        if self.model.is_settled:
            self._clear(self._identities())
        self.model.empty_pool()

    def _clear(self, models: Sequence[ModelIdentity]) -> None:
        """Drop all that is stored of these models, and wait for that only briefly."""
        cleared = self.asking.ask(partial(self.offloader.clear, models))
        cleared.wait(self.asking.patience, STATS_PATIENCE_S)

    def begin_weights_change(self) -> None:
        """Weights will be written: from here on nothing is stored or found under the old identity.

        Called on every rank at the same point, when turns that wait have been read or are revoked. Stored KV
        of the old weights stays for other servers that have them, and turns are still stored for these; it is
        dropped only if there can be no such server.
        """
        was_lasting = self.model.is_lasting
        if was_lasting:
            self.offloader.forget_read()
        else:
            self.offloader.discard_all()
        was_settled = self.model.is_settled
        self.model.begin_change()
        if not was_settled:
            return  # the identity is new, and nothing has been stored under it
        before, was_lasting = self._identities(), self.model.is_lasting
        self.model.rename(self._setup.restore_agreement.broadcast(os.urandom(16)))
        self.returning.release_all()
        self._forget_runs()
        self._decision.forget_model()
        if not was_lasting:
            self._clear(before)

    def _identities(self) -> list[ModelIdentity]:
        """Those under which this rank stores KV and states: the model's, and its draft model's."""
        identities = [self.model.identity] if self._setup.stores else []
        if self.draft is not None and self.draft.stores:
            identities.append(self.draft.identity)
        return identities if self.states is None else [*identities, self.states.identity]

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
        if self._setup.bases is not None:
            self._setup.bases.close()
        self.offloader.close()
        self.loader.close()
        self.returning.release_all()
        self.asking.close()
        self._setup.connection.close()

    def stats(self) -> dict[str, Any]:
        """Counters of this rank, as plain values: the store's, the offloader's and the loader's."""
        return {
            "tp_rank": self.tp_rank,
            "tp_size": self._setup.restore_agreement.num_ranks,
            "weights": {
                "fingerprint": self.model.identity.fingerprint,
                "is_lasting": self.model.is_lasting,
                "is_settled": self.model.is_settled,
            },
            **asdict(self._stats()),
            "daemon": self._setup.connection.as_dict(),
            "offload": {
                **asdict(self.offloader.counters),
                "page_bytes": self.offloader.page_bytes,
                "pending": self.offloader.num_pending(),
                "waiting_copies": len(self.offloader.encoder),
                "waiting_bytes": self.offloader.encoder.waiting_bytes,
            },
            "compression": {
                **self.offloader.choices.as_dict(),
                "estimator": None if self._setup.capture is None else {"name": "sampled"},
                "budget": None if self._budget is None else self._budget.as_dict(),
            },
            "draft": None if self.draft is None else self.draft.as_dict(),
            "states": None if self.states is None else self.states.as_dict(),
            "load": {**asdict(self.loader.counters), "pending": self.loader.num_pending()},
            "restore": self.restore_path.as_dict(),
            "waiting_leases": self.returning.num_leases,
            "spared_lookups": self.returning.num_spared,
            "scheduler": self.steps.as_dict(),
            "request_hints": self.request_hints.as_dict(),
        }

    def traces(self) -> list[dict[str, Any]]:
        """The last restores of this rank, see ``RestoreTrace.as_dict``."""
        return self.restore_path.traces.as_list()
