"""The Mooncake tier on a cluster in memory: what is found, what is refused, what a clear forgets."""

from __future__ import annotations

import dataclasses
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from krul_backend.errors import ConfigError, DaemonError, TierReadError
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.interface import Block, block_checksums
from krul_backend.tiers.common.lower_tier import TailRead
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.record import no_checksums
from krul_backend.tiers.objects import tier as tier_module
from krul_backend.tiers.objects import writer
from krul_backend.tiers.objects.connection import TimedCalls
from krul_backend.tiers.objects.mooncake_client import MooncakeOptions
from krul_backend.tiers.objects.object_client import ObjectPart, ObjectStoreError
from krul_backend.tiers.objects.stored_object import (
    EPOCH_AGE_S,
    MAX_POINTERS,
    StoredObject,
    decode_object,
    encode_object,
)
from krul_backend.tiers.objects.tier import ObjectTier
from tests.support.fake_object_store import FakeCluster, FakeObjectStore
from tests.support.store_builders import (
    PAGE_SIZE,
    make_manifest,
    make_model,
    page_keys,
    read_tail,
    tokens_of,
    wait_until,
)

MODEL = make_model()
OPTIONS = MooncakeOptions("127.0.0.1:1", segment_bytes=1 << 20, lookup_timeout_s=5.0)
SIZES = (100, 60)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


Host = Callable[..., ObjectTier]


@pytest.fixture
def host(cluster: FakeCluster, clock: Clock) -> Iterator[Host]:
    """Makes tiers that share the cluster, as daemons on several hosts do."""
    tiers: list[ObjectTier] = []

    def make(**options: float) -> ObjectTier:
        tier = ObjectTier(
            dataclasses.replace(OPTIONS, **options),
            None,
            connect=lambda: FakeObjectStore(cluster),
            clock=clock,
        )
        tiers.append(tier)
        return tier

    yield make
    cluster.gate.set()
    for tier in tiers:
        tier.close()


def blocks_of(manifest: SegmentManifest, seed: int = 0) -> list[Block]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in manifest.layer_num_bytes]


def put(tier: ObjectTier, manifest: SegmentManifest, seed: int = 0) -> list[Block]:
    """Store a segment and wait for it; ``done`` is called exactly once."""
    blocks = blocks_of(manifest, seed)
    num_done: list[int] = []
    checksums = block_checksums(blocks, manifest.range_bytes)
    assert tier.put(manifest, blocks, checksums, lambda: num_done.append(1))
    assert tier.flush(5.0)
    assert num_done == [1]
    return blocks


def begin_to_put(tier: ObjectTier, name: str, done: list[str], pages: int = 1) -> None:
    """Put a segment without waiting for it; its name is noted when it is done."""
    manifest = make_manifest(name, 0, pages, SIZES)
    blocks = blocks_of(manifest)
    assert tier.put(manifest, blocks, block_checksums(blocks), lambda: done.append(name))


def occupy_writers(tier: ObjectTier, cluster: FakeCluster, done: list[str]) -> list[str]:
    """Close the gate, and put a segment for each writer to wait there with; their names."""
    cluster.gate.clear()
    num_calls = len(cluster.calls)
    names = [f"b{i}" for i in range(writer._NUM_THREADS)]
    for name in names:
        begin_to_put(tier, name, done)
    wait_until(lambda: len(cluster.calls) == num_calls + len(names))
    return names


def match(
    tier: ObjectTier, keys: Sequence[str], next_token: int | None = None, model: ModelIdentity = MODEL
) -> tuple[PageRun[Any], ...]:
    return tier.match(model, keys, tokens_of(keys), next_token)


def fetch(tier: ObjectTier, run: PageRun[Any]) -> tuple[list[Block], list[int]]:
    blocks = [np.zeros(size, dtype=np.uint8) for size in run.segment.manifest.layer_num_bytes]
    landed: list[int] = []
    read_tail(tier, run, blocks, landed.append)
    return blocks, landed


def test_what_one_host_stores_another_finds_and_reads(host: Host) -> None:
    one, other = host(), host()
    manifest = dataclasses.replace(make_manifest("c", 0, 3, SIZES), tenant="t", recompute_s=0.5)
    blocks = put(one, manifest)
    (run,) = match(other, page_keys("c", 0, 5), next_token=0)
    assert (run.first_page, run.end_page) == (0, 3)
    got = run.segment.manifest
    assert (got.model, got.page_keys, got.tenant, got.recompute_s) == (MODEL, manifest.page_keys, "t", 0.5)
    assert np.array_equal(got.token_ids, manifest.token_ids)
    read, landed = fetch(other, run)
    assert landed == [0, 1]
    assert all(np.array_equal(a, b) for a, b in zip(read, blocks, strict=True))
    assert other.stats().read_bytes == sum(SIZES)
    other.release(run)


def test_a_conversation_is_found_segment_by_segment(host: Host) -> None:
    one, other = host(), host()
    put(one, make_manifest("c", 0, 2, SIZES))
    put(one, make_manifest("c", 2, 5, SIZES))
    runs = match(other, page_keys("c", 0, 6))
    assert [(run.first_page, run.end_page, run.segment.manifest.start_token) for run in runs] == [
        (0, 2, 0),
        (0, 3, 2 * PAGE_SIZE),
    ]
    # The middle of a segment is found by who knows the segment.
    (part,) = match(other, page_keys("c", 3, 5), next_token=3 * PAGE_SIZE)
    assert (part.first_page, part.end_page) == (1, 3)
    assert other.find_missing(MODEL, page_keys("c", 0, 6)) == [range(5, 6)]


def test_layers_without_bytes_need_no_object_and_land(host: Host, cluster: FakeCluster) -> None:
    manifest = make_manifest("c", 0, 2, SIZES)
    manifest = dataclasses.replace(
        manifest, layer_num_bytes=(0, 60), layer_first_token=(manifest.end_token, 0)
    )
    put(host(), manifest)
    tier = host()
    (run,) = match(tier, page_keys("c", 0, 2))
    blocks, landed = fetch(tier, run)
    assert landed == [0, 1]
    assert [block.nbytes for block in blocks] == [0, 60]
    # Of its two layers the second has an object, beside the one of its metadata.
    assert sorted(name.rsplit("/", 1)[1] for name in cluster.names("/s/")) == ["1", "m"]


def test_other_tokens_positions_and_models_find_nothing(host: Host) -> None:
    put(host(), make_manifest("c", 0, 3, SIZES))
    tier = host()
    keys = page_keys("c", 0, 3)
    tokens = tokens_of(keys)
    tokens[PAGE_SIZE] += 1
    (run,) = tier.match(MODEL, keys, tokens, 0)
    assert run.end_page == 1
    tokens[0] += 1
    assert tier.match(MODEL, keys, tokens, 0) == ()
    assert match(tier, keys, next_token=PAGE_SIZE) == ()
    assert match(tier, keys, model=make_model("another")) == ()
    with pytest.raises(ValueError, match="token ids"):
        tier.match(MODEL, keys, tokens[:-1], 0)


def test_segments_that_begin_alike_are_told_apart(host: Host) -> None:
    """Conversations share a system prompt's page and go on differently."""
    one, other = host(), host()
    shared = page_keys("system", 0, 1)
    for i in range(3):
        keys = shared + page_keys(f"c{i}", 1, 3)
        manifest = dataclasses.replace(
            make_manifest("c", 0, 3, SIZES), page_keys=keys, token_ids=tokens_of(keys)
        )
        put(one, manifest, seed=i)
    keys = shared + page_keys("c2", 1, 3)
    (run,) = match(other, keys)
    assert run.segment.manifest.page_keys == keys
    assert fetch(other, run)[0][0].tobytes() == blocks_of(run.segment.manifest, seed=2)[0].tobytes()


def test_segments_that_begin_alike_are_bounded(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    shared = page_keys("system", 0, 1)
    for i in range(MAX_POINTERS + 1):
        keys = shared + page_keys(f"c{i}", 1, 2)
        manifest = dataclasses.replace(
            make_manifest("c", 0, 2, SIZES), page_keys=keys, token_ids=tokens_of(keys)
        )
        put(tier, manifest, seed=i)
    assert len(cluster.metadata_names()) == MAX_POINTERS
    assert tier.stats().failed_writes == 1
    # Where one was evicted there is room again.
    del cluster.objects[cluster.metadata_names()[3]]
    put(tier, manifest, seed=i)
    assert match(host(), keys)[0].end_page == 2


def test_a_segment_that_another_host_stored_is_not_written_again(host: Host, cluster: FakeCluster) -> None:
    one, other = host(), host()
    put(one, make_manifest("c", 0, 3, SIZES))
    before = dict(cluster.objects)
    put(other, make_manifest("c", 0, 3, SIZES), seed=1)
    assert cluster.objects == before
    assert other.stats().written_segments == 0
    assert other.find_missing(MODEL, page_keys("c", 0, 3)) == []
    cluster.calls.clear()
    put(other, make_manifest("c", 0, 3, SIZES))
    assert cluster.calls == []


def test_half_a_segment_is_never_found(host: Host, cluster: FakeCluster) -> None:
    """Whatever object is missing, evicted or not written yet, there is no hit."""
    put(host(), make_manifest("c", 0, 3, SIZES))
    whole = dict(cluster.objects)
    for name in whole:
        cluster.objects = {key: value for key, value in whole.items() if key != name}
        assert match(host(), page_keys("c", 0, 3)) == (), name
    cluster.objects = whole
    assert match(host(), page_keys("c", 0, 3)) != ()


def test_the_description_is_written_after_the_blocks_and_the_pointer_last(
    host: Host, cluster: FakeCluster
) -> None:
    put(host(), make_manifest("c", 0, 3, SIZES))
    puts = [key for operation, key in cluster.calls if operation == "put" and "epoch" not in key]
    probes = [key for key in puts if "/probe/" in key]
    assert len(probes) == 2
    assert [key.rsplit("/", 1)[1] for key in puts if key not in probes] == ["0", "1", "m", "0"]
    assert "/f/c/0/" in puts[-1]


def test_the_blocks_of_a_segment_are_written_and_read_in_batches(
    host: Host, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read: the first layer that has bytes of all segments, then as many blocks as one call may ask for."""
    monkeypatch.setattr(tier_module, "_BATCH_BYTES", 400)
    tier, model = host(), make_model(num_layers=6)
    manifests = [
        make_manifest("c", page, page + 1, (100, 40, 100, 100, 240, 20), range_bytes=20) for page in (0, 1)
    ]
    stored = [put(tier, manifest) for manifest in manifests]
    runs = match(tier, page_keys("c", 0, 2), model=model)
    assert cluster.batches == [run.segment.block_keys for run in runs]
    for sizes, calls in (
        ((100, 40, 100, 100, 240, 20), ["00", "11223", "34", "455"]),
        ((0, 40, 100, 100, 100, 20), ["11", "2233", "4455"]),
        ((20,) * 6, ["00", "1122334455"]),
        ((0,) * 6, []),
    ):
        cluster.batches.clear()
        tails = Tails(runs, [sizes] * 2)
        tier.fetch(tails.reads)
        assert tails.order == [(number, layer) for layer in range(6) for number in range(2)]
        asked = ["".join(key.rsplit("/", 1)[1] for key in batch) for batch in cluster.batches]
        assert asked == calls
        for blocks, whole in zip(tails.blocks, stored, strict=True):
            for block, right in zip(blocks, whole, strict=True):
                np.testing.assert_array_equal(block, right[right.nbytes - block.nbytes :])


def test_the_cost_is_that_of_blocks_that_are_read_together(
    host: Host, cluster: FakeCluster, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner adds up the costs of blocks: of 40 that come in two calls none costs a call."""
    tier = host()
    put(tier, make_manifest("c", 0, 1, (100,) * 40))
    (run,) = match(tier, page_keys("c", 0, 1), model=make_model(num_layers=40))
    get_into = FakeObjectStore.get_into

    def slow_get_into(store: FakeObjectStore, parts: Sequence[ObjectPart]) -> list[bool]:
        clock.now_s += 0.01
        return get_into(store, parts)

    monkeypatch.setattr(FakeObjectStore, "get_into", slow_get_into)
    for _ in range(40):
        fetch(tier, run)
    assert tier.load_s(run.segment.manifest) == pytest.approx(0.02, rel=0.05)


def test_a_segment_of_which_an_object_fails_is_not_announced(
    host: Host, cluster: FakeCluster, clock: Clock
) -> None:
    """The others stay; the next attempt completes them."""
    tier = host()
    put(tier, make_manifest("first", 0, 1, SIZES))
    cluster.failing = ("/0",)
    put(tier, make_manifest("c", 0, 3, SIZES))
    assert (tier.stats().failed_writes, tier.stats().is_suspended) == (1, True)
    assert len(cluster.names("/f/")) == 1
    assert match(host(), page_keys("c", 0, 3)) == ()
    cluster.failing = ()
    clock.now_s += 31
    blocks = put(tier, make_manifest("c", 0, 3, SIZES))
    (run,) = match(host(), page_keys("c", 0, 3))
    assert all(np.array_equal(a, b) for a, b in zip(fetch(tier, run)[0], blocks, strict=True))


def test_a_segment_that_another_host_is_writing_is_not_announced(host: Host, cluster: FakeCluster) -> None:
    """Mooncake says of an object that is half written that it is stored."""
    tier = host()
    put(tier, make_manifest("first", 0, 1, SIZES))
    cluster.half_written = ("/1",)
    put(tier, make_manifest("c", 0, 3, SIZES))
    stats = tier.stats()
    assert (stats.failed_writes, stats.written_segments, stats.is_suspended) == (1, 1, False)
    assert len(cluster.names("/f/")) == 1
    assert tier.find_missing(MODEL, page_keys("c", 0, 3)) == [range(3)]
    # What the other one has written is left to it.
    assert len(cluster.metadata_names()) == 2
    cluster.half_written = ()
    put(tier, make_manifest("c", 0, 3, SIZES))
    assert len(match(host(), page_keys("c", 0, 3))) == 1


def test_a_damaged_or_foreign_object_is_a_miss(host: Host, cluster: FakeCluster) -> None:
    put(host(), make_manifest("c", 0, 3, SIZES))
    whole = dict(cluster.objects)
    (metadata,) = cluster.metadata_names()
    (pointer,) = cluster.names("/f/")
    for name in (metadata, pointer):
        for value in (b"\0", b"{}", b"[1]", b'{"segment": 3}', b"x" * 100_000, whole[name][:-1]):
            cluster.objects = {**whole, name: value}
            tier = host()
            assert match(tier, page_keys("c", 0, 3)) == ()
            assert tier.stats().num_segments == 0
            assert not tier.stats().is_suspended
    cluster.objects = dict(whole)
    cluster.damage(metadata)
    tier = host()
    assert match(tier, page_keys("c", 0, 3)) == ()
    assert tier.stats().corrupted_segments == 1


def test_no_flipped_bit_makes_another_manifest() -> None:
    manifest = make_manifest("c", 0, 2, SIZES)
    digest, metadata = encode_object(manifest, no_checksums(manifest))
    assert decode_object(digest, metadata, MODEL) is not None
    assert decode_object(digest, metadata, make_model("another")) is None
    for at in range(len(metadata)):
        damaged = bytearray(metadata)
        damaged[at] ^= 0x10
        assert decode_object(digest, bytes(damaged), MODEL) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": 1},
        {"tenant": 7},
        {"codec_params": []},
        {"start_token": 0.0},
        {"recompute_s": "1"},
        {"range_bytes": True},
    ],
)
def test_a_sound_object_with_wrong_types_is_refused(changes: dict[str, object]) -> None:
    manifest = make_manifest("c", 0, 2, SIZES)
    for name, value in changes.items():
        object.__setattr__(manifest, name, value)
    digest, metadata = encode_object(manifest, no_checksums(manifest))
    assert decode_object(digest, metadata, MODEL) is None


def test_wrong_bytes_are_an_error_and_leave_the_cluster(host: Host, cluster: FakeCluster) -> None:
    one, other = host(), host()
    blocks = put(one, make_manifest("c", 0, 3, SIZES))
    (place,) = [name.removesuffix("/m") for name in cluster.metadata_names()]
    cluster.damage(f"{place}/1")
    (run,) = match(other, page_keys("c", 0, 3))
    landed: list[int] = []
    with pytest.raises(TierReadError, match="checksum"):
        read_tail(other, run, [np.zeros(size, np.uint8) for size in SIZES], landed.append)
    assert landed == [0]
    assert other.stats().corrupted_segments == 1
    assert match(other, page_keys("c", 0, 3)) == ()
    # It can be stored again, and is right then.
    put(other, make_manifest("c", 0, 3, SIZES))
    (run,) = match(other, page_keys("c", 0, 3))
    assert np.array_equal(fetch(other, run)[0][1], blocks[1])


def test_an_evicted_block_is_an_error_and_forgotten(host: Host, cluster: FakeCluster, clock: Clock) -> None:
    tier = host()
    put(tier, make_manifest("c", 0, 3, SIZES))
    (run,) = match(tier, page_keys("c", 0, 3))
    (place,) = [name.removesuffix("/m") for name in cluster.metadata_names()]
    del cluster.objects[f"{place}/1"]
    with pytest.raises(TierReadError, match="any more"):
        fetch(tier, run)
    assert tier.stats().evicted_segments == 1
    assert tier.find_missing(MODEL, page_keys("c", 0, 3)) == [range(3)]
    assert not tier.stats().is_suspended


def test_eviction_is_noticed_by_the_next_question(host: Host, cluster: FakeCluster, clock: Clock) -> None:
    tier = host()
    put(tier, make_manifest("c", 0, 3, SIZES))
    assert len(match(tier, page_keys("c", 0, 3))) == 1
    for name in cluster.names("/s/"):
        del cluster.objects[name]
    clock.now_s += 1.5
    assert match(tier, page_keys("c", 0, 3)) == ()


def test_a_scheduler_that_asks_again_does_not_ask_the_cluster(
    host: Host, cluster: FakeCluster, clock: Clock
) -> None:
    put(host(), make_manifest("c", 0, 3, SIZES))
    tier = host()
    assert len(match(tier, page_keys("c", 0, 5))) == 1
    cluster.calls.clear()
    assert len(match(tier, page_keys("c", 0, 5))) == 1
    assert match(tier, page_keys("c", 3, 5)) == ()
    assert cluster.calls == []
    clock.now_s += 1.5
    assert len(match(tier, page_keys("c", 0, 5))) == 1
    assert cluster.calls != []


def test_no_question_looks_at_segments_that_it_does_not_concern(
    host: Host, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, tier = host(), host()
    another = make_model("another")
    for number in range(50):
        put(tier, make_manifest(f"others{number}", 0, 1, SIZES, (MODEL, another)[number % 2]))
    mine = {put_and_find(tier, make_manifest("c", page, page + 1, SIZES)) for page in range(2)}
    touched: set[int] = set()

    def get(segment: StoredObject, name: str) -> object:
        touched.add(id(segment))
        return object.__getattribute__(segment, name)

    monkeypatch.setattr(StoredObject, "__getattribute__", get)
    for step_s in (0.0, 1.5):
        clock.now_s += step_s
        touched.clear()
        assert len(match(tier, page_keys("c", 0, 5))) == 2
        assert touched == mine
    touched.clear()
    assert tier.stats().num_segments == 52
    assert tier.stats().stored_bytes == 52 * sum(SIZES)
    assert match(tier, page_keys("none", 0, 2)) == ()
    assert tier.find_missing(MODEL, page_keys("none", 0, 2)) == [range(2)]
    tier.discard(make_manifest("none", 0, 2, SIZES))
    assert touched == set()
    # A clear concerns the segments of its model, when it is noticed.
    one.clear(another)
    clock.now_s += EPOCH_AGE_S
    touched.clear()
    assert match(tier, page_keys("none", 0, 2), model=another) == ()
    assert len(touched) == 25
    assert tier.stats().num_segments == 27


def put_and_find(tier: ObjectTier, manifest: SegmentManifest) -> int:
    """Put a segment; the identity of the object by which the tier knows it."""
    put(tier, manifest)
    (run,) = match(tier, manifest.page_keys)
    return id(run.segment)


def test_a_slow_cluster_is_a_miss_whose_answer_is_remembered(host: Host, cluster: FakeCluster) -> None:
    put(host(), make_manifest("c", 0, 3, SIZES))
    tier = host(lookup_timeout_s=0.02)
    cluster.gate.clear()
    assert match(tier, page_keys("c", 0, 3)) == ()
    started_s = time.monotonic()
    for _ in range(200):
        assert match(tier, page_keys("c", 0, 3)) == ()
    assert time.monotonic() - started_s < 200 * 0.02
    cluster.gate.set()
    deadline_s = time.monotonic() + 5
    while not match(tier, page_keys("c", 0, 3)):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert not tier.stats().is_suspended


def test_a_cluster_that_is_down_suspends_the_tier(
    host: Host, cluster: FakeCluster, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = host()
    put(tier, make_manifest("c", 0, 3, SIZES))
    cluster.is_down = True
    clock.now_s += 1.5
    assert match(tier, page_keys("c", 0, 3)) == ()
    assert tier.stats().is_suspended
    cluster.calls.clear()
    assert match(tier, page_keys("c", 0, 3)) == ()
    other = make_manifest("d", 0, 3, SIZES)
    assert not tier.put(other, blocks_of(other), no_checksums(other), lambda: pytest.fail("it was not taken"))
    assert cluster.calls == []
    assert tier.stats().skipped_segments == {}, "it can be offered again"
    # Again after 30 s, then after 60.
    clock.now_s += 30.5
    assert match(tier, page_keys("c", 0, 3)) == ()
    clock.now_s += 30.5
    assert tier.stats().is_suspended
    cluster.is_down = False
    clock.now_s += 30.5
    assert len(match(tier, page_keys("c", 0, 3))) == 1
    assert len([record for record in caplog.records if "left alone" in record.message]) == 1


def test_a_cluster_that_is_down_at_the_start_is_joined_later(
    host: Host, cluster: FakeCluster, clock: Clock
) -> None:
    put(host(), make_manifest("c", 0, 3, SIZES))
    cluster.is_down = True
    tier = host()
    assert tier.stats().is_suspended
    assert match(tier, page_keys("c", 0, 3)) == ()
    cluster.is_down = False
    clock.now_s += 30.5
    assert len(match(tier, page_keys("c", 0, 3))) == 1


class Tails:
    """Reads of the ends of several segments in one fetch."""

    def __init__(self, runs: Sequence[PageRun[Any]], sizes: Sequence[tuple[int, ...]]) -> None:
        self.order: list[tuple[int, int]] = []
        self.errors: dict[int, TierReadError] = {}
        self.blocks = [[np.full(size, 0xAA, np.uint8) for size in of_layers] for of_layers in sizes]
        self.reads = [
            TailRead(
                run,
                blocks,
                lambda layer, number=number: self.order.append((number, layer)),  # type: ignore[misc]
                lambda error, number=number: self.errors.update({number: error}),  # type: ignore[misc]
            )
            for number, (run, blocks) in enumerate(zip(runs, self.blocks, strict=True))
        ]


def put_three(tier: ObjectTier) -> tuple[list[list[Block]], tuple[PageRun[Any], ...]]:
    """A conversation of three segments, in ranges of 20 bytes; what was put, and its runs."""
    manifests = [make_manifest("c", first, first + 2, SIZES, range_bytes=20) for first in (0, 2, 4)]
    blocks = [put(tier, manifest, seed) for seed, manifest in enumerate(manifests)]
    runs = match(tier, page_keys("c", 0, 6))
    assert len(runs) == 3
    return blocks, runs


def test_the_ends_of_several_segments_are_read_layer_by_layer(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    stored, runs = put_three(tier)
    sizes = [(40, 60), (0, 20), (100, 0)]
    tails = Tails(runs, sizes)
    tier.fetch(tails.reads)
    assert tails.order == [(number, layer) for layer in range(2) for number in range(3)]
    assert tails.errors == {}
    for blocks, whole in zip(tails.blocks, stored, strict=True):
        for block, right in zip(blocks, whole, strict=True):
            np.testing.assert_array_equal(block, right[right.nbytes - block.nbytes :])
    planned = sum(map(sum, sizes))
    assert cluster.num_bytes_read == planned
    stats = tier.stats()
    assert (stats.read_segments, stats.read_bytes) == (3, planned)
    # Of what nothing is read, nothing is asked.
    asked = [key.rsplit("/", 1)[1] for operation, key in cluster.calls if operation == "get_into"]
    assert asked == ["0", "0", "1", "1"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_is_before_an_end_is_read_alone(host: Host, cluster: FakeCluster, is_damaged: bool) -> None:
    tier = host()
    stored, runs = put_three(tier)
    tails = Tails(runs[:1], [(20, 0)])
    tails.reads[0].num_after = (60, 20)
    if is_damaged:
        # In the middle of the block, which is read then.
        tails.reads[0].num_after = (40, 20)
        cluster.damage(runs[0].segment.block_keys[0])
    tier.fetch(tails.reads)
    assert bool(tails.errors) == is_damaged
    if not is_damaged:
        np.testing.assert_array_equal(tails.blocks[0][0], stored[0][0][20:40])
        assert tails.order == [(0, 0), (0, 1)]
    assert cluster.num_bytes_read == 20


@pytest.mark.parametrize("layer", [0, 1])
def test_wrong_bytes_in_an_end_fail_their_segment_alone(host: Host, cluster: FakeCluster, layer: int) -> None:
    tier = host()
    stored, runs = put_three(tier)
    # In the middle of the block.
    cluster.damage(runs[1].segment.block_keys[layer])
    sizes = (60, 40)
    tails = Tails(runs, [sizes] * 3)
    tier.fetch(tails.reads)
    assert list(tails.errors) == [1]
    assert "wrong checksum" in str(tails.errors[1])
    for number in (0, 2):
        assert [each for of_read, each in tails.order if of_read == number] == [0, 1]
        for block, right in zip(tails.blocks[number], stored[number], strict=True):
            np.testing.assert_array_equal(block, right[right.nbytes - block.nbytes :])
    assert [each for of_read, each in tails.order if of_read == 1] == list(range(layer))
    stats = tier.stats()
    assert (stats.corrupted_segments, stats.read_segments, stats.is_suspended) == (1, 2, False)
    assert tier.find_missing(MODEL, page_keys("c", 0, 6)) == [range(2, 4)]


def test_wrong_bytes_before_an_end_do_not_matter_to_it(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    _, runs = put_three(tier)
    for layer in range(2):
        cluster.damage(runs[1].segment.block_keys[layer])
    tails = Tails(runs, [(40, 20)] * 3)
    tier.fetch(tails.reads)
    assert (tails.errors, len(tails.order)) == ({}, 6)
    assert tier.stats().corrupted_segments == 0
    # Who reads everything finds them.
    report = tier.verify()
    assert len(report.bad_segments) == 1


@pytest.mark.parametrize("layer", [0, 1])
def test_an_evicted_block_fails_its_segment_alone(host: Host, cluster: FakeCluster, layer: int) -> None:
    tier = host()
    _, runs = put_three(tier)
    del cluster.objects[runs[0].segment.block_keys[layer]]
    tails = Tails(runs, [(20, 20)] * 3)
    tier.fetch(tails.reads)
    assert list(tails.errors) == [0]
    assert "not in the Mooncake cluster any more" in str(tails.errors[0])
    # Nothing of it lands after that.
    assert tails.order == [*[(0, 0)] * layer, (1, 0), (2, 0), (1, 1), (2, 1)]
    assert (tier.stats().evicted_segments, tier.stats().is_suspended) == (1, False)
    # Nothing of it is read of which the object is not asked for.
    cluster.objects.pop(runs[1].segment.block_keys[1])
    tails = Tails(runs[1:], [(20, 0)] * 2)
    tier.fetch(tails.reads)
    assert (tails.errors, len(tails.order)) == ({}, 4)


def test_a_model_that_was_cleared_elsewhere_fails_alone(
    host: Host, cluster: FakeCluster, clock: Clock
) -> None:
    tier, elsewhere = host(), host()
    another = make_model("another")
    put(tier, make_manifest("c", 0, 2, SIZES, range_bytes=20))
    put(tier, make_manifest("c", 0, 2, SIZES, another, range_bytes=20), seed=1)
    (mine,), (other,) = (match(tier, page_keys("c", 0, 2), model=model) for model in (MODEL, another))
    elsewhere.clear(another)
    clock.now_s += EPOCH_AGE_S
    tails = Tails((other, mine), [(20, 20)] * 2)
    tier.fetch(tails.reads)
    assert list(tails.errors) == [0]
    assert "was cleared" in str(tails.errors[0])
    assert tails.order == [(1, 0), (1, 1)]


def test_a_cluster_that_goes_down_ends_the_whole_fetch(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    _, runs = put_three(tier)
    tails = Tails(runs, [(20, 20)] * 3)
    landed = tails.reads[1].landed

    def go_down(layer: int) -> None:
        landed(layer)
        cluster.is_down = True

    tails.reads[1].landed = go_down
    with pytest.raises(TierReadError, match="cannot be read"):
        tier.fetch(tails.reads)
    # The first layer of all three had come.
    assert tails.order == [(0, 0), (1, 0), (2, 0)]
    assert tier.stats().is_suspended


def test_a_failing_read_is_a_tier_error(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    put(tier, make_manifest("c", 0, 3, SIZES))
    (run,) = match(tier, page_keys("c", 0, 3))
    cluster.is_down = True
    with pytest.raises(TierReadError, match="cannot be read"):
        fetch(tier, run)
    stats = tier.stats()
    assert (stats.failed_reads, stats.is_suspended) == (1, True)


def test_a_slow_read_is_given_up_between_layers(host: Host, clock: Clock) -> None:
    tier = host()
    put(tier, make_manifest("c", 0, 3, SIZES))
    (run,) = match(tier, page_keys("c", 0, 3))

    def land(layer: int) -> None:
        clock.now_s += 100

    with pytest.raises(TierReadError, match="too long"):
        read_tail(tier, run, [np.zeros(size, np.uint8) for size in SIZES], land)
    assert tier.stats().slow_reads == 1


def test_a_full_cluster_is_a_skipped_segment(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    put(tier, make_manifest("a", 0, 1, SIZES))
    cluster.capacity_bytes = sum(map(len, cluster.objects.values())) + 130
    put(tier, make_manifest("c", 0, 3, SIZES))
    stats = tier.stats()
    assert (stats.failed_writes, stats.written_segments, stats.is_suspended) == (1, 1, False)
    assert len(cluster.names("/s/")) == 3
    cluster.capacity_bytes = 1 << 40
    put(tier, make_manifest("c", 0, 3, SIZES))
    assert match(host(), page_keys("c", 0, 3)) != ()


def test_the_queue_is_bounded_and_each_segment_is_done_once(host: Host, cluster: FakeCluster) -> None:
    tier = host(queue_bytes=400)
    cluster.gate.clear()
    manifests = [make_manifest(f"c{i}", 0, 1, SIZES) for i in range(5)]
    done: list[int] = []
    taken = [
        tier.put(manifest, blocks_of(manifest), no_checksums(manifest), lambda i=i: done.append(i))  # type: ignore[misc]
        for i, manifest in enumerate(manifests)
    ]
    assert taken == [True, True, False, False, False]
    assert tier.stats().queued_bytes == 320
    assert not tier.flush(0.01)
    cluster.gate.set()
    assert tier.flush(5.0)
    assert done == [0, 1]
    assert tier.stats().skipped_segments == {}, "they can be offered again"


@pytest.mark.parametrize("is_failing", [False, True])
def test_segments_are_written_at_once_and_announced_in_order(
    host: Host, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    """What a segment continues can be found before it, however long that takes to write, or neither is."""
    tier, other = host(), host()
    put(tier, make_manifest("first", 0, 1, SIZES))
    may_go_on = threading.Event()
    put_blocks = FakeObjectStore.put_blocks

    def slow_put_blocks(store: FakeObjectStore, keys: Sequence[str], blocks: Sequence[Block]) -> None:
        if np.array_equal(blocks[0], blocks_of(make_manifest("c", 0, 1, SIZES))[0]):
            assert may_go_on.wait(20)
            if is_failing:
                raise ObjectStoreError("failing")
        put_blocks(store, keys, blocks)

    monkeypatch.setattr(FakeObjectStore, "put_blocks", slow_put_blocks)
    done: list[int] = []
    for page in range(4):
        manifest = make_manifest("c", page, page + 1, SIZES)
        blocks = blocks_of(manifest, seed=page)
        assert tier.put(manifest, blocks, block_checksums(blocks), lambda page=page: done.append(page))  # type: ignore[misc]
    # Those of the other writers, beside that of the first segment.
    wait_until(lambda: len(cluster.metadata_names()) == writer._NUM_THREADS)
    time.sleep(0.02)
    assert (len(cluster.names("/f/c/")), done) == (0, [])
    assert match(other, page_keys("c", 1, 2)) == ()
    may_go_on.set()
    assert tier.flush(5.0)
    assert done == [0, 1, 2, 3]
    pointers = [key for operation, key in cluster.calls if operation == "put" and "/f/c/" in key]
    assert [key.rsplit("/", 2)[1] for key in pointers] == ([] if is_failing else ["0", "1", "2", "3"])
    assert tier.stats().skipped_segments == ({"failed": 4} if is_failing else {})
    assert tier.stats().is_suspended == is_failing


def test_a_copy_that_is_put_meanwhile_is_not_written_again(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    put(tier, make_manifest("first", 0, 1, SIZES))
    cluster.gate.clear()
    done: list[str] = []
    begin_to_put(tier, "c", done, pages=3)
    begin_to_put(tier, "c", done, pages=2)
    cluster.batches.clear()
    cluster.gate.set()
    assert tier.flush(5.0)
    assert (len(cluster.batches), len(done), tier.stats().written_segments) == (1, 2, 2)
    assert len(cluster.names("/f/c/0/")) == 1


def test_a_clear_is_seen_at_once_here_and_soon_elsewhere(
    host: Host, cluster: FakeCluster, clock: Clock
) -> None:
    one, other = host(), host()
    put(one, make_manifest("c", 0, 3, SIZES))
    (run,) = match(other, page_keys("c", 0, 3))
    another = make_model("another")
    put(one, make_manifest("c", 0, 3, SIZES, another), seed=1)
    one.clear(MODEL)
    assert match(one, page_keys("c", 0, 3)) == ()
    assert one.find_missing(MODEL, page_keys("c", 0, 3)) == [range(3)]
    assert match(host(), page_keys("c", 0, 3)) == ()
    clock.now_s += EPOCH_AGE_S
    assert match(other, page_keys("c", 0, 3)) == ()
    with pytest.raises(TierReadError, match="cleared"):
        fetch(other, run)
    assert len(match(other, page_keys("c", 0, 3), model=another)) == 1
    assert not [name for name in cluster.names("/s/") if MODEL.fingerprint in name]
    one.clear()
    clock.now_s += EPOCH_AGE_S
    assert match(other, page_keys("c", 0, 3), model=another) == ()
    assert cluster.names("/s/") == []


def test_what_was_stored_after_a_clear_is_found(host: Host, clock: Clock) -> None:
    one, other = host(), host()
    put(one, make_manifest("c", 0, 3, SIZES))
    assert match(other, page_keys("c", 0, 3)) != ()
    one.clear(MODEL)
    blocks = put(one, make_manifest("c", 0, 3, SIZES), seed=5)
    clock.now_s += EPOCH_AGE_S
    (run,) = match(other, page_keys("c", 0, 3))
    assert np.array_equal(fetch(other, run)[0][0], blocks[0])


def test_what_a_host_stores_under_an_old_epoch_is_not_found(host: Host, clock: Clock) -> None:
    """A daemon that has not heard of the clear yet."""
    one, other = host(), host()
    put(other, make_manifest("a", 0, 1, SIZES))
    one.clear(MODEL)
    put(other, make_manifest("c", 0, 3, SIZES))
    assert match(one, page_keys("c", 0, 3)) == ()
    clock.now_s += EPOCH_AGE_S
    assert match(other, page_keys("c", 0, 3)) == ()


def test_two_clears_at_once_leave_nothing(host: Host, cluster: FakeCluster, clock: Clock) -> None:
    one, other = host(), host()
    put(one, make_manifest("c", 0, 3, SIZES))
    objects = dict(cluster.objects)
    cluster.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        cleared = threads.map(lambda tier: tier.clear(MODEL), (one, other))
        cluster.gate.set()
        list(cleared)
    # Even if nothing had been removed.
    cluster.objects = {**objects, **{key: cluster.objects[key] for key in cluster.names("epoch")}}
    clock.now_s += EPOCH_AGE_S
    for tier in (one, other, host()):
        assert match(tier, page_keys("c", 0, 3)) == ()


def test_a_lost_epoch_brings_nothing_back(host: Host, cluster: FakeCluster, clock: Clock) -> None:
    put(host(), make_manifest("c", 0, 3, SIZES))
    old = {name: cluster.objects[name] for name in (*cluster.names("/s/"), *cluster.names("/f/"))}
    tier = host()
    tier.clear(MODEL)
    for name in cluster.names("epoch"):
        del cluster.objects[name]
    cluster.objects.update(old)
    clock.now_s += EPOCH_AGE_S
    put(tier, make_manifest("d", 0, 3, SIZES))
    assert match(tier, page_keys("d", 0, 3)) != ()
    assert match(tier, page_keys("c", 0, 3)) == ()
    assert match(host(), page_keys("c", 0, 3)) == ()


def test_a_clear_while_the_cluster_is_down_happens_before_anything_else(
    host: Host, cluster: FakeCluster, clock: Clock
) -> None:
    tier = host()
    put(tier, make_manifest("c", 0, 3, SIZES))
    cluster.is_down = True
    tier.clear(MODEL)
    cluster.is_down = False
    assert match(tier, page_keys("c", 0, 3)) == ()
    clock.now_s += 31
    assert match(tier, page_keys("c", 0, 3)) == ()
    assert match(host(), page_keys("c", 0, 3)) == ()


def test_a_clear_drops_what_is_queued(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    put(tier, make_manifest("a", 0, 1, SIZES))
    done: list[str] = []
    names = occupy_writers(tier, cluster, done)
    begin_to_put(tier, "waits", done)
    clearing = threading.Thread(target=tier.clear, args=(MODEL,))
    clearing.start()
    deadline_s = time.monotonic() + 5
    while "waits" not in done:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    cluster.gate.set()
    clearing.join(10)
    assert tier.flush(5.0)
    assert done == ["waits", *names]
    for name in ("a", *names, "waits"):
        assert match(tier, page_keys(name, 0, 1)) == ()
        assert match(host(), page_keys(name, 0, 1)) == ()


def test_verify_reads_what_is_known_and_discards_what_is_wrong(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    put(tier, make_manifest("a", 0, 1, SIZES))
    (damaged,) = [name.removesuffix("/m") for name in cluster.metadata_names()]
    put(tier, make_manifest("b", 0, 1, SIZES), seed=1)
    cluster.damage(f"{damaged}/0")
    ids = {info.start_token: info.segment_id for info in tier.list_segments()}
    assert len(tier.list_segments()) == 2
    report = tier.verify()
    assert (report.num_blocks, report.num_bytes, len(report.bad_segments)) == (2, sum(SIZES), 1)
    assert len(ids) == 1
    (left,) = tier.list_segments()
    assert (left.tiers, left.num_bytes) == (("mooncake",), sum(SIZES))
    assert left.segment_id not in report.bad_segments


def encoded(manifest: SegmentManifest, kind: str) -> SegmentManifest:
    return dataclasses.replace(manifest, codec_params={"kind": kind})


@pytest.mark.parametrize("is_known", [True, False])
def test_what_cannot_be_decoded_leaves_the_cluster_and_is_stored_again(
    host: Host, cluster: FakeCluster, is_known: bool
) -> None:
    writer, reader = host(), host()
    old, new = (encoded(make_manifest("c", 0, 3, SIZES), kind) for kind in ("old", "new"))
    put(writer, old)
    (kept,) = {name.split("/s/")[0] for name in cluster.metadata_names()}
    put(writer, encoded(make_manifest("d", 0, 3, SIZES), "old"), seed=1)
    if is_known:
        assert len(match(reader, old.page_keys)) == 1
        assert reader.find_missing(MODEL, old.page_keys) == []
    reader.discard(new)
    reader.discard(old)
    assert reader.find_missing(MODEL, old.page_keys) == [range(3)]
    wait_until(lambda: len(cluster.metadata_names()) == 1)
    assert match(host(), old.page_keys) == ()
    put(reader, new)
    (run,) = match(host(), old.page_keys)
    assert run.segment.manifest.codec_params == {"kind": "new"}
    assert len(match(host(), page_keys("d", 0, 3))) == 1
    assert {name.split("/s/")[0] for name in cluster.metadata_names()} == {kept}


def test_many_removals_do_not_hold_up_lookups(
    host: Host, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = host(), host()
    for name in "abc":
        put(writer, make_manifest(name, 0, 1, SIZES))
    may_remove = threading.Event()
    remove = FakeObjectStore.remove

    def slow_remove(store: FakeObjectStore, keys: Sequence[str]) -> None:
        assert may_remove.wait(20)
        remove(store, keys)

    monkeypatch.setattr(FakeObjectStore, "remove", slow_remove)
    for name in "abc":
        writer.discard(make_manifest(name, 0, 1, SIZES))
    put(reader, make_manifest("d", 0, 1, SIZES))
    try:
        assert len(match(writer, page_keys("d", 0, 1))) == 1
    finally:
        may_remove.set()
    wait_until(lambda: len(cluster.metadata_names()) == 1)


def test_removals_that_wait_are_bounded() -> None:
    calls = TimedCalls("test", 1, max_waiting=2)
    may_go_on, has_begun = threading.Event(), threading.Event()
    done: list[int] = []

    def wait() -> None:
        has_begun.set()
        assert may_go_on.wait(20)

    assert calls.begin(wait)
    assert has_begun.wait(20)
    assert [calls.begin(lambda i=i: done.append(i)) for i in range(4)] == [True, True, False, False]  # type: ignore[misc]
    may_go_on.set()
    wait_until(lambda: done == [0, 1])
    calls.close()


def test_what_cannot_be_decoded_is_not_written_if_it_waits(host: Host, cluster: FakeCluster) -> None:
    tier = host()
    put(tier, make_manifest("first", 0, 1, SIZES))
    done: list[str] = []
    names = occupy_writers(tier, cluster, done)
    for name in ("stays", "waits"):
        begin_to_put(tier, name, done)
    tier.discard(make_manifest("waits", 0, 1, SIZES))
    assert done == ["waits"]
    cluster.gate.set()
    assert tier.flush(5.0)
    assert done == ["waits", *names, "stays"]
    assert tier.find_missing(MODEL, [f"{name}/0" for name in (*names, "stays")]) == []
    assert tier.find_missing(MODEL, ["waits/0"]) == [range(1)]


def test_the_numbers_add_up(host: Host) -> None:
    tier = host(segment_bytes=300)
    for i in range(3):
        put(tier, make_manifest(f"c{i}", 0, 1, SIZES), seed=i)
        stats = tier.stats()
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes == 300
        assert stats.stored_bytes == 160 * (i + 1)
    assert (stats.num_segments, stats.num_pages, stats.written_bytes) == (3, 3, 480)
    assert tier.cost().load_s(1 << 20) > 0


def test_without_the_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(DaemonError, match=r"krul-sglang\[mooncake\]"):
        ObjectTier(OPTIONS, None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"master_address": "host"}, "master_address"),
        ({"master_address": "host:99999"}, "master_address"),
        ({"protocol": "udp"}, "protocol"),
        ({"segment_bytes": -1}, "segment_bytes"),
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"lookup_timeout_s": 0.0}, "lookup_timeout_s"),
        ({"read_timeout_s": float("nan")}, "read_timeout_s"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        dataclasses.replace(OPTIONS, **changes)  # type: ignore[arg-type]
