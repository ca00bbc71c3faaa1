from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from krul_backend.errors import ManifestError
from krul_backend.segment import tail_num_bytes
from krul_backend.tiers.common.eviction import LruPolicy
from krul_backend.tiers.common.interface import CHECKSUM_BYTES, block_checksum, block_checksums
from krul_backend.tiers.dram.host_store import HostStore
from tests.support.checksum_gate import ChecksumGate, install_gate, let_go, run_until_gate
from tests.support.present import present
from tests.support.store_builders import (
    PAGE_SIZE,
    commit_to,
    fill,
    flip_byte,
    lease_pages,
    make_manifest,
    make_model,
    offset_in,
    page_keys,
)
from tests.support.store_builders import put as put_segment

put = partial(put_segment, range_bytes=1)
"""Of ranges so short that a trim keeps exactly what it is told to."""

MODEL = make_model()
RANGE_BYTES = 64


@pytest.fixture
def store() -> Iterator[HostStore]:
    store = HostStore(4096, LruPolicy())
    yield store
    store.close()


def leased_bytes(store: HostStore, conversation: str, first: int, end: int) -> list[tuple[bytes, ...]]:
    """Blocks of each slice of a lease of these pages, all of which must be there."""
    lease = present(lease_pages(store, conversation, first, end))
    assert lease.num_pages == end - first
    blocks = [tuple(block.tobytes() for block in piece.blocks) for piece in lease.slices]
    store.release(lease)
    return blocks


def test_a_trim_keeps_the_end_of_each_block(store: HostStore) -> None:
    segment_id, written = put(store, "c", 0, 4, sizes=(200, 120))
    assert store.trim(segment_id, (4, 8), (150, 40)) == 50 + 80
    assert leased_bytes(store, "c", 0, 4) == [(written[0][50:], written[1][80:])]
    lease = present(lease_pages(store, "c", 0, 4))
    header = lease.slices[0].header
    assert (header.layer_first_token, header.layer_num_bytes) == ((4, 8), (150, 40))
    assert not any(block.flags.writeable for block in lease.slices[0].blocks)
    assert store.verify().bad_segments == ()
    stats = store.stats()
    assert (stats.trimmed_segments, stats.trimmed_bytes, stats.stored_bytes) == (1, 130, 190)
    assert (stats.num_pages, stats.stored_tokens) == (4, 16)


def test_a_trimmed_segment_is_worth_more_for_its_bytes() -> None:
    store = HostStore(1 << 15)
    segment_id, _ = put(store, "c", 0, 4, sizes=(8192, 8192))
    segment = present(store.hold(segment_id))
    before = segment.value
    store.unhold(segment)
    assert store.trim(segment_id, (16, 0), (0, 8192)) == 8192
    assert segment.value == pytest.approx(before * math.sqrt(2))


def test_what_cannot_be_freed_stays_counted_until_it_can(store: HostStore) -> None:
    segment_id, written = put(store, "c", 0, 4, sizes=(200, 120))
    assert store.stats().used_bytes == 256 + 128
    store.trim(segment_id, (4, 0), (150, 120))  # 50 of 200: no aligned byte is free
    assert store.stats().used_bytes == 256 + 128
    store.trim(segment_id, (8, 0), (130, 120))  # 70 of 200: 64 are
    assert store.stats().used_bytes == 192 + 128
    store.trim(segment_id, (12, 4), (8, 56))
    assert store.stats().used_bytes == 64 + 64
    assert leased_bytes(store, "c", 0, 4) == [(written[0][-8:], written[1][-56:])]
    store.trim(segment_id, (16, 16), (0, 0))
    stats = store.stats()
    assert (stats.used_bytes, stats.stored_bytes, stats.num_pages) == (0, 0, 4)
    assert stats.trimmed_bytes == 320
    assert leased_bytes(store, "c", 0, 4) == [(b"", b"")]


def test_freed_bytes_are_given_to_others_and_the_rest_survives(store: HostStore) -> None:
    segment_id, written = put(store, "c", 0, 4, sizes=(2048, 2048))
    assert store.stats().free_bytes == 0
    store.trim(segment_id, (8, 4), (1000, 2000))
    _, other = put(store, "other", 0, 1, sizes=(960, 1), seed=1)
    assert (store.stats().free_bytes, store.stats().evicted_segments) == (0, 0)
    assert leased_bytes(store, "c", 0, 4) == [(written[0][-1000:], written[1][-2000:])]
    assert leased_bytes(store, "other", 0, 1) == [other]
    store.clear()
    assert store.reserve((4096,)) is not None


def test_a_conversation_with_nothing_stored_of_a_segment_has_no_hole(store: HostStore) -> None:
    reservation = present(store.reserve((0, 0)))
    assert [block.nbytes for block in reservation.blocks] == [0, 0]
    manifest = dataclasses.replace(
        make_manifest("c", 0, 3, (1, 1)), layer_first_token=(12, 12), layer_num_bytes=(0, 0)
    )
    first = commit_to(store, reservation, manifest)
    second, written = put(store, "c", 3, 5)
    assert store.find_missing(MODEL, page_keys("c", 0, 6)) == [range(5, 6)]
    assert leased_bytes(store, "c", 0, 5) == [(b"", b""), written]
    assert [segment.segment_id for segment in store.path_segments(MODEL, page_keys("c", 0, 5))] == [
        first,
        second,
    ]
    assert store.verify().bad_segments == ()
    assert store.stats().used_bytes == 192


def test_some_layers_may_have_no_bytes(store: HostStore) -> None:
    reservation = present(store.reserve((0, 60)))
    written = fill(reservation, 3)
    manifest = dataclasses.replace(
        make_manifest("c", 0, 2, (1, 60)), layer_first_token=(8, 0), layer_num_bytes=(0, 60)
    )
    commit_to(store, reservation, manifest)
    assert leased_bytes(store, "c", 0, 2) == [written]
    assert store.stats().used_bytes == 64
    store.clear()
    assert store.stats().used_bytes == 0


def test_a_repeated_or_outdated_trim_drops_nothing_twice(store: HostStore) -> None:
    segment_id, written = put(store, "c", 0, 4, sizes=(200, 120))
    assert store.trim(segment_id, (4, 8), (150, 60)) == 110
    assert store.trim(segment_id, (4, 8), (150, 60)) == 0
    assert store.trim(segment_id, (0, 4), (200, 90)) == 0
    # One layer goes on from here, the other has less already.
    assert store.trim(segment_id, (8, 4), (100, 90)) == 50
    assert leased_bytes(store, "c", 0, 4) == [(written[0][-100:], written[1][-60:])]
    assert store.stats().trimmed_segments == 2


@pytest.mark.parametrize(
    ("first_tokens", "sizes", "message"),
    [
        ((4,), (50,), "1 first tokens and 1 sizes for a segment of 2 layers"),
        ((4, 0), (100,), "2 first tokens and 1 sizes"),
        ((4, 0), (101, 60), "layer 0 cannot hold the tokens from 4 on in 101 bytes"),
        ((4, 0), (100, 60), "those from 0 on take 100"),
        ((4, 0), (0, 60), "exactly the blocks of no tokens are empty"),
        ((4, 0), (-1, 60), "exactly the blocks of no tokens are empty"),
        ((12, 0), (10, 60), "exactly the blocks of no tokens are empty"),
        ((13, 0), (10, 60), "cannot hold tokens from 13 on"),
    ],
)
def test_impossible_trims_are_refused(
    store: HostStore, first_tokens: tuple[int, ...], sizes: tuple[int, ...], message: str
) -> None:
    segment_id, written = put(store, "c", 0, 3)
    with pytest.raises(ManifestError, match=message):
        store.trim(segment_id, first_tokens, sizes)
    assert leased_bytes(store, "c", 0, 3) == [written]
    assert store.trim(segment_id, (4, 4), (50, 30)) == 80


def test_what_is_gone_or_leased_is_left_alone(store: HostStore) -> None:
    segment_id, written = put(store, "c", 0, 3)
    lease = present(lease_pages(store, "c", 1, 2))
    assert store.trim(segment_id, (4, 4), (50, 30)) == 0
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    store.release(lease)
    assert store.trim(segment_id, (4, 4), (50, 30)) == 80
    store.clear()
    assert store.trim(segment_id, (8, 8), (20, 20)) == 0
    assert store.stats().trimmed_segments == 1


# Sharing


def can_trim(store: HostStore, segment_id: int) -> bool:
    segments = store.path_segments(MODEL, page_keys("c", 0, 4))
    (header,) = (segment.header for segment in segments if segment.segment_id == segment_id)
    first = header.layer_first_token[0] + 1
    return store.trim(segment_id, (first, 0), (header.layer_num_bytes[0] - 1, 60)) == 1


def put_branch(store: HostStore, name: str, at_page: int, seed: int = 9) -> int:
    """A segment of one page of another conversation, which goes on after page ``at_page - 1`` of ``c``."""
    reservation = present(store.reserve((100, 60)))
    fill(reservation, seed)
    manifest = make_manifest(name, at_page, at_page + 1, (100, 60), range_bytes=1)
    return commit_to(store, reservation, dataclasses.replace(manifest, parent_key=f"c/{at_page - 1}"))


def test_the_one_continuation_of_a_conversation_does_not_share_it(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 2)
    second, _ = put(store, "c", 2, 4)
    put(store, "c", 4, 5)
    assert can_trim(store, first)
    assert can_trim(store, second)


def test_a_second_continuation_shares_the_segment_it_continues(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 2)
    second, _ = put(store, "c", 2, 4)
    put(store, "c", 4, 5)
    put_branch(store, "b", 4)
    assert not can_trim(store, second)
    assert can_trim(store, first)


def test_a_continuation_from_the_middle_shares_the_segment(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 3)
    branch = put_branch(store, "b", 2)
    assert not can_trim(store, segment_id)
    # The one that branches off has its own pages for itself.
    assert store.trim(branch, (9, 9), (50, 30)) == 80


def damage(store: HostStore, conversation: str, first: int, end: int, layer: int, byte: int = 0) -> None:
    lease = present(lease_pages(store, conversation, first, end))
    flip_byte(store, offset_in(store, lease.slices[-1].blocks[layer]) + byte)
    store.release(lease)


def test_a_segment_is_not_shared_any_more_when_the_other_conversation_has_gone(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 3)
    put_branch(store, "b", 2)
    assert not can_trim(store, segment_id)
    damage(store, "b", 2, 3, layer=0)
    assert len(store.verify().bad_segments) == 1
    assert can_trim(store, segment_id)


def test_segments_that_hold_the_same_page_are_shared_as_long_as_both_are_there(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 2)
    second, _ = put(store, "c", 1, 4)
    assert not can_trim(store, first)
    assert not can_trim(store, second)
    damage(store, "c", 0, 2, layer=1)
    assert store.verify().bad_segments == (first,)
    assert can_trim(store, second)
    # Stored again, page 1 is in both once more, though only the new copy is found.
    put(store, "c", 0, 2)
    assert store.find_missing(MODEL, page_keys("c", 0, 4)) == []
    assert not can_trim(store, second)


def test_a_segment_that_was_dropped_at_its_commit_shares_nothing(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 2)
    put(store, "c", 2, 3)
    put(store, "c", 0, 2)
    put(store, "c", 2, 3)
    assert can_trim(store, segment_id)


def test_other_models_share_nothing(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 2)
    for i in range(2):
        put(store, "c", i, 3, model=make_model("another"), seed=i)
    assert can_trim(store, segment_id)


# Paths


def test_a_path_names_its_segments_once_and_in_order(store: HostStore) -> None:
    third, _ = put(store, "c", 5, 7)
    first, _ = put(store, "c", 0, 2)
    second, _ = put(store, "c", 1, 4)
    put(store, "d", 0, 2)
    path = store.path_segments(MODEL, page_keys("c", 0, 8))
    assert [segment.segment_id for segment in path] == [first, second, third]
    assert [segment.header.start_token for segment in path] == [0, PAGE_SIZE, 5 * PAGE_SIZE]
    assert store.path_segments(MODEL, page_keys("c", 0, 1))[0].segment_id == first
    assert store.path_segments(MODEL, ()) == []
    assert store.path_segments(make_model("another"), page_keys("c", 0, 8)) == []


# Ranges


def test_a_trim_keeps_whole_ranges_from_the_end(store: HostStore) -> None:
    """Of each block what is needed stays in ranges that are counted from its end, with their checksums."""
    segment_id, written = put_segment(store, "c", 0, 4, sizes=(200, 120), range_bytes=64)
    lease = present(lease_pages(store, "c", 0, 4))
    before = lease.slices[0].checksums
    store.release(lease)
    assert [len(checksum) // CHECKSUM_BYTES for checksum in before] == [4, 2]
    # 150 of 200 take three ranges, 40 of 120 take one.
    assert store.trim(segment_id, (4, 8), (150, 40)) == (200 - 192) + (120 - 64)
    lease = present(lease_pages(store, "c", 0, 4))
    (piece,) = lease.slices
    assert (piece.header.layer_first_token, piece.header.layer_num_bytes) == ((4, 8), (192, 64))
    assert piece.header.range_bytes == 64
    assert [block.tobytes() for block in piece.blocks] == [written[0][-192:], written[1][-64:]]
    assert piece.checksums == (before[0][CHECKSUM_BYTES:], before[1][CHECKSUM_BYTES:])
    assert piece.checksums == block_checksums(piece.blocks, 64)
    store.release(lease)
    assert store.verify().bad_segments == ()


def test_a_trim_that_would_cut_a_range_drops_nothing(store: HostStore) -> None:
    """Where the first range of a block is still needed, the block and its first token stay as they are."""
    segment_id, written = put_segment(store, "c", 0, 4, sizes=(200, 120), range_bytes=64)
    assert store.trim(segment_id, (4, 4), (193, 65)) == 0
    assert store.stats().trimmed_segments == 0
    # One layer drops a range, the other one none.
    assert store.trim(segment_id, (8, 8), (193, 64)) == 56
    lease = present(lease_pages(store, "c", 0, 4))
    assert lease.slices[0].header.layer_first_token == (0, 8)
    assert [block.tobytes() for block in lease.slices[0].blocks] == [written[0], written[1][-64:]]
    store.release(lease)
    assert store.trim(segment_id, (16, 16), (0, 0)) == 200 + 64


def test_the_default_ranges_are_sixteen_kibibytes_or_more(store: HostStore) -> None:
    """A segment of small blocks has one range each: a trim drops all of a block, or nothing."""
    segment_id, _ = put_segment(store, "c", 0, 4, sizes=(2000, 1000))
    assert store.trim(segment_id, (8, 8), (1000, 1)) == 0
    assert store.trim(segment_id, (8, 16), (1000, 0)) == 1000


# Damage


def test_damage_in_what_a_trim_keeps_is_found_later(store: HostStore) -> None:
    """A range that is kept keeps the checksum that was committed."""
    segment_id, _ = put(store, "c", 0, 3)
    damage(store, "c", 0, 3, layer=1, byte=59)
    assert store.trim(segment_id, (0, 4), (100, 30)) == 30
    assert store.verify().bad_segments == (segment_id,)
    stats = store.stats()
    assert (stats.corrupted_segments, stats.num_segments, stats.used_bytes) == (1, 0, 0)


def test_damage_in_what_is_dropped_goes_with_it(store: HostStore) -> None:
    """Damage in the dropped ranges hurts nobody: what is left is what was committed."""
    segment_id, written = put(store, "c", 0, 3)
    damage(store, "c", 0, 3, layer=0)
    damage(store, "c", 0, 3, layer=1, byte=29)
    assert store.trim(segment_id, (12, 4), (0, 30)) == 130
    assert leased_bytes(store, "c", 0, 3) == [(b"", written[1][30:])]
    assert store.verify().bad_segments == ()


def test_damage_in_a_layer_that_stays_is_found_later(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 3)
    damage(store, "c", 0, 3, layer=0)
    assert store.trim(segment_id, (0, 4), (100, 30)) == 30
    assert store.verify().bad_segments == (segment_id,)
    assert store.stats().used_bytes == 0


def test_a_trim_reads_no_block(store: HostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the lock for its whole time: it cuts, and leaves the checking to the next reader."""
    segment_id, written = put(store, "c", 0, 3)
    with monkeypatch.context() as patched:
        for module in ("common.interface", "dram.stored_segment"):
            patched.setattr(f"krul_backend.tiers.{module}.block_checksum", None)
        assert store.trim(segment_id, (8, 8), (30, 20)) == 110
    assert leased_bytes(store, "c", 0, 3) == [(written[0][-30:], written[1][-20:])]


# Races: a check waits at its first checksum, without the lock


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> ChecksumGate:
    return install_gate(monkeypatch)


def test_a_trim_during_a_check_does_nothing(store: HostStore, gate: ChecksumGate) -> None:
    segment_id, written = put(store, "c", 0, 3)
    for call in (lambda: store.report_damage(segment_id), store.verify):
        thread, results = run_until_gate(gate, call)
        assert store.trim(segment_id, (8, 8), (30, 20)) == 0
        let_go(gate, thread)
        assert not isinstance(results[0], Exception)
    assert leased_bytes(store, "c", 0, 3) == [written]
    assert store.trim(segment_id, (8, 8), (30, 20)) == 110


def test_a_lease_given_during_a_check_keeps_its_bytes(store: HostStore, gate: ChecksumGate) -> None:
    segment_id, written = put(store, "c", 0, 3)
    thread, _ = run_until_gate(gate, store.verify)
    lease = present(lease_pages(store, "c", 0, 3))
    let_go(gate, thread)
    assert store.trim(segment_id, (8, 8), (30, 20)) == 0, "it is leased"
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    assert store.stats().used_bytes == 192
    store.release(lease)
    assert store.trim(segment_id, (8, 8), (30, 20)) == 110


def test_a_segment_under_a_check_is_not_evicted(store: HostStore, gate: ChecksumGate) -> None:
    put(store, "c", 0, 3)
    thread, results = run_until_gate(gate, store.verify)
    assert store.reserve((4096,)) is None
    let_go(gate, thread)
    assert not isinstance(results[0], Exception)
    assert store.reserve((4096,)) is not None


def test_clear_during_a_check_frees_everything(store: HostStore, gate: ChecksumGate) -> None:
    segment_id, _ = put(store, "c", 0, 3)
    thread, results = run_until_gate(gate, lambda: store.report_damage(segment_id))
    store.clear()
    assert store.stats().used_bytes == 192
    let_go(gate, thread)
    assert results == [False]
    assert (store.stats().used_bytes, store.stats().corrupted_segments) == (0, 0)


def test_damage_found_under_a_lease_is_freed_at_its_release(store: HostStore, gate: ChecksumGate) -> None:
    segment_id, _ = put(store, "c", 0, 3)
    thread, results = run_until_gate(gate, lambda: store.report_damage(segment_id))
    lease = present(lease_pages(store, "c", 0, 3))
    gate.checksum = bytes(CHECKSUM_BYTES)
    let_go(gate, thread)
    assert results == [True]
    stats = store.stats()
    assert (stats.corrupted_segments, stats.num_segments, stats.used_bytes) == (1, 0, 192)
    store.release(lease)
    assert store.stats().used_bytes == 0


def test_many_threads_trim_lease_store_and_clear() -> None:
    """Whatever is leased at any moment is the end of what was written, as long as its manifest says."""
    store = HostStore(64 * 1024, LruPolicy())
    failures: list[str] = []
    num_trims = [0] * 4
    num_leases = [0] * 4

    def content(name: str, page: int, layer: int) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(f"{name} {page} {layer}".encode()))
        return rng.integers(0, 256, 1000 + 500 * layer, dtype=np.uint8)

    def work(worker: int) -> None:
        rng = np.random.default_rng(worker)
        for _ in range(400):
            name, first = f"c{rng.integers(4)}", int(rng.integers(0, 4))
            choice = rng.random()
            if choice < 0.4:
                reservation = store.reserve((1000, 1500))
                if reservation is None:
                    continue
                for layer, block in enumerate(reservation.blocks):
                    block[:] = content(name, first, layer)
                manifest = make_manifest(name, first, first + 1, (1000, 1500), range_bytes=RANGE_BYTES)
                commit_to(store, reservation, manifest)
            elif choice < 0.41:
                store.clear()
            elif choice < 0.7:
                for segment in store.path_segments(MODEL, page_keys(name, 0, 4)):
                    offset = int(rng.integers(1, PAGE_SIZE + 1))
                    start = segment.header.start_token + offset
                    sizes = tuple(size // PAGE_SIZE * (PAGE_SIZE - offset) for size in (1000, 1500))
                    num_trims[worker] += store.trim(segment.segment_id, (start, start), sizes) > 0
            else:
                lease = lease_pages(store, name, first, 4)
                if lease is None:
                    continue
                num_leases[worker] += 1
                for piece in lease.slices:
                    page = piece.header.start_token // PAGE_SIZE
                    for layer, block in enumerate(piece.blocks):
                        written = content(name, page, layer)
                        num_kept = piece.header.end_token - piece.header.layer_first_token[layer]
                        needed = num_kept * len(written) // PAGE_SIZE
                        if len(block) != tail_num_bytes(len(written), needed, RANGE_BYTES):
                            failures.append(f"{len(block)} bytes for {num_kept} tokens")
                        if not np.array_equal(block, written[len(written) - len(block) :]):
                            failures.append(f"{name} page {page} layer {layer}")
                        if block_checksum(block, RANGE_BYTES) != piece.checksums[layer]:
                            failures.append(f"checksum of {name} page {page} layer {layer}")
                store.release(lease)
            stats = store.stats()
            if stats.used_bytes + stats.free_bytes != stats.capacity_bytes:
                failures.append(f"{stats}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert failures == []
    assert min(num_trims) > 0
    assert min(num_leases) > 0
    stats = store.stats()
    assert (stats.trimmed_segments, stats.corrupted_segments) == (sum(num_trims), 0)
    assert (stats.num_leases, stats.num_reservations) == (0, 0)
    store.clear()
    assert store.stats().used_bytes == 0
    assert store.reserve((64 * 1024,)) is not None
