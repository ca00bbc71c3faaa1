"""Turns the lease of a returning request into a load, or refuses it, and counts both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from krul_backend.codec.rotary import RotaryTable
from krul_backend.errors import CodecError
from krul_backend.planner import RestorePlan, RestoreTiming
from krul_backend.tiers.common.interface import (
    DRAM_TIER,
    DamageReason,
    Lease,
    SegmentSlice,
    SegmentTail,
    Tails,
)
from krul_sglang.engine.common.moved_runs import RECOMPUTED_TOKENS
from krul_sglang.engine.restore.held_lease import (
    RENEW_INTERVAL_S,
    Ahead,
    HeldLease,
    PlanAhead,
    Waiting,
    whole_segments,
)
from krul_sglang.engine.restore.load_batch import Load, MovedKeys
from krul_sglang.engine.restore.restore_forward import RestoreForward
from krul_sglang.engine.restore.restore_planning import RestorePlanning
from krul_sglang.engine.restore.restore_trace import TraceLog
from krul_sglang.engine.restore.returning_request import Prompt
from krul_sglang.engine.restore.segment_reader import SegmentReader, open_segments

logger = logging.getLogger(__name__)

LEAST_SAVED_SHARE = 0.05
"""What a waiting request could do without is read only if it returns sooner by at least this share."""


@dataclass(frozen=True)
class HeadProof:
    """The result of the proof at start: ``rows`` (one token's key or value of one head and layer) recomputed.

    ``rows_within_one_ulp`` of them differ from the prefill's by at most one unit in the last place, see
    ``start_proof.py``; ``max_relative_error`` is the 99th percentile of the rows' relative errors, and
    ``max_output_error`` that of what each layer adds to the hidden states. Of ``routed_rows`` (one token in
    one layer) it is known which experts they were routed to; ``routed_alike`` had the same in the prefill.
    """

    rows: int
    rows_within_one_ulp: int
    max_relative_error: float
    max_output_error: float
    routed_rows: int
    routed_alike: int


@dataclass(frozen=True)
class RestoreMode:
    """Says how a server restores, for its log and ``/server_info``. ``planner`` is the configured one, or
    "full-load" if heads cannot be recomputed: a prefix is loaded whole then, or computed. ``why`` says which
    of the two it is, and for what reason."""

    planner: str
    why: str


@dataclass(frozen=True, eq=False)
class RestorePath:
    """Holds what one rank restores with. Made before the first request, once the engine was measured.

    ``proof`` is None if heads cannot be recomputed. ``page_size`` is in tokens. ``report_damage`` is the
    store's: called for segments that cannot be decoded here, so that they are stored again. ``rotary`` is
    that of the model; None if it has none that can be undone: then no moved runs are leased. ``kernels`` says
    whose kernels recompute heads, decode groups in bases, and write decoded rows to their slots.
    """

    mode: RestoreMode
    proof: HeadProof | None
    planning: RestorePlanning
    forward: RestoreForward
    traces: TraceLog
    page_size: int
    report_damage: Callable[[int, DamageReason], object]
    rotary: RotaryTable | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)

    def plan_load(
        self,
        held: HeldLease,
        first_key: str,
        slots: torch.Tensor,
        *,
        device_tokens: int,
        new_tokens: int,
        make_room: Callable[[Lease, Tails], bool] = lambda lease, tails: True,
    ) -> Load | None:
        """Plan how to fill ``slots`` (int64 ``[T]``) with the leased pages from ``first_key`` on.

        ``device_tokens`` before them are in the pool, and ``new_tokens`` follow them. ``make_room`` is told
        what is wanted of the lease: see ``ReturningRequests``.

        Returns None if computing them is faster, or if they cannot be read: then the caller keeps the lease,
        and ``planning.declined`` says why.
        """
        self.planning.declined = "changed"
        if held.run.first_key != first_key or len(slots) > held.num_pages(self.page_size) * self.page_size:
            return None
        moved = None
        if held.moved is not None:
            assert self.rotary is not None
            moved = MovedKeys(self.rotary, held.moved.shift)
        num_tokens, shift, load_from = _place_of(held, device_tokens, len(slots))
        readers: list[SegmentReader] | None = None
        declined, is_here = "unplannable", held.lease.is_all_in_dram
        try:
            if num_tokens > 0:
                readers = self.planning.open(held.lease, num_tokens, shift)
        except CodecError as error:
            logger.warning("krul: a stored prefix cannot be read and is computed: %s", error)
            declined = "bases"
        # Called without readers, too: other ranks may have theirs, and wait for this one.
        planned = self.planning.plan(
            readers,
            device_tokens=device_tokens,
            new_tokens=new_tokens,
            load_from=load_from,
            has_room=lambda plan: not readers or is_here or make_room(held.lease, _tails_of(readers, plan)),
        )
        if readers is None:
            for segment_id in self.planning.find_undecodable(held.lease):
                self.report_damage(segment_id, "undecodable")
                declined = "unreadable"
            self.planning.declined = declined
        if planned is None or readers is None:
            return None
        return Load(held.lease, readers, slots, device_tokens, planned.plan, planned.forecast, moved, held)

    def plan_ahead(self, prompt: Prompt) -> PlanAhead:
        """Returns what tells which parts of a lease will be wanted by the load of a request that waits."""
        self.planning.ask_tiers()
        return partial(self._ahead_of, prompt)

    def _ahead_of(self, prompt: Prompt, held: HeldLease) -> Ahead:
        """First what lies below DRAM and is wanted by a plan that reads it from there; then what a plan wants
        for which all is in DRAM, if that is worth the reading. Whole segments if there is no plan.

        Any thread may call it.
        """
        if held.lease.is_all_in_dram:
            return Ahead((), ())
        num_slots = held.num_pages(self.page_size) * self.page_size
        num_tokens, shift, load_from = _place_of(held, prompt.device_tokens, num_slots)
        new_tokens = prompt.num_tokens - prompt.device_tokens - num_slots
        try:
            readers = open_segments(held.lease, self.planning.codec, num_tokens, shift)
        except CodecError:
            readers = []
        near = [reader.seen_as(_in_dram(reader.source)) for reader in readers]
        planned, planned_near = (
            self.planning.plan_alone(each, prompt.device_tokens, new_tokens, load_from) if each else None
            for each in (readers, near)
        )
        if planned is None or planned_near is None:
            return whole_segments(held)
        (problem, now), (_, best) = planned, planned_near
        goal = _tails_of(near, best) if best.end_s < (1 - LEAST_SAVED_SHARE) * now.end_s else []
        if now.is_recompute:
            return Ahead(goal, goal)
        tails = zip(readers, _tails_of(readers, now), strict=True)
        first = [None if reader.source.tier == DRAM_TIER else tail for reader, tail in tails]
        if not goal:
            return Ahead(first, first)
        _, read_s, _ = RestoreTiming(problem).work_s(best.head_ends)
        # That all has come is seen some steps later.
        lost_s, saved_s = read_s + RENEW_INTERVAL_S + best.end_s - now.end_s, now.end_s - best.end_s
        waiting = Waiting(read_s, lost_s, saved_s, problem.recompute_s - best.end_s)
        # What is worth waiting for is read in one piece: to complete a part takes room for both.
        return Ahead(goal if waiting.is_worth(num_others=1) else first, goal, waiting)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``/server_info``."""
        return {
            "mode": asdict(self.mode),
            "kernels": dict(self.kernels),
            "plans": asdict(self.planning.counters),
            "forecasts": self.traces.accuracy(),
            "forward": asdict(self.forward.counters),
            "costs": asdict(self.planning.costs.current()),
            "proof": None if self.proof is None else asdict(self.proof),
        }


def _place_of(held: HeldLease, device_tokens: int, num_slots: int) -> tuple[int, int, int | None]:
    """How many tokens of a lease are wanted for so many slots, how far they have moved, and the token before
    which all of them are computed (None: there is none)."""
    run = held.moved
    if run is None:
        return num_slots, 0, None
    return device_tokens + num_slots - run.start, run.shift, run.start + RECOMPUTED_TOKENS


def _tails_of(readers: Sequence[SegmentReader], plan: RestorePlan) -> list[SegmentTail]:
    for reader in readers:
        reader.begin(plan.head_ends, reader.slots)
    return [reader.tail() for reader in readers]


def _in_dram(piece: SegmentSlice) -> SegmentSlice:
    """The slice as it would be if DRAM had all that any tier has of it."""
    header = replace(piece.header, layer_first_token=piece.loadable_from)
    return replace(piece, tier=DRAM_TIER, header=header, lower=None)
