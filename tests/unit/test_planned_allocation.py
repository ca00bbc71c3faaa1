"""What is left out when a turn is stored, and what decoding costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest

from benchmarks.planners import FullRecomputePlanner
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import NO_DECODING, DecodeCost, RestoreCosts, RestorePlanner
from krul_backend.planner.planners import LocalSearchPlanner
from krul_backend.strategy.strategy import LayerGroups, Precision, StoredAs, Strategy
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.restore.restore_planning import PAIR_FACTOR, DecodeCosts
from krul_sglang.engine.save.allocation import EXPECTED_NEW_TOKENS, SpaceAllocation
from krul_sglang.engine.save.turn_encoding import EncodedRun, TokenRun, TurnEncoding
from tests.support.planning_builders import (
    ALONE,
    EACH_ALONE,
    NATIVE,
    NO_DECODE_COSTS,
    TOKEN_BYTES,
    FakeAgreement,
    HeadsPlanner,
    costs_of,
    planning_of,
)
from tests.support.segment_builders import BOUNDS, END, KINDS, NUM_LAYERS, PAGE_SIZE, Heads, lease_of, stored


class Planned(TurnEncoding):
    """An encoding of this kind and size, which encodes nothing."""

    def __init__(
        self,
        stored_as: StoredAs = NATIVE,
        layer_token_bytes: tuple[float, ...] = (1.0,) * NUM_LAYERS,
        last_use: tuple[int, ...] = EACH_ALONE,
    ) -> None:
        self.stored_as = stored_as
        self.layer_token_bytes = layer_token_bytes
        self.last_use = last_use

    def encode(self, index: int, run: TokenRun, pause: Callable[[], None]) -> EncodedRun:
        raise AssertionError("an allocation needs no encoded block")


def token(token_s: float) -> DecodeCost:
    return DecodeCost(0.0, token_s)


def each_token(*seconds: float) -> tuple[DecodeCost, ...]:
    return tuple(map(token, seconds))


def allocation_of(
    planner: RestorePlanner,
    agreement: RankAgreement = ALONE,
    decode_costs: DecodeCosts = NO_DECODE_COSTS,
    costs: RestoreCosts | None = None,
) -> SpaceAllocation:
    return SpaceAllocation(
        planner,
        OnlineCosts(costs_of() if costs is None else costs),
        decode_costs,
        agreement,
        page_size=PAGE_SIZE,
        max_head_tokens=24,
    )


@pytest.mark.parametrize(
    ("stored_as", "layer_token_bytes", "last_use", "decode"),
    [
        (KINDS["slerp-int4"], (4.0, 3.0, 3.0, 1.0), (3, 1, 2, 3), each_token(0.5, 0.0, 0.0, 0.5)),
        (
            LayerGroups((3, 4)),
            (6.0, 0.0, 0.0, 2.0),
            (2, 1, 2, 3),
            (NO_DECODING, NO_DECODING, DecodeCost(3.0, 0.75), DecodeCost(1.0, 0.25)),
        ),
    ],
)
def test_an_allocation_plans_the_return_of_the_whole_conversation(
    stored_as: StoredAs,
    layer_token_bytes: tuple[float, ...],
    last_use: tuple[int, ...],
    decode: tuple[DecodeCost, ...],
) -> None:
    planner = HeadsPlanner(lambda problem: (16, 8, 8, 0))
    decode_costs = DecodeCosts({}, {Precision.INT4: token(0.5)}, DecodeCost(1.0, 0.25))
    heads = allocation_of(planner, decode_costs=decode_costs).head_ends(
        40, Planned(stored_as, layer_token_bytes, last_use)
    )
    assert heads == (16, 8, 8, 0)
    (problem,) = planner.problems
    (run,) = problem.runs
    assert (problem.device_tokens, problem.total_tokens, problem.new_tokens) == (0, 40, EXPECTED_NEW_TOKENS)
    assert (problem.page_size, problem.max_head_tokens) == (PAGE_SIZE, 24)
    assert (run.first_token, run.end_token, run.stored_from) == (0, 40, (0,) * NUM_LAYERS)
    assert run.layer_token_bytes == layer_token_bytes
    assert run.last_use == last_use
    assert run.decode == decode


@pytest.mark.parametrize(
    "planner", [FullRecomputePlanner(), HeadsPlanner(lambda problem: (problem.total_tokens,) * NUM_LAYERS)]
)
def test_a_plan_that_loads_nothing_leaves_out_nothing(planner: RestorePlanner) -> None:
    assert allocation_of(planner).head_ends(20, Planned()) is None


@pytest.mark.parametrize(("decided", "expected"), [([16, 8, 8, 0], (16, 8, 8, 0)), (None, None)])
def test_the_first_ranks_allocation_is_everyones(decided: list[int] | None, expected: Heads | None) -> None:
    agreement = FakeAgreement(other_bounds=[], first_ranks=orjson.dumps(decided))
    allocation = allocation_of(HeadsPlanner(lambda problem: (4, 4, 4, 4)), agreement)
    assert allocation.head_ends(40, Planned()) == expected
    assert agreement.sent == [b"[4,4,4,4]"]


def test_what_an_allocation_leaves_out_can_be_restored_within_the_limit() -> None:
    """By the same planner at the same costs: what it would recompute then is all that is missing."""
    costs = costs_of(token_s=TOKEN_BYTES * 0.5, byte_s=1.0)
    heads = allocation_of(LocalSearchPlanner(), costs=costs).head_ends(
        END, Planned(layer_token_bytes=(float(TOKEN_BYTES),) * NUM_LAYERS)
    )
    assert heads is not None
    assert 0 < heads[0] <= 24
    planning = planning_of(LocalSearchPlanner(), costs=costs, max_head_tokens=24)
    segments = tuple(stored("native", start, end, heads) for start, end in pairwise(BOUNDS))
    slices = planning.open(lease_of(segments, 0), END)
    planned = planning.plan(slices, device_tokens=0, new_tokens=EXPECTED_NEW_TOKENS)
    assert planned is not None
    assert planned.plan.head_ends == heads


# ---- costs of decoding ----


def test_decoding_costs_follow_the_precision_and_the_pairs() -> None:
    costs = DecodeCosts(
        {Precision.NATIVE: token(0.0), Precision.INT8: token(2.0)}, {Precision.INT8: token(7.0)}
    )
    strategy = Strategy.from_pairs(4, [(1, 2)], Precision.INT8)
    assert strategy.decode_costs(costs) == each_token(2.0, 7.0, 7.0, 2.0)
    assert Strategy.from_pairs(4).decode_costs(costs) == (NO_DECODING,) * 4


def test_what_was_not_measured_costs_as_much_as_the_slowest() -> None:
    costs = DecodeCosts(
        {Precision.NATIVE: token(0.0), Precision.INT8: token(2.0), Precision.INT4: token(3.0)}, {}
    )
    assert Strategy.from_pairs(2, [], Precision.INT2).decode_costs(costs) == each_token(3.0, 3.0)


def test_a_pair_that_was_not_measured_costs_more_than_its_layers() -> None:
    costs = DecodeCosts(
        {Precision.NATIVE: token(0.0), Precision.INT8: token(2.0)}, {Precision.NATIVE: token(1.0)}
    )
    pair = Strategy.from_pairs(2, [(0, 1)], Precision.INT8)
    assert pair.decode_costs(costs) == each_token(2 * PAIR_FACTOR, 2 * PAIR_FACTOR)
    slow = DecodeCosts({Precision.INT8: DecodeCost(1.0, 2.0, 3.0)}, {})
    assert pair.decode_costs(slow)[0] == DecodeCost(PAIR_FACTOR, 2 * PAIR_FACTOR, 3 * PAIR_FACTOR)
    # Measured as nothing is measured.
    free = DecodeCosts({Precision.INT8: token(2.0)}, {Precision.INT8: token(0.0)})
    assert pair.decode_costs(free) == (NO_DECODING,) * 2


def test_the_last_layer_of_a_group_pays_for_all_of_them() -> None:
    """A group is decoded at once, from the shortest head on, which is that of its last layer."""
    costs = DecodeCosts({Precision.NATIVE: token(9.0)}, {}, DecodeCost(0.5, 2.0))
    first, second, third = (DecodeCost(0.5 * num_layers, 2.0 * num_layers) for num_layers in (3, 1, 2))
    none = NO_DECODING
    assert LayerGroups((3, 4, 6)).decode_costs(costs) == (none, none, first, second, none, third)
    assert LayerGroups((1, 4)).decode_costs(costs) == (second, none, none, first)


def test_a_load_that_the_forward_waits_for_is_decoded_at_its_own_cost() -> None:
    """On all cores, from the tiers from which the forward waits for a whole load."""
    serial = DecodeCosts({}, {}, DecodeCost(0.0, 1.0))
    decode_costs = DecodeCosts({}, {}, DecodeCost(0.0, 3.0), serial)
    assert decode_costs.of(is_serial=False) is decode_costs
    assert NO_DECODE_COSTS.of(is_serial=True) is NO_DECODE_COSTS
    for tiers, token_s in (((), 3.0), ((DRAM_TIER,), 1.0)):
        planner = HeadsPlanner(lambda problem: (0,) * NUM_LAYERS)
        costs = replace(costs_of(), serial_tiers=tiers)
        allocation_of(planner, decode_costs=decode_costs, costs=costs).head_ends(
            40, Planned(LayerGroups((NUM_LAYERS,)))
        )
        assert planner.problems[0].runs[0].decode[-1] == DecodeCost(0.0, NUM_LAYERS * token_s)


def test_without_any_measurement_decoding_is_free() -> None:
    assert (
        Strategy.from_pairs(2, [(0, 1)], Precision.INT4).decode_costs(NO_DECODE_COSTS) == (NO_DECODING,) * 2
    )
    assert LayerGroups((2,)).decode_costs(NO_DECODE_COSTS) == (NO_DECODING,) * 2
