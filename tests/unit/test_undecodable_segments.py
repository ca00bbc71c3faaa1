"""Stored segments whose parameters this engine does not know: a miss, and stored again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch

from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.store.interface import KVStore
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.dram.host_store import HostStore
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.restore.held_lease import HeldLease, KeyRun
from krul_sglang.engine.restore.load_batch import Load
from krul_sglang.engine.restore.restore_path import RestorePath
from tests.support.daemon_builders import serving
from tests.support.engine_builders import PATIENCE_S
from tests.support.fake_tier import FakeTier
from tests.support.planning_builders import (
    ALONE,
    FakeAgreement,
    HeadsPlanner,
    OneCannotRead,
    no_heads,
    planning_of,
)
from tests.support.segment_builders import BOUNDS, END, MODEL, NUM_LAYERS, PAGE_SIZE, store_in, stored

KEYS = tuple(f"page-{page}" for page in range(END // PAGE_SIZE))
TOKENS = np.arange(END, dtype=np.int64)
FIRST, SECOND, THIRD = (range(start // PAGE_SIZE, end // PAGE_SIZE) for start, end in pairwise(BOUNDS))

OLDER = {
    "codec": "segment",
    "version": 1,
    "group_size": 8,
    "are_keys_unrotated": True,
    "layers": [{"precision": "int4", "partner": partner} for partner in (2, 3, 0, 1)],
    "pairs": [{"sharing": "predicted", "map": "0" * 32}] * 2,
}
"""Parameters of a segment that an older release stored."""


class Rig:
    """``engine`` is the store as an engine sees it; what it commits goes to ``tier``, too."""

    def __init__(self, tiered: TieredStore, tier: FakeTier, engine: KVStore) -> None:
        self.tiered, self.tier, self.engine = tiered, tier, engine

    def put(self, kinds: Sequence[str], pages: Sequence[range]) -> None:
        """One native segment for each run of pages; those that are ``older`` have other parameters."""
        for kind, run in zip(kinds, pages, strict=True):
            segment = stored("native", run.start * PAGE_SIZE, run.stop * PAGE_SIZE)
            if kind == "older":
                manifest = dataclasses.replace(segment.manifest, codec_params=OLDER)
                segment = segment._replace(manifest=manifest)
            store_in(self.engine, segment)
        assert self.tiered.flush(PATIENCE_S)

    def plan_load(self, agreement: RankAgreement = ALONE) -> tuple[Load | None, RestorePath]:
        """What a request of the whole conversation would load."""
        planning = planning_of(HeadsPlanner(no_heads), agreement=agreement, tier_costs=self.engine.tier_costs)
        unused = cast(Any, None)
        restore = RestorePath(unused, None, planning, unused, unused, PAGE_SIZE, self.engine.report_damage)
        lease = self.engine.lease(MODEL, KEYS, TOKENS)
        assert lease is not None
        assert lease.num_pages == len(KEYS)
        held = HeldLease(KeyRun.of(KEYS), KEYS, lambda: TOKENS, lease, 0.0)
        load = restore.plan_load(held, KEYS[0], torch.arange(END), device_tokens=0, new_tokens=1)
        self.engine.release(lease)
        return load, restore

    def missing(self) -> list[range]:
        return self.engine.find_missing(MODEL, KEYS)


@pytest.fixture(params=["in process", "daemon"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    tier = FakeTier()
    host = HostStore(1 << 20)
    tiered = TieredStore(host, (tier,))
    if request.param == "in process":
        yield Rig(tiered, tier, tiered)
        tiered.close()
        return
    with serving(tiered) as runtime_dir:
        engine = DaemonStore(runtime_dir, model=MODEL, request_timeout_s=10.0)
        yield Rig(tiered, tier, engine)
        engine.close()
    assert (engine.counters.timeouts, engine.counters.failures, engine.counters.lost) == (0, 0, 0)


@pytest.mark.parametrize("is_in_dram", [True, False])
def test_they_are_a_miss_and_the_next_turn_stores_them_again(rig: Rig, is_in_dram: bool) -> None:
    rig.put(("older", "native", "older"), (FIRST, SECOND, THIRD))
    if not is_in_dram:
        rig.tiered.host.clear()
    assert rig.missing() == []
    load, restore = rig.plan_load()
    assert load is None
    assert restore.planning.declined == "unreadable"
    assert restore.planning.counters.undecodable == 2
    assert rig.tiered.stats().undecodable_segments == 2
    # In no tier, so that no tier brings them back.
    assert rig.missing() == [FIRST, THIRD]
    assert rig.tier.find_missing(MODEL, KEYS) == [FIRST, THIRD]
    rig.put(("native", "native"), rig.missing())
    load, _ = rig.plan_load()
    assert load is not None
    assert load.plan.head_ends == (0,) * NUM_LAYERS
    rig.tiered.host.clear()
    assert rig.missing() == [], "the tier has the new ones"


def test_a_rank_that_can_read_its_own_keeps_them(rig: Rig) -> None:
    class OtherCannotRead(FakeAgreement):
        def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> Any:
            return None

    rig.put(("native",), (range(len(KEYS)),))
    load, restore = rig.plan_load(OtherCannotRead(other_bounds=()))
    assert load is None
    assert (restore.planning.counters.refused, restore.planning.counters.undecodable) == (1, 0)
    assert rig.missing() == []


def test_a_rank_that_cannot_read_still_meets_the_others(rig: Rig) -> None:
    rig.put(("older",), (range(len(KEYS)),))
    agreement = OneCannotRead(other_bounds=[0.0] * NUM_LAYERS)
    load, _ = rig.plan_load(agreement)
    assert load is None
    assert (agreement.num_nothing, agreement.sent) == (1, [])
    assert rig.missing() == [range(len(KEYS))]
