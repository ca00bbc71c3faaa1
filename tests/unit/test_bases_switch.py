"""A server without bases stores natively until they are there; what is stored in other bases is a miss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.strategy.strategy import SUBSPACE
from krul_sglang.engine.restore.restore_path import RestorePath, ReturningRequest
from krul_sglang.engine.restore.waiting_leases import HeldLease, KeyRun
from tests.support.budget_builders import (
    BASES,
    MODEL,
    NUM_LAYERS,
    PAGE_SIZE,
    ROTARY,
    SHAPE,
    BudgetedServer,
    OtherRank,
)
from tests.support.planning_builders import HeadsPlanner, planning_of
from tests.support.subspace_builders import make_bases

LIMIT = 0.05
FIRST_PAGES, MORE_PAGES = 32, 8


@pytest.fixture
def server() -> Iterator[BudgetedServer]:
    server = BudgetedServer(LIMIT, has_bases=False)
    yield server
    server.close()


def codecs_of(server: BudgetedServer) -> list[str]:
    return [header.codec_params["codec"] for header in server.headers]


def differences(server: BudgetedServer) -> torch.Tensor:
    """By how much the KV of each token is off at most after the conversation has left and returned."""
    before = server.read_pool()
    server.leave_and_return()
    return torch.stack(
        [
            (true - restored).abs().amax((1, 2))
            for kv, came in zip(before, server.read_pool(), strict=True)
            for true, restored in ((kv.k, came.k), (kv.v, came.v))
        ]
    ).amax(0)


def test_turns_are_native_until_the_bases_are_there_and_then_stored_in_them(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    said = server.store_turn()
    assert (said["bases"], said["damage_factor"], said["last_damage"]) == (None, None, 0.0)
    server.compute(MORE_PAGES)
    server.store_turn()
    assert SUBSPACE not in codecs_of(server)
    server.learn()
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert said["bases"] == BASES.digest[:16]
    assert 0 < said["last_damage"] <= LIMIT
    assert [codec == SUBSPACE for codec in codecs_of(server)] == [False, False, True]
    num_native = (FIRST_PAGES + MORE_PAGES) * PAGE_SIZE
    off = differences(server)
    assert (off[:num_native] == 0).all()
    assert (off[num_native:] > 0).all()
    assert off.max() < 0.1 * max(kv.v.abs().max() for kv in server.read_pool())


def test_ranks_switch_at_the_turn_at_which_all_of_them_have_their_bases() -> None:
    other_has = False

    def answer(values: torch.Tensor | None) -> torch.Tensor | None:
        return torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64) if other_has else None

    server = BudgetedServer(LIMIT, agreement=OtherRank(answer))
    server.compute(FIRST_PAGES)
    server.store_turn()
    assert SUBSPACE not in codecs_of(server)
    other_has = True
    server.compute(MORE_PAGES)
    server.store_turn()
    assert [codec == SUBSPACE for codec in codecs_of(server)] == [False, True]
    server.close()


def test_the_first_probe_waits_for_the_bases(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    for _ in range(2):
        assert server.budget.wants_probe()
        server.budget.probe(server.path)
    assert server.prober.asked == []
    server.learn()
    server.store_turn()
    assert server.budget.wants_probe()
    server.budget.probe(server.path)
    assert len(server.prober.asked) == 1


def test_weights_that_change_before_the_bases_are_there_leave_the_server_native(
    server: BudgetedServer,
) -> None:
    server.budget.forget_model()
    server.learn()
    server.compute(FIRST_PAGES)
    server.store_turn()
    assert SUBSPACE not in codecs_of(server)


# ---- bases of another digest ----


def store_in_other_bases(server: BudgetedServer) -> None:
    """A conversation of this server is stored by another one, which has other bases."""
    mine, codec = server.bases.subspace, server.codec
    other = SubspaceCodec(make_bases(SHAPE, [2, 2], damage_factor=1.5), ROTARY, [RansCoder()])
    server.codec = SegmentCodec(SHAPE, NUM_LAYERS, ROTARY, subspace=other)
    server.bases.have(other, "another server's")
    server.decide_by(server.make_budget(LIMIT))
    server.compute(FIRST_PAGES)
    server.store_turn()
    assert codecs_of(server) == [SUBSPACE]
    server.bases.subspace, server.codec = mine, codec
    server.budget = server.make_budget(LIMIT)
    server.decide_by(server.budget)


def num_missing(server: BudgetedServer) -> int:
    return sum(map(len, server.store.find_missing(MODEL, server.keys)))


@pytest.mark.parametrize("has_bases", [True, False])
def test_a_returning_turn_in_other_bases_is_a_miss_and_stored_again(has_bases: bool) -> None:
    server = BudgetedServer(LIMIT, has_bases=has_bases)
    store_in_other_bases(server)
    unused = cast(Any, None)
    planning = planning_of(HeadsPlanner(lambda problem: (0,) * NUM_LAYERS), codec=server.codec)
    restore = RestorePath(None, planning, unused, unused, PAGE_SIZE, server.store.report_damage)
    lease = server.store.lease(MODEL, server.keys, server.path.token_ids)
    assert lease is not None
    held = HeldLease(KeyRun.of(server.keys), lease, 0.0)
    slots = torch.arange(len(server.slots))
    assert restore.plan_load(held, server.keys[0], slots, ReturningRequest(0, 1)) is None
    server.store.release(lease)
    assert planning.counters.undecodable == 1
    assert server.store.stats().undecodable_segments == 1
    assert num_missing(server) == FIRST_PAGES
    server.store_turn()
    assert codecs_of(server) == [SUBSPACE if has_bases else "segment"]
    assert bool((differences(server) == 0).all()) == (not has_bases)
    server.close()


def test_a_turn_that_continues_one_in_other_bases_has_it_stored_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The conversation stayed on this server's device, so nothing tried to load it."""
    server = BudgetedServer(LIMIT)
    store_in_other_bases(server)
    server.compute(MORE_PAGES)
    server.store_turn()
    # What the other one's segment would cost is nobody's business here: the new turn stays native.
    assert codecs_of(server) == ["segment"]
    assert num_missing(server) == FIRST_PAGES
    assert server.store.stats().undecodable_segments == 1
    server.compute(MORE_PAGES)
    server.store_turn()
    assert [codec == SUBSPACE for codec in codecs_of(server)] == [True, False, True]
    assert num_missing(server) == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    server.close()
