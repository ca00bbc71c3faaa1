"""A server without bases stores natively until they are there; what is stored in other bases is a miss."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.held_bases import MOST_BASES
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import SUBSPACE
from krul_sglang.engine.budget.probing import ProbeOutcome
from krul_sglang.engine.restore.held_lease import HeldLease, KeyRun
from krul_sglang.engine.restore.restore_path import RestorePath
from krul_sglang.engine.restore.restore_planning import RestorePlanning
from tests.support.budget_builders import BASES, MODEL, NUM_LAYERS, PAGE_SIZE, ROTARY, SHAPE, BudgetedServer
from tests.support.planning_builders import HeadsPlanner, planning_of
from tests.support.subspace_builders import make_bases, make_layers

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


def test_the_first_probe_waits_for_the_bases(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    for _ in range(2):
        # There is nothing to compare, and the next turn is wanted.
        assert server.budget.wants_probe()
        server.budget.probe(server.path)
    server.learn()
    server.store_turn()
    server.prober.outcome = ProbeOutcome(1e-3, 1e-3)
    assert server.budget.wants_probe()
    server.budget.probe(server.path)
    assert server.budget.num_probes == 1


def test_weights_that_change_before_the_bases_are_there_leave_the_server_native(
    server: BudgetedServer,
) -> None:
    server.budget.forget_model()
    server.learn()
    server.compute(FIRST_PAGES)
    server.store_turn()
    assert SUBSPACE not in codecs_of(server)


# ---- newer bases ----


def bases_of(server: BudgetedServer) -> list[str]:
    return [header.codec_params["bases"] for header in server.headers]


def variant(factor: float) -> SubspaceCodec:
    """Bases that the KV of the conversation lies in as well, but with so many times larger coefficients. The
    damage factor is the same number."""
    groups = (
        replace(
            basis,
            encoder=factor * basis.encoder,
            decoder=basis.decoder / factor,
            magnitudes=factor * basis.magnitudes,
        )
        for basis in make_bases(SHAPE, [2, 2]).groups
    )
    return SubspaceCodec(ModelBases(SHAPE, tuple(groups), factor), ROTARY)


def bring(server: BudgetedServer, subspace: SubspaceCodec) -> None:
    server.codec.add_bases(subspace)
    server.bases.have(subspace, "learned again")


def test_segments_in_old_and_new_bases_come_back_together() -> None:
    server, newer = BudgetedServer(LIMIT), variant(1.5)
    server.compute(FIRST_PAGES)
    server.store_turn()
    bring(server, newer)
    for _ in range(2):
        server.compute(MORE_PAGES)
        said = server.store_turn()
    assert said["bases"] == newer.bases.digest[:16]
    assert said["bases_held"] == 2
    old, new = BASES.digest, newer.bases.digest
    assert bases_of(server) == [old, new, new]
    off = differences(server)
    # The first token is stored as it is.
    assert (off[1:] > 0).all()
    assert off.max() < 0.1 * max(kv.v.abs().max() for kv in server.read_pool())
    server.close()


def test_with_newer_bases_the_text_is_measured_again_and_nothing_is_taken_for_cheaper() -> None:
    server = BudgetedServer(LIMIT)
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.prober.outcome = ProbeOutcome(1e-6, 1.0)
    server.budget.probe(server.path)
    assert server.budget.as_dict()["damage_factor"] == 1
    bring(server, variant(1.5))
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert said["damage_factor"] == 1.5
    server.close()


def test_the_bases_in_use_and_the_last_older_ones_are_held() -> None:
    codec = ModelCodecs(SHAPE, NUM_LAYERS, ROTARY, subspace=variant(1.0))
    for number in range(5):
        codec.add_bases(variant(2.0 + number), is_older=True)
    assert codec.bases.num_held == MOST_BASES
    held = [subspace.bases.damage_factor for subspace in codec.bases._held.values()]
    assert held == [4.0, 5.0, 6.0, 1.0]
    codec.add_bases(variant(9.0))
    assert [subspace.bases.damage_factor for subspace in codec.bases._held.values()] == [5.0, 6.0, 1.0, 9.0]


def test_bases_that_are_held_no_more_are_freed_with_the_decoders_that_used_them() -> None:
    first = variant(1.0)
    codec = ModelCodecs(SHAPE, NUM_LAYERS, ROTARY, subspace=first)
    layers = make_layers(BASES, 8, ROTARY)
    encoded = first.encode(layers.__getitem__, start_token=0, num_tokens=8, attention=None, max_damage=1.0)
    codec.open(encoded.params, start_token=0, num_tokens=8)
    bases = weakref.ref(first.bases)
    for number in range(MOST_BASES):
        assert bases() is not None
        first = variant(2.0 + number)
        codec.add_bases(first)
    assert bases() is None
    with pytest.raises(CodecError, match="which are not here"):
        codec.open(encoded.params, start_token=0, num_tokens=8)


# ---- bases of another digest ----


def store_in_other_bases(server: BudgetedServer) -> SubspaceCodec:
    """A conversation of this server is stored by another one, which has other bases. Returns these."""
    mine, codec = server.bases.subspace, server.codec
    other = SubspaceCodec(make_bases(SHAPE, [2, 2], damage_factor=1.5), ROTARY)
    server.codec = ModelCodecs(SHAPE, NUM_LAYERS, ROTARY, subspace=other)
    server.bases.have(other, "another server's")
    server.decide_by(server.make_budget(LIMIT))
    server.compute(FIRST_PAGES)
    server.store_turn()
    assert codecs_of(server) == [SUBSPACE]
    server.bases.subspace, server.codec = mine, codec
    server.budget = server.make_budget(LIMIT)
    server.decide_by(server.budget)
    return other


def num_missing(server: BudgetedServer) -> int:
    return sum(map(len, server.store.find_missing(MODEL, server.keys)))


@pytest.mark.parametrize("has_bases", [True, False])
def test_a_returning_turn_in_other_bases_is_a_miss_and_stored_again(has_bases: bool) -> None:
    server = BudgetedServer(LIMIT, has_bases=has_bases)
    store_in_other_bases(server)
    assert try_to_load(server).counters.undecodable == 1
    assert server.store.stats().undecodable_segments == 1
    assert num_missing(server) == FIRST_PAGES
    server.store_turn()
    assert codecs_of(server) == [SUBSPACE if has_bases else "native"]
    assert bool((differences(server) == 0).all()) == (not has_bases)
    server.close()


def try_to_load(server: BudgetedServer) -> RestorePlanning:
    """The conversation returns, and cannot be loaded."""
    unused = cast(Any, None)
    planning = planning_of(HeadsPlanner(lambda problem: (0,) * NUM_LAYERS), codec=server.codec)
    restore = RestorePath(unused, None, planning, unused, unused, PAGE_SIZE, server.store.report_damage)
    lease = server.store.lease(MODEL, server.keys, server.path.token_ids)
    assert lease is not None
    held = HeldLease(KeyRun.of(server.keys), server.keys, lambda: server.path.token_ids, lease, 0.0)
    slots = torch.arange(len(server.slots))
    assert restore.plan_load(held, server.keys[0], slots, device_tokens=0, new_tokens=1) is None
    server.store.release(lease)
    return planning


def test_a_segment_whose_bases_may_come_is_a_miss_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    server = BudgetedServer(LIMIT)
    other = store_in_other_bases(server)
    asked = list[str]()
    server.may_come = lambda digest: not asked.append(digest)
    planning = try_to_load(server)
    assert (planning.counters.undecodable, planning.declined) == (0, "bases")
    assert set(asked) == {other.bases.digest}
    server.compute(MORE_PAGES)
    server.store_turn()
    assert num_missing(server) == 0
    assert server.store.stats().undecodable_segments == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    server.codec.add_bases(other, is_older=True)
    off = differences(server)
    assert off.max() < 0.1 * max(kv.v.abs().max() for kv in server.read_pool())
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
    assert codecs_of(server) == ["native"]
    assert num_missing(server) == FIRST_PAGES
    assert server.store.stats().undecodable_segments == 1
    server.compute(MORE_PAGES)
    server.store_turn()
    assert [codec == SUBSPACE for codec in codecs_of(server)] == [True, False, True]
    assert num_missing(server) == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    server.close()
