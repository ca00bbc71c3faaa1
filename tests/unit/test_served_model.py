"""Weights change under a running rank: everything that names the model follows, and mixed KV has no name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from krul_backend.attention.rows import QueryRows, ReadKeys
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.daemon.client.client_session import DaemonConnection
from krul_backend.daemon.protocol.messages import MAX_MODELS
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import ComputeCost, RestoreCosts, TierCost
from krul_backend.segment import ModelIdentity
from krul_backend.strategy.strategy import LayerGroups, Strategy
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.adapter import hook_targets
from krul_sglang.adapter.factory import change_weights, use_idle_time
from krul_sglang.adapter.kv_pool import open_pool
from krul_sglang.adapter.linker import KrulLinker
from krul_sglang.adapter.rank_engine import MeasuredRank, RankEngine, RankSetup
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.config import KrulConfig
from krul_sglang.engine.budget.served_bases import ServedBases, TextDrift
from krul_sglang.engine.capture.turn_capture import CapturedTurn
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.draft_kv import DraftKV
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore.restore_path import RestoreMode
from krul_sglang.engine.restore.restore_planning import DecodeCosts
from krul_sglang.engine.restore.returning_request import Prompt
from krul_sglang.engine.save.turn import StoredPath, Turn, TurnOwner
from tests.support.engine_builders import make_store
from tests.support.segment_builders import MODEL
from tests.support.sglang_pool import NUM_LAYERS, PAGE_SIZE, make_pool
from tests.support.subspace_builders import make_bases

EPOCH, OTHER_EPOCH = b"\1" * 16, b"\2" * 16
NUM_PAGES = 3
NUM_TOKENS = NUM_PAGES * PAGE_SIZE
COMPUTE = ComputeCost(1.0, 1.0, 0.0)
COSTS = RestoreCosts(COMPUTE, COMPUTE, {DRAM_TIER: TierCost(0.0, 1.0)})


# ---- the identity ----


def test_other_weights_are_another_model_on_every_rank_and_at_every_change() -> None:
    model = ServedModel(MODEL)
    names = {model.identity.fingerprint}
    for epoch in (EPOCH, OTHER_EPOCH, EPOCH):
        model.rename(epoch)
        assert not model.is_lasting
        names.add(model.identity.fingerprint)
    assert len(names) == 4, "not even the same epoch leads back"
    of_ranks = [ServedModel(dataclasses.replace(MODEL, tp_rank=rank, tp_size=2)) for rank in range(2)]
    for of_rank in of_ranks:
        of_rank.rename(EPOCH)
    digests = {of_rank.identity.config_digest for of_rank in of_ranks}
    assert len(digests) == 1


def test_kv_is_of_one_model_again_when_the_pool_was_empty_after_the_change() -> None:
    model = ServedModel(MODEL)
    assert model.is_settled
    model.begin_change()
    model.empty_pool()
    assert not model.is_settled, "more weights may follow"
    model.end_change(is_pool_empty=False)
    assert not model.is_settled
    model.empty_pool()
    assert model.is_settled
    model.begin_change()
    model.end_change(is_pool_empty=True)
    assert model.is_settled


# ---- what holds it ----


class Rank:
    """A linker with its threads, on a pool and a store in this process."""

    def __init__(self, *, is_lasting: bool, strategy: str, has_draft: bool, num_data_ranks: int) -> None:
        pool = make_pool()
        self.store = make_store(1 << 20)
        self.start = ModelIdentity("m", "d" * 64, "float32", NUM_LAYERS, 2, 16, 16, PAGE_SIZE, 0, 1)
        self.model = ServedModel(self.start, is_lasting=is_lasting)
        alone = RankAgreement(None, 1)
        connection: Any = SimpleNamespace(store=self.store, close=self.store.close, as_dict=dict)
        allocator = SimpleNamespace(get_kvcache=lambda: pool)
        # It loads whatever it costs.
        options: dict[str, Any] = {"planner": "full-load", "probe_share": 1.0, "error_budget": 1e6}
        runtime = KrulRuntime(KrulConfig(strategy=strategy, **options))
        self.pool = opened = open_pool(pool)
        codec, bases = ModelCodecs(opened.shape, opened.num_layers, None), None
        if strategy == "subspace":
            subspace = SubspaceCodec(make_bases(opened.shape, [2, 1]), None)
            codec.add_bases(subspace)
            bases = ServedBases(TextDrift("m", 0))
            bases.have(subspace, "learned")
        draft: DraftKV | None = None
        if has_draft:
            own = dataclasses.replace(self.start, config_digest="e" * 64)
            draft = DraftKV(opened, own, self.model, "EAGLE")
        media = ("multimodal", "audio_model", "image_understandable_model", "audio_understandable_model")
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 1)),
            model_config=SimpleNamespace(**{f"is_{name}": False for name in media}),
        )
        setup = RankSetup(
            config=runtime.config,
            gate=runtime.gate,
            model_runner=runner,
            capture=None,
            model=self.model,
            pool=opened,
            codec=codec,
            connection=connection,
            num_ranks_here=1,
            rotary=None,
            bases=bases,
            start_agreement=RankAgreement(None, num_data_ranks),
            agreement=alone,
            restore_agreement=alone,
            stores=True,
            draft=draft,
            states=None,
            probe_group=None,
            chunk_tokens=1,
        )
        measured = MeasuredRank(
            mode=RestoreMode("full-load", "no heads"),
            proof=None,
            heads=None,
            costs=OnlineCosts(COSTS),
            decode_costs=DecodeCosts({}, {}),
            add_bases=lambda subspace, is_older: None,
            kernels={},
        )
        runtime.engine = RankEngine(setup, measured)
        params = SimpleNamespace(token_to_kv_pool_allocator=allocator)
        runtime.attach_to(params)
        self.linker = KrulLinker(None, params, components=(), extra_config=None)

    def store_turn(self, name: str) -> None:
        tokens, slots = np.arange(NUM_TOKENS, dtype=np.int64), torch.arange(NUM_TOKENS)
        path = StoredPath(keys_of(name), tokens, slots)
        self.linker.offloader.submit(self.linker.ended_turn(path, TurnOwner("r", 0), {}))
        assert self.linker.pop_completed_offload()

    def lookup(self, name: str, rid: str = "r") -> int:
        prompt = Prompt(NUM_TOKENS + 1, 0, lambda: np.arange(NUM_TOKENS, dtype=np.int64))
        self.linker.returning.expect(rid, prompt)
        transfer: Any = SimpleNamespace(keys=keys_of(name))
        return max(self.linker.lookup(rid, [transfer]), default=0)

    def num_missing(self, name: str, model: ModelIdentity) -> int:
        return sum(map(len, self.store.find_missing(model, keys_of(name))))


class Recorded(CapturedTurn):
    """The query of a turn's last token."""

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        raise AssertionError("nobody needs statistics")

    def rows(self, num_tokens: int) -> QueryRows:
        queries, kv_heads = torch.ones(NUM_LAYERS, 1, 2, 16), torch.arange(2)
        return QueryRows(queries, torch.tensor([num_tokens - 1]), kv_heads, 0.25)

    def _give_place_back(self) -> None:
        """Nothing is held."""


def keys_of(name: str) -> list[str]:
    return [f"{name}-{page}" for page in range(NUM_PAGES)]


@pytest.fixture
def make_rank() -> Iterator[Any]:
    ranks: list[Rank] = []

    def make(
        *, is_lasting: bool = True, strategy: str = "none", has_draft: bool = False, num_data_ranks: int = 1
    ) -> Rank:
        given = {"is_lasting": is_lasting, "strategy": strategy, "has_draft": has_draft}
        ranks.append(Rank(**given, num_data_ranks=num_data_ranks))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.linker.close()


@pytest.mark.parametrize("num_data_ranks", [1, 2])
def test_with_dp_attention_a_load_has_ended_before_its_batch(make_rank: Any, num_data_ranks: int) -> None:
    rank = make_rank(num_data_ranks=num_data_ranks)
    rank.store_turn("a")
    slots = torch.arange(40, 40 + NUM_TOKENS)
    assert rank.lookup("a") == NUM_PAGES
    assert rank.linker.load("r", [SimpleNamespace(keys=keys_of("a"), device_indices=slots)])
    rank.linker.end_lease("r")
    is_there = [
        torch.equal(buffer[slots], buffer[:NUM_TOKENS])
        for layer in range(NUM_LAYERS)
        for buffer in rank.pool.buffers(layer)
    ]
    index = rank.linker.start_layer_wise_loading()
    assert (index, all(is_there)) == ((0, False) if num_data_ranks == 1 else (-1, True))
    assert rank.linker.finish_layer_wise_loading(index)
    assert rank.store.stats().num_leases == len(rank.linker.returning) == 0


def test_a_changed_model_finds_nothing_of_before_and_stores_under_its_own_name(make_rank: Any) -> None:
    rank = make_rank()
    rank.store_turn("old")
    assert rank.lookup("old", "waits") == NUM_PAGES
    assert rank.store.stats().num_leases == 1
    rank.linker.begin_weights_change()
    assert rank.store.stats().num_leases == 0, "what a waiting request was promised is not what it needs"
    rank.linker.end_weights_change(is_pool_empty=True)
    assert rank.lookup("old", "waits") == 0
    assert rank.lookup("old") == 0
    rank.store_turn("old")
    assert rank.lookup("old", "returns") == NUM_PAGES
    now = rank.linker.stats()["weights"]
    assert now == {"fingerprint": rank.model.identity.fingerprint, "is_lasting": False, "is_settled": True}
    assert now["fingerprint"] != rank.start.fingerprint
    assert [rank.num_missing("old", model) for model in (rank.start, rank.model.identity)] == [0, 0]


def test_kv_of_a_checkpoint_stays_for_others_and_kv_that_nobody_can_have_goes(make_rank: Any) -> None:
    rank = make_rank()
    rank.store_turn("a")
    rank.linker.begin_weights_change()
    rank.linker.end_weights_change(is_pool_empty=True)
    rank.store_turn("b")
    second = rank.model.identity
    rank.linker.begin_weights_change()
    assert rank.num_missing("a", rank.start) == 0
    assert rank.num_missing("b", second) == NUM_PAGES
    assert rank.store.stats().num_segments == 1


def test_kv_of_unknown_weights_goes_with_them(make_rank: Any) -> None:
    rank = make_rank(is_lasting=False)
    rank.store_turn("a")
    rank.linker.begin_weights_change()
    assert rank.store.stats().num_segments == 0


def test_draft_kv_goes_with_the_targets(make_rank: Any) -> None:
    rank = make_rank(is_lasting=False, has_draft=True)
    rank.store_turn("a")
    first = rank.linker.draft.identity
    assert (rank.num_missing("a", first), rank.store.stats().num_segments) == (0, 2)
    rank.linker.begin_weights_change()
    rank.linker.end_weights_change(is_pool_empty=True)
    assert rank.store.stats().num_segments == 0
    rank.store_turn("a")
    assert rank.num_missing("a", first) == NUM_PAGES
    assert rank.num_missing("a", rank.linker.draft.identity) == 0
    rank.linker.reset()
    assert rank.store.stats().num_segments == 0


def test_a_flush_during_or_after_a_change_clears_no_other_server(make_rank: Any) -> None:
    rank = make_rank()
    rank.store_turn("a")
    rank.linker.begin_weights_change()
    rank.linker.reset()
    rank.linker.end_weights_change(is_pool_empty=False)
    assert not rank.model.is_settled
    rank.linker.reset()
    assert rank.model.is_settled
    assert rank.num_missing("a", rank.start) == 0
    rank.store_turn("b")
    rank.linker.reset()
    assert rank.num_missing("b", rank.model.identity) == NUM_PAGES
    assert rank.num_missing("a", rank.start) == 0


def test_updates_before_the_pool_was_emptied_share_one_name(make_rank: Any) -> None:
    rank = make_rank()
    rank.linker.begin_weights_change()
    name = rank.model.identity.fingerprint
    rank.linker.end_weights_change(is_pool_empty=False)
    rank.linker.begin_weights_change()
    rank.linker.end_weights_change(is_pool_empty=True)
    assert rank.model.identity.fingerprint == name, "nothing was stored under it yet"
    rank.linker.begin_weights_change()
    assert rank.model.identity.fingerprint != name


def test_turns_stay_native_when_the_bases_are_of_other_weights(make_rank: Any) -> None:
    rank = make_rank(strategy="subspace")
    token_ids, slots = np.arange(NUM_TOKENS, dtype=np.int64), torch.arange(NUM_TOKENS)
    turn = Turn(keys_of("a"), token_ids, slots, (), Recorded(), model=rank.model.identity)
    decision = rank.linker._decision
    assert decision.decide(turn, [range(NUM_PAGES)]).stored_as == LayerGroups((2, 3))
    assert rank.linker.wants_probe()
    rank.linker.begin_weights_change()
    rank.linker.end_weights_change(is_pool_empty=True)
    assert decision.decide(turn, [range(NUM_PAGES)]).stored_as == Strategy.from_pairs(NUM_LAYERS)
    assert not rank.linker.wants_probe(), "a probe would teach the bases about other weights"


def test_ranks_take_the_name_that_they_agree_on(make_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, offered = make_rank(), list[bytes]()

    def broadcast(agreement: RankAgreement, content: bytes) -> bytes:
        offered.append(content)
        return EPOCH

    monkeypatch.setattr(RankAgreement, "broadcast", broadcast)
    rank.linker.begin_weights_change()
    expected = ServedModel(rank.start)
    expected.rename(EPOCH)
    assert rank.model.identity == expected.identity
    rank.linker.end_weights_change(is_pool_empty=True)
    rank.linker.begin_weights_change()
    assert len(offered) == len({*offered, EPOCH}) - 1 == 2
    assert {len(content) for content in offered} == {16}


# ---- the hook ----


class Cache:
    """Notes what it, or its linker, is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.linker = self

    def begin_weights_change(self) -> None:
        self.said.append("begin")

    def end_weights_change(self) -> None:
        self.said.append("end")


class Updater:
    def __init__(self, cache: Any) -> None:
        self.scheduler = SimpleNamespace()
        if cache is not None:
            runtime = KrulRuntime(KrulConfig())
            runtime.cache = cache
            runtime.attach_to(self.scheduler)
        self._session: object | None = None

    def write(self, session: object | None, cache: Cache) -> str:
        cache.said.append("write")
        self._session = session
        return "written"


def test_a_change_begins_before_weights_are_written_and_ends_with_the_last_of_a_session() -> None:
    cache = Cache()
    updater, request = Updater(cache), SimpleNamespace()
    for session in ("open", "open", None):
        assert change_weights(lambda u, _: u.write(session, cache), updater, request) == "written"  # noqa: B023
    assert cache.said == ["begin", "write", "begin", "write", "begin", "write", "end"]


def test_a_change_that_fails_is_a_change() -> None:
    cache = Cache()

    def fail(updater: Any, request: Any) -> None:
        raise RuntimeError("half of them")

    with pytest.raises(RuntimeError, match="half of them"):
        change_weights(fail, Updater(cache), SimpleNamespace())
    assert cache.said == ["begin", "end"]


@pytest.mark.parametrize("action", ["snapshot", "compare", "checksum", "reset_tensors"])
def test_checks_of_weights_change_them_only_when_they_reset_them(action: str) -> None:
    cache = Cache()
    change_weights(lambda u, _: None, Updater(cache), SimpleNamespace(action=action))
    assert bool(cache.said) == (action == "reset_tensors")


def test_without_krul_the_hook_does_nothing() -> None:
    assert change_weights(lambda u, r: r, Updater(None), "request") == "request"


def test_every_way_to_write_weights_is_hooked() -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    hooked = {path.rpartition(".")[2] for path in hook_targets.WEIGHT_WRITERS}
    harmless = {
        *("init_weights_update_group", "destroy_weights_update_group", "get_weights_by_name"),
        *("flush_cache_after_weight_update", "record_weight_version_after_update"),
        *("save_remote_model", "save_sharded_model"),
    }
    methods = {
        name
        for name, value in vars(SchedulerWeightUpdaterManager).items()
        if callable(value) and not name.startswith("_")
    }
    assert methods == hooked | harmless


# ---- the daemon's session ----


class Channels:
    """Counts hellos."""

    def __init__(self) -> None:
        self.hellos: list[str] = []

    def ask(self, request: Any, timeout_s: float) -> None:
        self.hellos.append(request.fingerprint)


def test_a_client_introduces_a_model_again_that_the_daemon_may_have_forgotten() -> None:
    channels = Channels()
    session: Any = SimpleNamespace(channels=channels)
    connection = DaemonConnection(session)
    model = ServedModel(MODEL)
    connection.say_hello(MODEL, 1.0)
    connection.say_hello(MODEL, 1.0)
    for number in range(MAX_MODELS // 2):
        model.rename(number.to_bytes(16, "little"))
        connection.say_hello(model.identity, 1.0)
    assert len(channels.hellos) == MAX_MODELS // 2 + 1
    connection.say_hello(model.identity, 1.0)
    assert len(channels.hellos) == MAX_MODELS // 2 + 1
    connection.say_hello(MODEL, 1.0)
    assert channels.hellos[-1] == MODEL.fingerprint


@pytest.mark.parametrize(("is_idle", "said"), [(True, ["probe"]), (False, ["drop"])])
def test_a_path_kept_for_a_probe_never_keeps_memory_from_requests_that_wait(
    is_idle: bool, said: list[str]
) -> None:
    """Without a running batch nothing else would ever free it for them."""
    heard: list[str] = []
    linker = SimpleNamespace(
        probe_when_idle=lambda: heard.append("probe"), drop_probe_candidate=lambda: heard.append("drop")
    )
    scheduler = Updater(SimpleNamespace(linker=linker)).scheduler
    scheduler.is_fully_idle = lambda: is_idle
    runtime = KrulRuntime.find(scheduler)
    runtime.gate.note_forward()
    use_idle_time(scheduler)
    assert heard == said
    assert runtime.gate.is_idle()
