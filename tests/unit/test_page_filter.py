"""What says at once that a page is stored nowhere. It must never say so of one that can be found."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import lmdb
import pytest

from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.eviction import LruPolicy
from krul_backend.tiers.common.page_filter import PageFilter, digest_of
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.ssd.index import Entry, SegmentIndex
from tests.support.daemon_builders import WatchedStore, serving
from tests.support.present import present
from tests.support.ssd_builders import CAPACITY_BYTES, FILE_BYTES, open_tier
from tests.support.store_builders import lease_pages, make_model, page_keys, put, tokens_of, wait_until
from tests.support.tiered_builders import Rig

MODEL = make_model()
SIZES = (6000, 3000)


def on_disk(directory: Path, num_segments_in_dram: int = 4) -> TieredStore:
    """A daemon's store: DRAM of so many segments, and a disk."""
    host = HostStore(num_segments_in_dram * 2 * sum(SIZES), LruPolicy())
    tier = open_tier(
        directory, capacity_bytes=CAPACITY_BYTES, file_bytes=FILE_BYTES, page_filter=host.page_filter
    )
    return TieredStore(host, [tier])


def has_room(store: TieredStore, *, is_fast_copy: bool) -> bool:
    """Whether DRAM has room for a segment; what it has may all wait for the disk."""
    reservation = store.reserve(SIZES, is_fast_copy=is_fast_copy)
    if reservation is None:
        store.flush(10)
        return False
    store.abort(reservation)
    return True


def is_found(store: TieredStore, key: str) -> bool:
    lease = store.lease(MODEL, (key,), tokens_of((key,)))
    if lease is not None:
        store.release(lease)
    return lease is not None


def test_pages_of_other_processes_are_seen_and_models_are_told_apart() -> None:
    made = PageFilter()
    descriptor = os.dup(made.fileno())
    mapped = PageFilter(descriptor)
    os.close(descriptor)
    keys = [f"{number:064x}" for number in range(5000)]
    assert not any(mapped.may_have(MODEL, key) for key in keys)
    made.add(digest_of(MODEL.fingerprint, key) for key in keys)
    assert all(mapped.may_have(MODEL, key) for key in keys)
    others = sum(mapped.may_have(make_model("other"), key) for key in keys)
    assert others < 10, "5000 of 128 million bits are set"
    with pytest.raises(AssertionError, match="made"):
        mapped.add([digest_of(MODEL.fingerprint, "page")])


def test_no_bit_is_lost_when_threads_add_at_once() -> None:
    made = PageFilter()
    # Digests whose bits lie in the same few bytes.
    digests = [bit.to_bytes(8, "little") + bytes(8) for bit in range(4000)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda first: [made.add([each]) for each in digests[first::4]], range(4)))
    assert bytes(made._bytes[:500]) == b"\xff" * 500


@pytest.mark.parametrize("seed", range(3))
def test_what_can_be_found_is_never_denied(tmp_path: Path, seed: int) -> None:
    """Commits, evictions from DRAM and from the disk, fetches, clears, and new daemons on the same disk."""
    draw = random.Random(seed)
    store = on_disk(tmp_path)
    num_pages = dict.fromkeys("abcdefghijklmnop", 0)
    keys = [key for conversation in num_pages for key in page_keys(conversation, 0, 24)]
    num_found = num_of_disk = 0
    for _ in range(60):
        step, conversation = draw.random(), draw.choice([*num_pages])
        end = num_pages[conversation]
        if step < 0.7 and end < 20:
            num_pages[conversation] = end + draw.randint(1, 4)
            wait_until(partial(has_room, store, is_fast_copy=step < 0.1))
            put(store, conversation, end, num_pages[conversation], SIZES, is_fast_copy=step < 0.1)
        elif step < 0.9:
            lease = lease_pages(store, conversation, 0, max(end, 1))
            if lease is not None:
                store.prefetch(lease)
                store.release(lease)
        elif step < 0.97:
            store.flush(10)
            store.close()
            store = on_disk(tmp_path)
        else:
            store.clear()
            num_pages = dict.fromkeys(num_pages, 0)
        page_filter = present(store.page_filter)
        if draw.random() < 0.8:
            wait_until(lambda complete=page_filter: complete.is_complete)  # type: ignore[misc]
        found = [key for key in keys if is_found(store, key)]
        assert [key for key in found if not page_filter.may_have(MODEL, key)] == []
        num_found += len(found)
        num_of_disk += store.stats().tier_hit_pages["ssd"]
    store.close()
    assert num_found > 100
    assert num_of_disk > 100


def test_what_a_disk_has_may_be_stored_before_and_after_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_disk(tmp_path)
    put(store, "c", 0, 3, SIZES)
    assert store.flush(10)
    store.close()
    may_read = threading.Event()
    records = SegmentIndex.records

    def read(index: SegmentIndex) -> Iterator[tuple[int, Entry]]:
        assert may_read.wait(20)
        return records(index)

    monkeypatch.setattr(SegmentIndex, "records", read)
    store = on_disk(tmp_path)
    page_filter = present(store.page_filter)
    keys = [*page_keys("c", 0, 3), *page_keys("d", 0, 3)]
    assert [is_found(store, key) for key in keys] == [True] * 3 + [False] * 3
    assert all(page_filter.may_have(MODEL, key) for key in keys)
    may_read.set()
    wait_until(lambda: page_filter.is_complete)
    assert [page_filter.may_have(MODEL, key) for key in keys] == [True] * 3 + [False] * 3
    store.close()


def test_a_disk_whose_index_cannot_be_read_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: SegmentIndex) -> Iterator[tuple[int, Entry]]:
        raise lmdb.CorruptedError("injected")
        yield

    on_disk(tmp_path).close()
    monkeypatch.setattr(SegmentIndex, "records", fail)
    store = on_disk(tmp_path)
    put(store, "c", 0, 3, SIZES)
    assert store.flush(10), "the tier is open, and its thread is done with the index"
    assert store.page_filter is not None
    assert store.page_filter.may_have(MODEL, "nobody's page")
    store.close()


def test_a_tier_that_others_write_to_says_nothing() -> None:
    rig = Rig()
    assert rig.store.page_filter is None
    with serving(rig.store) as runtime_dir:
        store = WatchedStore(runtime_dir, model=MODEL)
        assert store.may_have(MODEL, "nobody's page")
        store.close()


def test_engines_know_what_the_others_have_stored() -> None:
    with serving(TieredStore(HostStore(4096, LruPolicy()))) as runtime_dir:
        writer, reader = (WatchedStore(runtime_dir, model=MODEL) for _ in range(2))
        assert not reader.may_have(MODEL, "c/0")
        reservation = present(writer.reserve((100, 60)))
        writer.abort(reservation)
        assert not reader.may_have(MODEL, "c/0")
        put(writer, "c", 0, 2)
        assert [reader.may_have(MODEL, key) for key in page_keys("c", 0, 3)] == [True, True, False]
        reader.clear()
        assert reader.may_have(MODEL, "c/0"), "no bit is cleared: it is asked, in vain"
        writer.close()
        reader.close()
    assert reader.may_have(MODEL, "d/0"), "nobody knows what another daemon will have"
