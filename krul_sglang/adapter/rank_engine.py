"""Builds what one rank saves and restores with, complete, from what its start has found and measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from krul_backend.codec.pairs.selectors import make_selector
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.memory import format_bytes
from krul_backend.planner import OnlineCosts, make_planner
from krul_backend.strategy import Precision
from krul_sglang.adapter.engine_prefill import EnginePrefill
from krul_sglang.adapter.probe_forward import prepare_probe
from krul_sglang.adapter.unsupported import takes_media
from krul_sglang.config import AUTO, KrulConfig
from krul_sglang.engine.budget import ErrorBudget, KvProvenance, Prober, ServedBases
from krul_sglang.engine.capture import QueryCapture
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.asking import AskingThread, DaemonPatience, LatestAnswer
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.common.draft_kv import DraftKV
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.moved_runs import RunIndex
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.store_connection import StoreConnection
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore import (
    DecodeCosts,
    DraftLoads,
    HeadProof,
    LayerWiseLoader,
    Link,
    RestoreForward,
    RestoreMode,
    RestorePath,
    RestorePlanning,
    ReturningRequests,
    RunHeads,
    StateLoads,
    TraceLog,
)
from krul_sglang.engine.save import (
    MAX_LAYER_BYTES,
    CompanionSaver,
    Decision,
    DraftSaver,
    SelectorDecision,
    SpaceAllocation,
    StateSaver,
    TurnOffloader,
    copy_room,
)
from krul_sglang.reasons import Reasons

logger = logging.getLogger(__name__)

MAX_AHEAD_SHARE = 2 / 3
"""Share of host memory that may be pinned for requests that wait, so that turns can still be stored."""


@dataclass(frozen=True, eq=False)
class RankSetup:
    """What the start of a rank has found, before anything is measured.

    ``connection`` is this rank's way to the daemon; the linker closes it. ``capture`` is None if no attention
    is recorded, ``rotary`` if keys are stored with their rotary embedding, ``bases`` unless turns are stored
    within an error budget. ``start_agreement`` joins all ranks of the server, while they start. ``agreement``
    joins the threads that store turns on the ranks that share a request's heads, ``restore_agreement`` their
    scheduler threads, ``probe_group`` those while they probe (None for a single rank). ``num_ranks_here``
    share the host memory of this host. ``stores`` is False if another of them
    stores KV that is the same on all. ``draft`` is None without a draft model, ``states`` without recurrent
    layers and pools of windows. A forward computes at most ``chunk_tokens``.
    """

    config: KrulConfig
    gate: TransferGate
    model_runner: Any
    capture: QueryCapture | None
    model: ServedModel
    pool: DevicePool
    codec: ModelCodecs
    connection: StoreConnection
    num_ranks_here: int
    stores: bool
    draft: DraftKV | None
    states: BoundaryStates | None
    rotary: RotaryTable | None
    bases: ServedBases | None
    start_agreement: RankAgreement
    agreement: RankAgreement
    restore_agreement: RankAgreement
    probe_group: Any
    chunk_tokens: int

    @property
    def has_dp_attention(self) -> bool:
        """Whether groups of ranks have requests of their own, and enter every forward together."""
        return self.restore_agreement.num_ranks < self.start_agreement.num_ranks

    @property
    def loads_before_forwards(self) -> bool:
        """True if a load must have ended before SGLang plans the request's forward.

        With DP attention other ranks take part in that forward. With a pool of windows SGLang gives a
        restored prefix slots for its last window alone, in which a load that failed could not be computed.
        """
        return self.has_dp_attention or (self.states is not None and self.states.window_pages is not None)


@dataclass(frozen=True, eq=False)
class MeasuredRank:
    """What was proven and measured of a rank.

    ``heads`` and their ``proof`` are None if heads cannot be recomputed. ``add_bases`` lets segments in bases
    be opened, and says whether these are older ones; it measures what decoding costs in them. ``kernels``:
    see ``RestorePath``.
    """

    mode: RestoreMode
    proof: HeadProof | None
    heads: RunHeads | None
    costs: OnlineCosts
    decode_costs: DecodeCosts
    add_bases: Callable[[SubspaceCodec, bool], None]
    kernels: Mapping[str, str]


class RankEngine:
    """Holds what one rank saves and restores with. Every rank makes it at the same point of its start.

    ``provenance`` and ``budget`` are None unless turns are stored within an error budget (``provenance`` is
    there for moved runs, too), ``runs`` if none are moved.
    """

    def __init__(self, setup: RankSetup, measured: MeasuredRank) -> None:
        config, pool, model, store = setup.config, setup.pool, setup.model, setup.connection.store
        page_size = model.identity.page_size
        # What another server has stored without its first tokens is computed, if this one has no heads.
        max_head_tokens = 0 if measured.heads is None else config.head_token_limit(setup.chunk_tokens)
        capacity_bytes = store.stats().capacity_bytes // setup.num_ranks_here
        # Without heads any of them loads whole prefixes, the default one only where that is sooner.
        planner = make_planner(config.planner)
        self.setup = setup
        self.add_bases = measured.add_bases
        self.reasons = Reasons(
            page_size,
            lambda: model.identity.fingerprint,
            lambda: setup.connection.store.is_connected,
            has_states=setup.states is not None,
        )
        self.asking = AskingThread(DaemonPatience(), trial=store.stats)
        self.loader = LayerWiseLoader(
            store,
            pool,
            setup.gate,
            patience_s=config.load_timeout,
            link=None if not config.link_mbs else Link(config.link_mbs),
            agreement=setup.restore_agreement,
            drafts=None if setup.draft is None else DraftLoads(store, setup.draft),
            states=None if setup.states is None else StateLoads(store, setup.states),
        )
        self.provenance: KvProvenance | None = None
        if setup.bases is not None or config.truncation_reuse:
            keys, _ = pool.buffers(0)
            req_to_token = setup.model_runner.req_to_token_pool.req_to_token
            self.provenance = KvProvenance(len(keys), pool.streams, self.loader.batch, req_to_token)
        self.budget: ErrorBudget | None = None
        if setup.bases is not None:
            assert self.provenance is not None
            self.budget = _error_budget(setup, setup.bases, self.provenance)
        self.decision: Decision = self.budget or _selector_decision(setup)
        self.runs = RunIndex(page_size) if config.truncation_reuse else None
        allocation: SpaceAllocation | None = None
        if not config.store_full_tail and measured.heads is not None:
            allocation = SpaceAllocation(
                planner,
                measured.costs,
                measured.decode_costs,
                setup.agreement,
                page_size=page_size,
                max_head_tokens=max_head_tokens,
            )
        self.offloader = TurnOffloader(
            store,
            page_size,
            pool,
            setup.codec,
            self.decision,
            allocation=allocation,
            runs=self.runs,
            costs=measured.costs,
            gate=setup.gate,
            copy_room=partial(copy_room, store, capacity_bytes, setup.num_ranks_here),
            keeps_copies=config.fast_copies == AUTO,
            stores=setup.stores,
            companions=_companion_savers(setup, measured.costs),
            reasons=self.reasons,
        )
        planning = RestorePlanning(
            planner,
            measured.costs,
            measured.decode_costs,
            setup.codec,
            setup.restore_agreement,
            page_size=page_size,
            max_head_tokens=max_head_tokens,
            max_new_tokens=setup.chunk_tokens,
            tier_costs=LatestAnswer(self.asking, store.tier_costs, before=store.tier_costs()),
            state_bytes=0 if setup.states is None else setup.states.num_bytes,
        )
        traces = TraceLog(measured.costs, pool.num_layers)
        forward = RestoreForward(
            self.loader,
            measured.heads,
            EnginePrefill(setup.model_runner, setup.capture).run,
            setup.restore_agreement,
            traces,
            req_to_token=setup.model_runner.req_to_token_pool.req_to_token,
            chunk_tokens=setup.chunk_tokens,
            states=setup.states,
            on_failure=self.reasons.fail,
        )
        self.restore_path = RestorePath(
            measured.mode,
            measured.proof,
            planning,
            forward,
            traces,
            page_size,
            # Nobody waits for the answer.
            lambda segment_id, reason: self.asking.ask(
                lambda: store.report_damage(segment_id, reason), is_urgent=False
            ),
            setup.rotary,
            measured.kernels,
        )
        self.returning = ReturningRequests(
            store,
            model,
            self.asking,
            max_ahead_bytes=int(capacity_bytes * MAX_AHEAD_SHARE),
            max_head_tokens=max_head_tokens,
            reasons=self.reasons,
            plan_ahead=self.restore_path.plan_ahead,
            states=setup.states,
        )
        token_bytes = (pool.shape.k_token_bytes + pool.shape.v_token_bytes) * pool.num_layers
        logger.info(
            "krul: rank %d/%d keeps about %s of KV on host memory (%d tokens of %s before compression)",
            setup.start_agreement.rank,
            setup.start_agreement.num_ranks,
            format_bytes(capacity_bytes),
            capacity_bytes // token_bytes,
            model.identity.name,
        )


def _companion_savers(setup: RankSetup, costs: OnlineCosts) -> list[CompanionSaver]:
    savers: list[CompanionSaver] = []
    if setup.draft is not None and setup.draft.stores:
        savers.append(DraftSaver(setup.connection.store, setup.draft, MAX_LAYER_BYTES, costs))
    if setup.states is not None:
        savers.append(StateSaver(setup.connection.store, setup.states, setup.pool, costs))
    return savers


def _selector_decision(setup: RankSetup) -> SelectorDecision:
    """For every strategy but ``subspace``."""
    config = setup.config
    selector = make_selector(
        config.strategy, layer_ratio=config.r_l, gamma=config.gamma, precision=Precision(config.precision)
    )
    return SelectorDecision(
        selector,
        setup.codec,
        setup.pool,
        setup.agreement,
        num_heads=0 if setup.capture is None else setup.capture.num_heads,
    )


def _error_budget(setup: RankSetup, bases: ServedBases, provenance: KvProvenance) -> ErrorBudget:
    """For the strategy ``subspace``."""
    config, pool, store = setup.config, setup.pool, setup.connection.store
    prepare = partial(prepare_probe, setup.model_runner, setup.capture)
    model = setup.model_runner.model_config
    sees = takes_media(model)
    return ErrorBudget(
        limit=config.error_budget,
        # A probe would need the states of recurrent layers as they were amid the conversation; with DP
        # attention other ranks would have to enter it; and models that see images take other positions.
        probe_share=0.0 if setup.states is not None or setup.has_dp_attention or sees else config.probe_share,
        store=store,
        provenance=provenance,
        model=setup.model,
        pool=pool,
        codec=setup.codec,
        bases=bases,
        prober=Prober(prepare, pool, setup.codec, store, setup.model, setup.probe_group),
        vocabulary_size=model.vocab_size if sees else None,
    )
