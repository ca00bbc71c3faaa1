"""Plans a restore: which part of a lease is loaded, which is recomputed, or that the engine computes all."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import orjson
import torch

from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.held_bases import AwaitedBasesError
from krul_backend.errors import CodecError
from krul_backend.memory import is_out_of_memory
from krul_backend.planner import (
    NO_DECODING,
    DecodeCost,
    OnlineCosts,
    RestorePlan,
    RestorePlanner,
    RestoreProblem,
    RestoreTiming,
    StoredRun,
    TierCost,
)
from krul_backend.strategy import LayerCosts, Precision
from krul_backend.tiers.common.interface import DRAM_TIER, Lease
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.restore.load_batch import Forecast
from krul_sglang.engine.restore.segment_reader import SegmentReader, open_segments

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIER_COSTS_AGE_S = 5.0

PAIR_FACTOR = 2.0
"""Assumed cost of a layer in a pair where none was measured: two blocks are read for it."""


class DecodeCosts(LayerCosts):
    """Tells what decoding costs, beyond what copying the bytes costs.

    ``single``: of a layer on its own, by precision; ``pair``: of a layer in a pair. ``group``: of a layer in
    a group that shares a subspace, None if it was not measured, which counts as nothing. A precision that was
    not measured takes the cost of one that was. ``serial``: of loads that the forward waits for, whose
    decoders have all cores; None if these cost the same.
    """

    def __init__(
        self,
        single: Mapping[Precision, DecodeCost],
        pair: Mapping[Precision, DecodeCost],
        group: DecodeCost | None = None,
        serial: DecodeCosts | None = None,
    ) -> None:
        self.single = dict(single)
        self.pair = dict(pair)
        self.group = group
        self.serial = serial
        self._slowest = max(self.single.values(), key=lambda cost: cost.token_s, default=NO_DECODING)

    def of(self, *, is_serial: bool) -> DecodeCosts:
        return self.serial if is_serial and self.serial is not None else self

    def layer(self, precision: Precision) -> DecodeCost:
        return self.single.get(precision, self._slowest)

    def paired_layer(self, precision: Precision) -> DecodeCost:
        measured = self.pair.get(precision)
        return self.layer(precision).times(PAIR_FACTOR) if measured is None else measured

    def grouped_layer(self) -> DecodeCost:
        return self.group or NO_DECODING


@dataclass(frozen=True)
class PlannedRestore:
    """A plan that loads something, and how long its parts should take."""

    plan: RestorePlan
    forecast: Forecast


@dataclass
class PlanCounters:
    """``loads`` plans had a tail in some layer, ``refused`` ones would have lost against recompute.

    ``head_tokens`` of the first layer and ``prefix_tokens`` of all planned loads, which should take
    ``saved_s`` less than computing these prefixes. ``undecodable`` segments were leased and reported, since
    nothing here can decode them. ``out_of_memory``: how often there was no memory to open or plan a load,
    which was refused then. ``without_room``: plans that did without what DRAM had no room for.
    ``moved_loads`` brought back ``moved_tokens`` at other positions, or after other text, than those that
    they were computed with.
    """

    loads: int = 0
    refused: int = 0
    head_tokens: int = 0
    prefix_tokens: int = 0
    saved_s: float = 0.0
    undecodable: int = 0
    out_of_memory: int = 0
    without_room: int = 0
    moved_loads: int = 0
    moved_tokens: int = 0


class RestorePlanning:
    """Plans each load of one rank; all ranks come to the same plan, which is the first rank's.

    ``agreement`` joins the scheduler threads of the ranks: each of them plans the same loads in the same
    order. ``max_head_tokens`` bounds the heads of one batch together. A forward computes ``max_new_tokens``
    at most: of a longer prompt only the first chunk waits for the restore. ``tier_costs()`` returns those of
    the tiers below DRAM, by name; called when something lies there. ``state_bytes`` come with each load
    beside its KV (``BoundaryStates``), from the tier that the end of the prefix lies in.
    """

    def __init__(
        self,
        planner: RestorePlanner,
        costs: OnlineCosts,
        decode_costs: DecodeCosts,
        codec: ModelCodecs,
        agreement: RankAgreement,
        *,
        page_size: int,
        max_head_tokens: int,
        max_new_tokens: int,
        tier_costs: Callable[[], Mapping[str, TierCost]],
        state_bytes: int = 0,
    ) -> None:
        self.counters = PlanCounters()
        # Why the last plan was none.
        self.declined = ""
        self.costs = costs
        self._planner = planner
        self._decode_costs = decode_costs
        self.codec = codec
        self._agreement = agreement
        self._page_size = page_size
        self._max_head_tokens = max_head_tokens
        self._max_new_tokens = max_new_tokens
        # What the requests of the batch take that were planned so far.
        self._batch_head_tokens = 0
        self._batch_compute_s = self._batch_load_s = 0.0
        self._tier_costs = tier_costs
        self._state_bytes = state_bytes
        self._known_tiers: frozenset[str] = frozenset({DRAM_TIER})
        self._tiers_asked_s = float("-inf")

    def open(self, lease: Lease, num_tokens: int, shift: int = 0) -> list[SegmentReader] | None:
        """See ``open_segments``; None without memory for it."""
        return self._unless_out_of_memory(lambda: open_segments(lease, self.codec, num_tokens, shift))

    def find_undecodable(self, lease: Lease) -> list[int]:
        """Ids of the leased segments that the codec cannot open; without those whose bases may come."""
        found: list[int] = []
        for source in lease.slices:
            header = source.header
            try:
                self.codec.open(
                    header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
                )
            except AwaitedBasesError:
                continue
            except CodecError:
                found.append(source.segment_id)
        self.counters.undecodable += len(found)
        return found

    def plan(
        self,
        readers: Sequence[SegmentReader] | None,
        *,
        device_tokens: int,
        new_tokens: int,
        load_from: int | None = None,
        has_room: Callable[[RestorePlan], bool] = lambda plan: True,
    ) -> PlannedRestore | None:
        """A plan for the leased tokens after ``device_tokens``; None when computing them is better.

        ``new_tokens`` follow the prefix in the request's own forward. ``readers`` are None on a rank that
        cannot read what it leased: then no rank loads it. If they read a moved run, what is before token
        ``load_from`` is computed in every layer. If on any rank DRAM has no room for what a plan
        wants from below (``has_room``), another one does with what DRAM has, if that is some of each segment.
        """
        request = device_tokens, new_tokens, load_from
        found, is_refused = self._agreed(readers, *request), False
        if (
            found is not None
            and readers is not None
            and not found[1].is_recompute
            and not self._agreement.holds_on_all(has_room(found[1]))
        ):
            self.counters.without_room += 1
            is_refused = True
            alone = [reader.seen_as(replace(reader.source, lower=None)) for reader in readers]
            is_here = all(reader.source.tier == DRAM_TIER for reader in readers)
            found = self._agreed(alone if is_here else None, *request)
        if found is None:
            self.counters.refused += 1
            self.declined = "no room" if is_refused else "unplannable"
            return None
        problem, plan = found
        total_tokens = problem.total_tokens
        if plan.is_recompute:
            self.counters.refused += 1
            self.declined = "no room" if is_refused else "sooner"
            self.costs.fade_overhead()
            self._batch_compute_s = problem.recompute_s
            return None
        head_tokens = plan.head_ends[0] - device_tokens
        head_s, load_s, decode_s = RestoreTiming(problem).work_s(plan.head_ends)
        # What comes beside the KV.
        load_s += problem.load_delay_s - self._batch_load_s
        recompute_s = problem.recompute_s - self._batch_compute_s
        self._batch_head_tokens += head_tokens
        self._batch_compute_s += head_s + problem.num_layers * problem.own_layer_s
        self._batch_load_s += load_s
        self.counters.loads += 1
        if load_from is not None:
            self.counters.moved_loads += 1
            self.counters.moved_tokens += total_tokens - plan.head_ends[-1]
        self.counters.head_tokens += head_tokens
        self.counters.prefix_tokens += total_tokens - device_tokens
        self.counters.saved_s += problem.recompute_s - plan.end_s - problem.costs.overhead_s
        overhead_s, own_layer_s = problem.costs.overhead_s, problem.own_layer_s
        return PlannedRestore(plan, Forecast(head_s, load_s, recompute_s, decode_s, overhead_s, own_layer_s))

    def plan_alone(
        self, readers: Sequence[SegmentReader], device_tokens: int, new_tokens: int, load_from: int | None
    ) -> tuple[RestoreProblem, RestorePlan] | None:
        """The plan that this rank would make for a request if nothing else ran; see ``plan``. None if what a
        tier costs is not known. Changes nothing, and may be called in any thread."""
        runs = self._plannable(readers, device_tokens, load_from)
        if runs is None:
            return None
        problem = self._problem(runs, readers[-1].end_token, device_tokens, new_tokens)
        return problem, self._planner.plan(problem)

    def start_batch(self) -> None:
        """Begin another batch: what was planned so far runs now."""
        self._batch_head_tokens = 0
        self._batch_compute_s = self._batch_load_s = 0.0

    def _unless_out_of_memory(self, compute: Callable[[], T]) -> T | None:
        """``compute()``, or None: the error would end the scheduler, and leave other ranks waiting."""
        try:
            return compute()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.counters.out_of_memory += 1
            level = logging.WARNING if self.counters.out_of_memory == 1 else logging.DEBUG
            logger.log(level, "krul: out of memory while planning a load; the engine computes it: %s", error)
            return None

    def _agreed(
        self,
        readers: Sequence[SegmentReader] | None,
        device_tokens: int,
        new_tokens: int,
        load_from: int | None,
    ) -> tuple[RestoreProblem, RestorePlan] | None:
        """The plan of all ranks after what the batch has so far; None if one of them cannot plan."""
        runs: tuple[StoredRun, ...] | None = None
        if readers is not None:
            if any(reader.source.tier != DRAM_TIER or reader.source.lower for reader in readers):
                self.ask_tiers()
            runs = self._unless_out_of_memory(partial(self._plannable, readers, device_tokens, load_from))
        shift = readers[0].shift if readers else 0
        runs = self._agreed_bounds(runs, (-1.0, 0.0) if load_from is None else (load_from, shift))
        if runs is None or readers is None:
            return None
        alone = self._problem(runs, readers[-1].end_token, device_tokens, new_tokens)
        problem = replace(
            alone,
            max_head_tokens=max(0, self._max_head_tokens - self._batch_head_tokens),
            compute_delay_s=self._batch_compute_s,
            load_delay_s=self._batch_load_s + alone.load_delay_s,
        )
        plan = self._unless_out_of_memory(lambda: self._planner.plan(problem))
        return problem, self._agreed_plan(RestorePlan.recompute(problem) if plan is None else plan)

    def _problem(
        self, runs: tuple[StoredRun, ...], total_tokens: int, device_tokens: int, new_tokens: int
    ) -> RestoreProblem:
        """That of a request alone."""
        costs = self.costs.current()
        return RestoreProblem(
            num_layers=self.codec.num_layers,
            page_size=self._page_size,
            device_tokens=device_tokens,
            total_tokens=total_tokens,
            new_tokens=max(1, min(new_tokens, self._max_new_tokens)),
            runs=runs,
            costs=costs,
            max_head_tokens=self._max_head_tokens,
            load_delay_s=costs.tiers[runs[-1].tier].load_s(self._state_bytes),
        )

    def _plannable(
        self, readers: Sequence[SegmentReader], device_tokens: int, load_from: int | None
    ) -> tuple[StoredRun, ...] | None:
        """The segments as the planner sees them; None if the cost of reading one's tier is not known."""
        tiers = {reader.source.tier for reader in readers}
        if not tiers <= self._known_tiers:
            return None
        decode_costs = self._decode_costs.of(is_serial=tiers <= {*self.costs.current().serial_tiers})
        runs = tuple(self._run(reader, decode_costs) for reader in readers)
        return runs if load_from is None else _of_moved(runs, device_tokens, load_from, self._page_size)

    def ask_tiers(self) -> None:
        """Have the costs of the tiers below DRAM known, and no older than some seconds."""
        now_s = time.monotonic()
        if now_s < self._tiers_asked_s + _TIER_COSTS_AGE_S:
            return
        self._tiers_asked_s = now_s
        for tier, cost in self._tier_costs().items():
            self.costs.set_tier(tier, cost, through=DRAM_TIER)
            self._known_tiers |= {tier}

    def _run(self, reader: SegmentReader, decode_costs: DecodeCosts) -> StoredRun:
        header, decoder = reader.source.header, reader.decoder
        first_token, end_token = reader.first_token, reader.end_token
        # A block is read to its end: of a segment that goes on otherwise, more than is wanted.
        num_read = header.end_token + reader.shift - first_token
        read_share = num_read / reader.num_tokens / header.num_tokens
        lower = reader.source.lower
        if lower is not None and lower.tier not in self._known_tiers:
            lower = None

        def decodable(layer_first_token: Sequence[int]) -> tuple[int, ...]:
            starts = decoder.decodable_from(layer_first_token)
            # Most often one token for all layers.
            bounded = {token: min(max(first_token, token + reader.shift), end_token) for token in {*starts}}
            return tuple(map(bounded.__getitem__, starts))

        return StoredRun(
            tier=reader.source.tier,
            first_token=first_token,
            end_token=end_token,
            layer_token_bytes=tuple(num_bytes * read_share for num_bytes in decoder.layer_num_bytes),
            decode=decoder.stored_as.decode_costs(decode_costs),
            last_use=decoder.last_use,
            stored_from=decodable(header.layer_first_token if lower is None else lower.layer_first_token),
            front_tier=None if lower is None else lower.tier,
            front_end=() if lower is None else decodable(header.layer_first_token),
        )

    def _agreed_bounds(
        self, runs: tuple[StoredRun, ...] | None, moved: tuple[float, float]
    ) -> tuple[StoredRun, ...] | None:
        """Move the starts of each layer up to where every rank can load it; None if a rank has no runs, or
        found its moved run elsewhere than the others (``moved``: from which token on, and its shift).

        One rank may have trimmed what another holds. Tokens are compared, not runs: ranks evict, and store
        again, on their own, so that the segments of one conversation need not begin at the same tokens.
        """
        if self._agreement.num_ranks == 1:
            return runs
        mine = None if runs is None else torch.tensor([*_loadable_from(runs), *moved], dtype=torch.float64)
        of_ranks = self._agreement.gather(mine, (self.codec.num_layers + 2,))
        if of_ranks is None or runs is None or any(of_rank[-2:].tolist() != [*moved] for of_rank in of_ranks):
            return None
        latest = torch.stack(of_ranks)[:, :-2].amax(0).long().tolist()
        return tuple(
            replace(
                run,
                stored_from=tuple(
                    min(max(token, bound), run.end_token)
                    for token, bound in zip(run.stored_from, latest, strict=True)
                ),
            )
            for run in runs
        )

    def _agreed_plan(self, plan: RestorePlan) -> RestorePlan:
        if self._agreement.num_ranks == 1:
            return plan
        head_ends, end_s, is_recompute = orjson.loads(
            self._agreement.broadcast(orjson.dumps([plan.head_ends, plan.end_s, plan.is_recompute]))
        )
        return RestorePlan(tuple(head_ends), end_s, is_recompute)


def _of_moved(
    runs: Sequence[StoredRun], device_tokens: int, load_from: int, page_size: int
) -> tuple[StoredRun, ...]:
    """The runs of a moved run as a planner takes them: from ``device_tokens`` on, and in whole pages.

    Nothing before ``load_from`` can be loaded.
    """
    bounds = [device_tokens, *(run.end_token // page_size * page_size for run in runs)]
    moved = []
    # Where a layer is stored up to the end of the run before, and from there on: one page may have tokens of
    # both.
    goes_on = [False] * len(runs[0].stored_from)
    for run, (first, end) in zip(runs, itertools.pairwise(bounds), strict=True):
        stored_from = tuple(
            first
            if is_whole and load_from <= token == run.first_token
            else min(max(first, -(-max(token, load_from) // page_size) * page_size), end)
            for token, is_whole in zip(run.stored_from, goes_on, strict=True)
        )
        goes_on = [token < run.end_token for token in run.stored_from]
        if first < end:
            moved.append(replace(run, first_token=first, end_token=end, stored_from=stored_from))
    return tuple(moved)


def _loadable_from(runs: Sequence[StoredRun]) -> list[int]:
    """``[L]``: for each layer the token from which on nothing of it was left out."""
    return [
        max(
            stored_from if stored_from > run.first_token else 0
            for run, stored_from in zip(runs, of_layer, strict=True)
        )
        for of_layer in zip(*(run.stored_from for run in runs), strict=True)
    ]
