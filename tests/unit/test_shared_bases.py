"""Bases in a store: the next engine with the same identity needs no learning."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.bases import ModelBases, older_path
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.errors import CodecError, TierReadError
from krul_backend.store.interface import KVStore
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.objects.mooncake_client import MooncakeOptions
from krul_backend.tiers.objects.tier import ObjectTier
from krul_sglang.adapter.model_bases import BasesFile
from krul_sglang.engine.budget.shared_bases import NEWEST, OlderBases, SharedBases
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.models.checkpoint import Checkpoint, bases_path
from tests.support.budget_builders import BASES, MODEL, NUM_LAYERS, ROTARY, SHAPE
from tests.support.daemon_builders import serving
from tests.support.engine_builders import PATIENCE_S, TensorPool
from tests.support.fake_object_store import FakeCluster, FakeObjectStore
from tests.support.fake_tier import FakeTier
from tests.support.present import present
from tests.support.ssd_builders import open_tier
from tests.support.subspace_builders import make_bases

CAPACITY = 4 << 20
CONTENT = bytes(range(256)) * 40


class Rig:
    """``engine`` is the store as an engine sees it; what it commits goes to a tier below DRAM, too."""

    def __init__(self, tiered: TieredStore, engine: KVStore, tier: FakeTier, folder: Path) -> None:
        self.tiered, self.engine, self.tier, self.folder = tiered, engine, tier, folder

    def shared(self) -> SharedBases:
        return SharedBases(self.engine, MODEL)

    def put(self, content: bytes, digest: str) -> None:
        path = self.folder / "bases"
        path.write_bytes(content)
        self.shared().put(path, digest)


@pytest.fixture(params=["in process", "daemon"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    tier = FakeTier()
    tiered = TieredStore(HostStore(CAPACITY), (tier,))
    if request.param == "in process":
        yield Rig(tiered, tiered, tier, tmp_path)
        tiered.close()
        return
    with serving(tiered) as runtime_dir:
        engine = DaemonStore(runtime_dir, model=MODEL, request_timeout_s=10.0)
        yield Rig(tiered, engine, tier, tmp_path)
        engine.close()


@pytest.mark.parametrize("is_in_dram", [True, False])
def test_what_one_engine_puts_another_gets_from_any_tier(rig: Rig, is_in_dram: bool) -> None:
    assert rig.shared().get() is None
    rig.put(CONTENT, "a" * 64)
    assert rig.tiered.flush(PATIENCE_S)
    if not is_in_dram:
        rig.tiered.host.clear()
    assert rig.shared().get() == CONTENT
    deadline_s = time.monotonic() + PATIENCE_S
    while rig.tiered.stats().num_leases:  # a daemon is told, and not waited for
        assert time.monotonic() < deadline_s


def test_other_identities_have_others(rig: Rig) -> None:
    rig.put(CONTENT, "a" * 64)
    assert SharedBases(rig.tiered, replace(MODEL, config_digest="e" * 64)).get() is None


def test_they_are_put_once_and_those_of_another_digest_are_the_newest_then(rig: Rig) -> None:
    for content, digest in ((CONTENT, "a"), (CONTENT[::-1], "a")):
        rig.put(content, digest * 64)
        assert rig.shared().get() == CONTENT, "known ones are not written again"
        assert rig.tiered.flush(PATIENCE_S)
    rig.put(CONTENT[::-1], "b" * 64)
    assert rig.tiered.flush(PATIENCE_S)
    assert rig.shared().get() == CONTENT[::-1]
    rig.tiered.host.clear()
    assert rig.shared().get() == CONTENT[::-1]
    # What was stored in older ones can be decoded.
    assert rig.shared().get("a" * 64) == CONTENT
    assert rig.shared().get("c" * 64) is None


def test_those_that_would_fill_the_store_are_not_put(rig: Rig) -> None:
    rig.put(bytes(CAPACITY // 16 + 1), "a" * 64)
    assert rig.shared().get() is None
    assert rig.tiered.stats().committed_segments == 0


def test_damaged_ones_are_dropped(rig: Rig) -> None:
    rig.put(CONTENT, "a" * 64)
    assert rig.tiered.flush(PATIENCE_S)
    lease = present(rig.tiered.lease(MODEL, (f"{NEWEST}-{'a' * 64}",), rig.shared()._token_ids))
    rig.tiered.release(lease)
    spans = lease.slices[0].spans
    rig.tiered.host.buffer[spans[0].offset] ^= 1
    with pytest.raises(TierReadError, match="wrong checksum"):
        rig.shared().get()
    # A tier below DRAM has a sound copy.
    assert rig.shared().get() == CONTENT


def test_a_read_that_fails_says_nothing_of_whether_they_are_there(rig: Rig) -> None:
    rig.put(CONTENT, "a" * 64)
    assert rig.tiered.flush(PATIENCE_S)
    rig.tiered.host.clear()
    rig.tier.fail_after = 0
    with pytest.raises(TierReadError):
        rig.shared().get()
    rig.tier.fail_after = None
    assert rig.shared().get() == CONTENT


def test_a_daemon_that_does_not_answer_says_nothing_of_whether_they_are_there(tmp_path: Path) -> None:
    store = DaemonStore(tmp_path / "nobody", model=MODEL, request_timeout_s=1.0)
    with closing(store), pytest.raises(TierReadError):
        SharedBases(store, MODEL).get()


@pytest.mark.parametrize("state", ["is_suspended", "is_opening"])
def test_a_tier_that_is_out_of_use_may_have_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    stats = replace(rig.tier.stats(), **{state: True})
    monkeypatch.setattr(rig.tier, "stats", lambda: stats)
    with pytest.raises(TierReadError):
        rig.shared().get()


def test_other_hosts_of_a_cluster_get_them(tmp_path: Path) -> None:
    cluster, path = FakeCluster(), tmp_path / "bases"
    path.write_bytes(CONTENT)

    def on_host() -> TieredStore:
        options = MooncakeOptions("127.0.0.1:1", segment_bytes=1 << 20, lookup_timeout_s=5.0)
        tier = ObjectTier(options, None, connect=lambda: FakeObjectStore(cluster))
        return TieredStore(HostStore(CAPACITY), (tier,))

    with closing(on_host()) as first, closing(on_host()) as second:
        SharedBases(first, MODEL).put(path, "a" * 64)
        assert first.flush(PATIENCE_S)
        assert SharedBases(second, MODEL).get() == CONTENT


def test_an_ssd_keeps_them_for_the_next_daemon(tmp_path: Path) -> None:
    path = tmp_path / "bases"
    path.write_bytes(CONTENT)

    def on_disk() -> TieredStore:
        return TieredStore(HostStore(CAPACITY), (open_tier(tmp_path / "ssd"),))

    with closing(on_disk()) as store:
        SharedBases(store, MODEL).put(path, "a" * 64)
        assert store.flush(PATIENCE_S)
    with closing(on_disk()) as store:
        assert SharedBases(store, MODEL).get() == CONTENT


# ---- with the file ----


class Engine:
    """An engine with a cache of its own that joins the store."""

    def __init__(self, rig: Rig, model: Path, cache_dir: Path) -> None:
        checkpoint = Checkpoint(str(model))
        self.path = bases_path(checkpoint, cache_dir)
        pool: Any = TensorPool(SHAPE, NUM_LAYERS, num_slots=4)
        self.start: Callable[[], BasesFile] = lambda: BasesFile(
            checkpoint, cache_dir, MODEL, pool, ROTARY, rig.shared()
        )


@pytest.fixture
def engines(rig: Rig, tmp_path: Path) -> list[Engine]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    return [Engine(rig, model, tmp_path / name) for name in ("first", "second", "third")]


def test_an_engine_without_a_file_takes_the_bases_of_one_that_has_one(engines: list[Engine]) -> None:
    first, second, third = engines
    first.path.parent.mkdir(parents=True)
    BASES.save(first.path)
    assert first.start().served.state == "read at the start"
    served = second.start().served
    assert served.state == "found in the store"
    assert served.subspace is not None
    assert served.subspace.bases.digest == BASES.digest
    assert second.path.read_bytes() == first.path.read_bytes()
    # Learned again by hand: the next one without a file gets the newest.
    other = make_bases(SHAPE, [2, 2], seed=1)
    other.save(second.path)
    second.start()
    found = present(third.start().served.subspace)
    assert found.bases.digest == other.digest


def test_an_engine_with_other_bases_finds_those_that_segments_name(engines: list[Engine]) -> None:
    first, second, _ = engines
    for engine, bases in ((first, BASES), (second, make_bases(SHAPE, [2, 2], seed=1))):
        engine.path.parent.mkdir(parents=True)
        bases.save(engine.path)
    first.start()
    file = second.start()
    older = list[SubspaceCodec]()
    file.learn(
        RankAgreement(None, 1), lambda num_bytes: None, lambda subspace, is_older: older.append(subspace)
    )
    assert file.may_come(BASES.digest)
    deadline_s = time.monotonic() + PATIENCE_S
    while not older:
        assert time.monotonic() < deadline_s
    assert older[0].bases.digest == BASES.digest
    # The next time it needs no store.
    assert older_path(second.path, BASES.digest).read_bytes() == first.path.read_bytes()
    file.served.close()


def test_bases_of_another_shape_in_the_store_are_not_used(rig: Rig, engines: list[Engine]) -> None:
    path = engines[0].path
    path.parent.mkdir(parents=True)
    other = make_bases(LayerShape(2, 4, 4, SHAPE.dtype), [2, 2])
    other.save(path)
    rig.shared().put(path, other.digest)
    path.unlink()
    assert engines[0].start().served.subspace is None


# ---- older ones ----


class Search:
    """Looks for bases with a clock that stands still, in a store whose answers a test decides."""

    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.added: list[str] = []
        self.answers: list[bytes | Exception | None] = []
        self.add_error: Exception | None = None
        shared: Any = self
        self.older = OlderBases(path, shared, self.add, lambda: self.now_s)

    def get(self, digest: str) -> bytes | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def add(self, bases: ModelBases) -> None:
        if self.add_error is not None:
            raise self.add_error
        self.added.append(bases.digest)

    def may_come(self) -> bool:
        """What is said first; then, if a search began, it has ended."""
        said = self.older.may_come(BASES.digest)
        for thread in threading.enumerate():
            if thread.name == "krul-older-bases":
                thread.join()
        return said


@pytest.fixture
def search(tmp_path: Path) -> Search:
    return Search(tmp_path / "bases" / "model.safetensors")


def content_of(bases: ModelBases, folder: Path) -> bytes:
    bases.save(folder / "saved")
    return (folder / "saved").read_bytes()


def test_bases_that_no_one_has_do_not_come(search: Search) -> None:
    search.answers = [None]
    assert search.may_come()
    assert not search.may_come()


def test_bases_that_could_not_be_read_are_looked_for_again_after_a_while(
    search: Search, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    search.answers = [TierReadError("no room"), OSError("no disk"), content_of(BASES, tmp_path)]
    assert search.may_come()
    assert search.may_come()
    assert len(search.answers) == 2, "not at once"
    search.now_s = 30.0
    assert search.may_come()
    search.now_s = 60.0
    assert search.may_come()
    assert (search.answers, search.added) == ([], [BASES.digest])
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "no room" in warning.getMessage()


def test_bases_that_found_no_memory_on_the_device_are_looked_for_again(
    search: Search, tmp_path: Path
) -> None:
    search.answers, search.add_error = [content_of(BASES, tmp_path)], RuntimeError("out of memory")
    assert search.may_come()
    search.now_s, search.add_error = 30.0, None
    assert search.may_come()
    assert search.added == [BASES.digest]


def test_bases_for_other_layers_do_not_come(search: Search, tmp_path: Path) -> None:
    search.answers, search.add_error = [content_of(BASES, tmp_path)], CodecError("other layers")
    assert search.may_come()
    assert not search.may_come()


def test_a_file_that_cannot_be_read_is_not_one_that_is_not_there(search: Search, tmp_path: Path) -> None:
    path = older_path(tmp_path / "bases" / "model.safetensors", BASES.digest)
    path.mkdir(parents=True)
    search.answers = [None, None]
    assert search.may_come()
    search.now_s = 30.0
    assert search.may_come()
    path.rmdir()
    BASES.save(path)
    search.now_s = 60.0
    assert search.may_come()
    assert search.added == [BASES.digest]
