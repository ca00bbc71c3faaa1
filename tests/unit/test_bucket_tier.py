"""The tier in a bucket: S3, served on this machine, and a directory."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest

from krul_backend.errors import ConfigError, DaemonError, TierReadError
from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import Block, block_checksums
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.objects import BucketOptions, ObjectTier
from krul_backend.tiers.objects.bucket_client import BucketClient
from krul_backend.tiers.objects.object_client import ObjectPart, ObjectStoreError
from tests.support.local_s3 import BUCKET, local_s3
from tests.support.store_builders import make_manifest, make_model, page_keys, read_tail, tokens_of

MODEL = make_model()
SIZES = (100, 60)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with local_s3() as env:
        yield env


@pytest.fixture(params=["s3", "directory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a place of this test's own in a bucket."""
    if request.param == "directory":
        return f"file://{tmp_path}/kv"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def client(url: str) -> Iterator[BucketClient]:
    client = BucketClient(BucketOptions(url))
    yield client
    client.close()


Host = Callable[[], ObjectTier]


@pytest.fixture
def host(url: str) -> Iterator[Host]:
    """Makes tiers that share the bucket, as daemons on several hosts do."""
    tiers: list[ObjectTier] = []

    def make() -> ObjectTier:
        tiers.append(ObjectTier(BucketOptions(url, lookup_timeout_s=10.0), None))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def put(tier: ObjectTier, manifest: SegmentManifest, seed: int = 0) -> list[Block]:
    rng = np.random.default_rng(seed)
    blocks = [rng.integers(0, 256, size, dtype=np.uint8) for size in manifest.layer_num_bytes]
    assert tier.put(manifest, blocks, block_checksums(blocks, manifest.range_bytes), lambda: None)
    assert tier.flush(20.0)
    return blocks


def match(tier: ObjectTier, name: str, num_pages: int) -> tuple[PageRun[Any], ...]:
    keys = page_keys(name, 0, num_pages)
    return tier.match(MODEL, keys, tokens_of(keys), 0)


def fetch(tier: ObjectTier, run: PageRun[Any]) -> list[Block]:
    blocks = [np.zeros(size, dtype=np.uint8) for size in run.segment.manifest.layer_num_bytes]
    read_tail(tier, run, blocks, lambda layer: None)
    return blocks


def object_names(url: str) -> list[str]:
    store = obstore.store.from_url(url, client_options={"allow_http": True})
    return sorted(each["path"] for some in obstore.list(store) for each in some)


def test_objects_are_kept_by_name(client: BucketClient) -> None:
    client.put("a/1", b"first")
    client.put("a/1", b"second")
    assert client.get("a/1", 5) == b"first"
    assert client.get("a/1", 4) is None
    client.replace("a/1", b"third")
    assert client.get("a/1", 5) == b"third"
    assert client.get("a/2", 5) is None
    assert client.have_all(["a/1"])
    assert not client.have_all(["a/1", "a/2"])
    client.remove(["a/2", "a/1"])
    assert client.get("a/1", 5) is None


def test_parts_of_several_objects_are_read_at_once(client: BucketClient) -> None:
    of_one, of_two = (np.arange(start, start + 100, dtype=np.uint8) for start in (0, 100))
    client.put_blocks(["one", "two"], [of_one, of_two])
    blocks = [np.zeros(size, dtype=np.uint8) for size in (30, 100, 10, 7)]
    parts = [
        ObjectPart("one", blocks[0], 100),
        ObjectPart("two", blocks[1], 100),
        ObjectPart("none", blocks[2], 100),
        ObjectPart("one", blocks[3], 100, 93),
    ]
    assert client.get_into(parts) == [True, True, False, True]
    assert np.array_equal(blocks[0], of_one[:30])
    assert np.array_equal(blocks[1], of_two)
    assert not blocks[2].any()
    assert np.array_equal(blocks[3], of_one[93:])


def test_an_object_that_is_too_short_is_not_there(client: BucketClient) -> None:
    client.put("short", bytes(50))
    assert client.get_into([ObjectPart("short", np.zeros(60, dtype=np.uint8), 100, 40)]) == [False]


def test_nothing_is_written_after_a_read_has_failed(
    client: BucketClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks may be somebody else's by then."""
    get_ranges = client._get_ranges

    def get_ranges_slowly(parts: Sequence[ObjectPart]) -> list[bool]:
        if parts[0].key == "bad":
            raise ObjectStoreError("bad")
        time.sleep(0.3)
        return get_ranges(parts)

    monkeypatch.setattr(client, "_get_ranges", get_ranges_slowly)
    client.put("slow", bytes([1] * 10))
    block = np.zeros(10, dtype=np.uint8)
    with pytest.raises(ObjectStoreError, match="bad"):
        client.get_into([ObjectPart("bad", np.zeros(10, dtype=np.uint8), 10), ObjectPart("slow", block, 10)])
    assert block.all()


def test_what_one_host_stores_another_finds_also_later(host: Host) -> None:
    """In a bucket it outlives all hosts."""
    first = host()
    blocks = put(first, make_manifest("a", 0, 4, SIZES))
    put(first, make_manifest("a", 4, 6, SIZES), seed=1)
    first.close()
    second = host()
    runs = match(second, "a", 9)
    assert [(run.first_page, run.end_page) for run in runs] == [(0, 4), (0, 2)]
    assert all(map(np.array_equal, fetch(second, runs[0]), blocks))
    assert match(second, "b", 4) == ()


def test_a_segment_is_three_objects(host: Host, url: str) -> None:
    """Each costs a request: its blocks, its description, and a pointer. Beside them are two epochs."""
    put(host(), make_manifest("a", 0, 4, SIZES))
    names = object_names(url)
    assert [name.rpartition("/")[2] for name in names if "/s/" in name] == ["b", "m"]
    assert len(names) == 5


def test_a_part_of_a_layer_is_read_alone(host: Host) -> None:
    tier = host()
    blocks = put(tier, make_manifest("a", 0, 4, SIZES))
    (run,) = match(tier, "a", 4)
    for layer, block in enumerate(blocks):
        part = run.segment.part(layer, np.zeros(len(block) // 2, dtype=np.uint8), len(block) // 4)
        assert tier._connection.store().get_into([part]) == [True]
        assert np.array_equal(part.block, block[len(block) // 4 :][: len(part.block)])


def test_damage_is_an_error_and_leaves_the_bucket(host: Host, url: str, client: BucketClient) -> None:
    tier = host()
    put(tier, make_manifest("a", 0, 4, SIZES))
    (name,) = (name for name in object_names(url) if name.endswith("/b"))
    value = bytearray(client.get(name, 1000) or b"")
    value[20] ^= 1
    client.replace(name, bytes(value))
    (run,) = match(tier, "a", 4)
    with pytest.raises(TierReadError, match="from the bucket with a wrong checksum"):
        fetch(tier, run)
    assert not [name for name in object_names(url) if "/s/" in name]
    assert match(host(), "a", 4) == ()


def test_what_the_bucket_has_dropped_is_a_miss(host: Host, url: str, client: BucketClient) -> None:
    """As a rule of its lifecycle does."""
    tier = host()
    put(tier, make_manifest("a", 0, 4, SIZES))
    (run,) = match(tier, "a", 4)
    client.remove([name for name in object_names(url) if name.endswith("/b")])
    with pytest.raises(TierReadError, match="not in the bucket any more"):
        fetch(tier, run)
    assert match(host(), "a", 4) == ()
    put(tier, make_manifest("a", 0, 4, SIZES))
    assert len(match(host(), "a", 4)) == 1


def test_a_rule_that_drops_old_objects_spares_what_newer_ones_need(
    host: Host, url: str, client: BucketClient
) -> None:
    tier = host()
    put(tier, make_manifest("old", 0, 4, SIZES))
    old = [name for name in object_names(url) if name.startswith("krul/")]
    put(tier, make_manifest("new", 0, 4, SIZES))
    client.remove(old)
    assert match(host(), "old", 4) == ()
    assert len(match(host(), "new", 4)) == 1


def test_a_clear_empties_the_bucket(host: Host, url: str) -> None:
    tier = host()
    put(tier, make_manifest("a", 0, 4, SIZES))
    tier.clear()
    assert match(tier, "a", 4) == ()
    assert not [name for name in object_names(url) if "epoch" not in name]


def test_the_capacity_is_what_is_stored(host: Host) -> None:
    tier = host()
    put(tier, make_manifest("a", 0, 4, SIZES))
    stats = tier.stats()
    assert (stats.name, stats.capacity_bytes, stats.used_bytes, stats.free_bytes) == ("bucket", 160, 160, 0)


def test_a_storage_that_does_not_answer_suspends_the_tier(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3, "AWS_ENDPOINT": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ObjectStoreError):
        BucketClient(BucketOptions(f"s3://{BUCKET}")).get("a", 1)
    tier = ObjectTier(BucketOptions(f"s3://{BUCKET}"), None)
    put(tier, make_manifest("a", 0, 4, SIZES))
    assert tier.stats().is_suspended
    assert match(tier, "a", 4) == ()
    tier.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "my-bucket"}, "must be like s3://bucket/prefix, got 'my-bucket'"),
        ({"url": "s3://kv", "lookup_timeout_s": 0}, "lookup_timeout_s"),
        ({"url": "s3://kv", "read_timeout_s": 1e9}, "read_timeout_s"),
        ({"url": "s3://kv", "queue_bytes": 0}, "queue_bytes"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"bucket.*{message}"):
        BucketOptions(**options)


@pytest.mark.parametrize("url", ["nowhere://kv", "s3://"])
def test_a_place_that_no_storage_has_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match=url):
        ObjectTier(BucketOptions(url), None)


def test_without_the_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(DaemonError, match=r"pip install 'krul-sglang\[bucket\]'"):
        BucketClient(BucketOptions("s3://kv"))
