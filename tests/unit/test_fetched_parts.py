"""Fetches of the ends of blocks: what comes, what lies in DRAM then, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from krul_backend.errors import ManifestError, NotAdmittedError, TierReadError
from krul_backend.tiers.common.interface import Lease, SegmentSlice, SegmentTail
from krul_backend.tiers.common.lower_tier import TailRead
from krul_backend.tiers.common.read_queue import ReadPriority, of_a_load
from tests.support.daemon_builders import WatchedStore, serving
from tests.support.fake_tier import FakeTier
from tests.support.present import present
from tests.support.store_builders import (
    PAGE_SIZE,
    lease_pages,
    offset_in,
    page_keys,
    put,
    stored_ids,
    tokens_of,
    wait_until,
)
from tests.support.tiered_builders import (
    FLAGS_BYTES,
    MODEL,
    SIZES,
    TAKEN_BYTES,
    Rig,
    put_below,
    tiers_of,
    wait_for,
)

RANGE_BYTES = 20
TAIL = SegmentTail((4, 8), (55, 30))
"""Of pages 0 to 3 of a conversation in blocks of ``SIZES``: three ranges of one layer, two of the other."""
KEPT = (60, 40)

below = partial(put_below, range_bytes=RANGE_BYTES)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing(Rig()) as rig:
        yield rig


def leased(rig: Rig, name: str, first: int, end: int) -> Lease:
    return present(lease_pages(rig.store, name, first, end))


def ends_of(content: Sequence[bytes], kept: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(block[len(block) - size :] for block, size in zip(content, kept, strict=True))


def fetch_part(rig: Rig, name: str, first: int, end: int, *tails: SegmentTail | None) -> list[SegmentSlice]:
    """Fetch parts of segments, wait until they are ordinary ones, and release them."""
    before = rig.store.stats().fetched_segments
    lease = leased(rig, name, first, end)
    pieces = rig.store.fetch(lease, tails)
    wait_for(pieces)
    num_read = sum(piece.tier != "dram" for piece in pieces)
    wait_until(lambda: rig.store.stats().fetched_segments == before + num_read)
    rig.store.release(lease)
    return list(pieces)


def assert_adds_up(rig: Rig) -> None:
    stats = rig.store.stats()
    assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes


# What comes


def test_only_the_ranges_of_the_ends_come(rig: Rig) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    (piece,) = rig.store.fetch(lease, [TAIL])
    assert wait_for((piece,)) == [ends_of(content, KEPT)]
    assert rig.ssd.num_bytes_read == sum(KEPT)
    header = piece.header
    assert (header.layer_first_token, header.layer_num_bytes) == (TAIL.layer_first_token, KEPT)
    assert (header.range_bytes, header.start_token, header.num_tokens) == (RANGE_BYTES, 0, 12)
    assert [len(checksum) // 8 for checksum in piece.checksums] == [3, 2]
    assert not any(block.flags.writeable for block in piece.blocks)
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()


def test_what_was_fetched_in_part_lies_in_dram_like_a_trimmed_segment(rig: Rig) -> None:
    """Later leases find it there, see from where on its layers are stored, and read no lower tier."""
    _, content = below(rig.ssd, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    assert rig.store.find_missing(MODEL, page_keys("c", 0, 3)) == []
    lease = leased(rig, "c", 0, 3)
    assert tiers_of(lease) == [("dram", 3)]
    (piece,) = lease.slices
    assert piece.header.layer_first_token == TAIL.layer_first_token
    assert wait_for((piece,)) == [ends_of(content, KEPT)]
    # Whoever asks for more gets what is there, which it was told before.
    assert wait_for(rig.store.fetch(lease)) == [ends_of(content, KEPT)]
    assert wait_for(rig.store.fetch(lease, [None])) == [ends_of(content, KEPT)]
    assert (rig.ssd.num_reads, rig.ssd.num_bytes_read) == (1, sum(KEPT))
    (path,) = rig.store.path_segments(MODEL, page_keys("c", 0, 3))
    assert path.header.layer_first_token == TAIL.layer_first_token
    stats = rig.store.stats()
    assert (stats.stored_bytes, stats.stored_tokens, stats.num_pages) == (sum(KEPT), 12, 3)
    # The flags of its arrival stay as long as it does.
    assert stats.used_bytes == 2 * 64 + FLAGS_BYTES
    assert rig.store.verify().bad_segments == ()
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_a_part_can_be_trimmed_further(rig: Rig) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    (segment_id,) = stored_ids(rig.host)
    assert rig.store.trim(segment_id, (8, 12), (25, 0)) == 20 + 40
    lease = leased(rig, "c", 0, 3)
    assert wait_for(lease.slices) == [ends_of(content, (40, 0))]
    rig.store.release(lease)
    assert_adds_up(rig)
    rig.assert_nothing_is_held()


def test_slices_after_the_last_tail_stay_where_they_are(rig: Rig) -> None:
    _, first = below(rig.ssd, "c", 0, 3)
    _, second = below(rig.ssd, "c", 3, 5)
    lease = leased(rig, "c", 0, 5)
    assert wait_for(rig.store.fetch(lease, [TAIL])) == [ends_of(first, KEPT)]
    assert (rig.ssd.num_reads, rig.ssd.num_holds) == (1, 1)
    assert rig.store.fetch(lease, []) == ()
    # They can be fetched later, by the same lease.
    pieces = rig.store.fetch(lease, [TAIL, None])
    assert wait_for(pieces) == [ends_of(first, KEPT), second]
    assert rig.ssd.num_reads == 2
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 2)
    rig.assert_nothing_is_held()


def test_fewer_tails_than_slices_of_dram_leave_what_follows(rig: Rig) -> None:
    """Ranks agreed on a prefix that ends among the segments in DRAM; what lies below is not touched."""
    _, first = put(rig.store, "c", 0, 2, SIZES)
    _, second = put(rig.store, "c", 2, 4, SIZES)
    assert rig.store.flush(10)
    below(rig.ssd, "c", 4, 7)
    lease = leased(rig, "c", 0, 7)
    assert tiers_of(lease) == [("dram", 2), ("dram", 2), ("ssd", 3)]
    assert wait_for(rig.store.fetch(lease, [None])) == [first]
    assert wait_for(rig.store.fetch(lease, [None, None])) == [first, second]
    assert rig.ssd.num_reads == 0
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_more_tails_than_slices_do_no_harm(rig: Rig) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    assert wait_for(rig.store.fetch(lease, [None, TAIL, TAIL])) == [content]
    rig.store.release(lease)


def test_tails_count_slices_across_tiers(rig: Rig) -> None:
    """Two in DRAM, two of the disk, one of the cluster: each gets its own."""
    _, first = put(rig.store, "c", 0, 2, SIZES)
    _, second = put(rig.store, "c", 2, 4, SIZES)
    assert rig.store.flush(10)
    _, third = below(rig.ssd, "c", 4, 7)
    _, fourth = below(rig.ssd, "c", 7, 10)
    _, fifth = below(rig.mooncake, "c", 10, 13)
    lease = leased(rig, "c", 0, 13)
    assert tiers_of(lease) == [("dram", 2), ("dram", 2), ("ssd", 3), ("ssd", 3), ("mooncake", 3)]

    def tail(first_page: int) -> SegmentTail:
        start = first_page * PAGE_SIZE
        firsts = tuple(start + first for first in TAIL.layer_first_token)
        return SegmentTail(firsts, TAIL.layer_num_bytes)

    pieces = rig.store.fetch(lease, [None, None, tail(4), None, tail(10)])
    assert wait_for(pieces) == [first, second, ends_of(third, KEPT), fourth, ends_of(fifth, KEPT)]
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    rig.assert_nothing_is_held()


def test_a_layer_of_which_nothing_is_read_lands_too(rig: Rig) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    pieces = rig.store.fetch(lease, [SegmentTail((12, 8), (0, 30))])
    assert wait_for(pieces) == [(b"", content[1][-40:])]
    assert rig.ssd.num_bytes_read == 40
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()


@pytest.mark.parametrize(
    "tail",
    [
        SegmentTail((4,), (55,)),
        SegmentTail((4, 8), (100, 30)),
        SegmentTail((4, 8), (55, 0)),
        SegmentTail((4, 13), (55, 10)),
    ],
)
def test_ends_that_the_segment_cannot_have_are_refused(rig: Rig, tail: SegmentTail) -> None:
    """Nothing is read or held for them, and the lease can still be fetched."""
    _, content = below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    with pytest.raises(ManifestError):
        rig.store.fetch(lease, [tail])
    assert rig.ssd.num_reads == 0
    assert rig.store.stats().used_bytes == 0
    assert wait_for(rig.store.fetch(lease)) == [content]
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()


# Order, and one failure among many


class OrderedTier(FakeTier):
    """Notes the first page of the segment and the layer of all that lands."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []

    def fetch(self, reads: Sequence[TailRead], priority: Callable[[], ReadPriority] = of_a_load) -> None:
        for read in reads:
            read.landed = partial(self._land, read, read.landed)
        super().fetch(reads, priority)

    def _land(self, read: TailRead, landed: object, layer: int) -> None:
        self.order.append((read.run.segment.manifest.page_keys[0], layer))
        landed(layer)  # type: ignore[operator]


def test_a_tier_reads_all_segments_of_a_lease_in_one_go() -> None:
    """So that it can bring layer 0 of all of them before layer 1 of any."""
    tier = OrderedTier()
    rig = Rig(ssd=tier)
    contents = [below(tier, "c", first, first + 2)[1] for first in (0, 2, 4)]
    lease = leased(rig, "c", 0, 6)
    assert wait_for(rig.store.fetch(lease)) == contents
    rig.store.release(lease)
    assert (tier.num_fetches, tier.num_reads) == (1, 3)
    assert tier.order == [(f"c/{page}", layer) for layer in range(2) for page in (0, 2, 4)]
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    rig.assert_nothing_is_held()
    rig.store.close()


def test_what_is_prefetched_of_a_conversation_is_read_together() -> None:
    """So that its load finds the first layers of all segments first. Another load has a thread of its own."""
    tier = OrderedTier()
    rig = Rig(ssd=tier)
    for first in (0, 2, 4):
        below(tier, "prefetched", first, first + 2)
    keys = page_keys("prefetched", 0, 6)
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 6
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    assert tier.order == [(f"prefetched/{page}", layer) for layer in range(2) for page in (0, 2, 4)]
    rig.assert_nothing_is_held()
    rig.store.close()


def test_wrong_bytes_of_one_segment_fail_that_one_alone(rig: Rig) -> None:
    """A conversation in three segments: the second is damaged on the disk, the others come."""
    contents = [below(rig.ssd, "c", first, first + 2)[1] for first in (0, 2, 4)]
    (_, record, _) = rig.ssd.records.values()
    record.content = (bytes(99) + b"x", record.content[1])
    lease = leased(rig, "c", 0, 6)
    pieces = rig.store.fetch(lease)
    wait_until(lambda: rig.store.stats().failed_fetches == 1)
    wait_until(lambda: rig.store.stats().fetched_segments == 2)
    assert wait_for((pieces[0], pieces[2])) == [contents[0], contents[2]]
    assert pieces[1].status is not None
    for layer in range(2):
        with pytest.raises(TierReadError, match="could not be read"):
            pieces[1].status.wait(layer, 10)
    rig.store.release(lease)
    assert rig.host.find_missing(MODEL, page_keys("c", 0, 6)) == [range(2, 4)]
    rig.assert_nothing_is_held()


def test_a_medium_that_fails_ends_what_has_not_landed(rig: Rig) -> None:
    for first in (0, 2):
        below(rig.ssd, "c", first, first + 2)
    rig.ssd.fail_after = 1
    lease = leased(rig, "c", 0, 4)
    pieces = rig.store.fetch(lease, [None, None])
    wait_until(lambda: rig.store.stats().failed_fetches == 2)
    for piece in pieces:
        assert piece.status is not None
        assert piece.status.has_landed(0)
        with pytest.raises(TierReadError, match="could not be read"):
            piece.status.wait(1, 10)
    rig.store.release(lease)
    assert rig.store.stats().used_bytes == 0
    rig.assert_nothing_is_held()


def test_no_room_for_a_later_segment_still_brings_the_earlier_ones() -> None:
    rig = Rig(capacity_bytes=TAKEN_BYTES + FLAGS_BYTES + 64)
    _, content = below(rig.ssd, "c", 0, 2)
    below(rig.ssd, "c", 2, 4)
    lease = leased(rig, "c", 0, 4)
    with pytest.raises(TierReadError, match="no room in DRAM"):
        rig.store.fetch(lease)
    assert wait_for(rig.store.fetch(lease, [None])) == [content]
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()
    rig.store.close()


def test_ends_need_only_the_room_that_they_take() -> None:
    """Where a whole segment does not fit, its end may."""
    rig = Rig(capacity_bytes=2 * 64 + FLAGS_BYTES)
    _, content = below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    with pytest.raises(TierReadError, match="no room in DRAM"):
        rig.store.fetch(lease)
    assert wait_for(rig.store.fetch(lease, [TAIL])) == [ends_of(content, KEPT)]
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()
    rig.store.close()


# Several that want the same segment

LESS = SegmentTail((8, 8), (20, 30))
MORE = SegmentTail((4, 4), (70, 40))


def test_a_part_that_has_enough_is_used_by_who_wants_less(rig: Rig) -> None:
    """Both leases were given while only the disk had the segment."""
    _, content = below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    (piece,) = rig.store.fetch(lease, [LESS])
    assert piece.tier == "dram"
    assert wait_for((piece,)) == [ends_of(content, KEPT)]
    assert (rig.ssd.num_reads, rig.ssd.num_holds) == (1, 0)
    rig.store.release(lease)
    rig.assert_nothing_is_held()


@pytest.mark.parametrize(("tail", "kept"), [(MORE, (80, 40)), (None, SIZES)])
def test_who_was_promised_more_than_a_part_has_gets_it(
    rig: Rig, tail: SegmentTail | None, kept: tuple[int, ...]
) -> None:
    """What that lacks is read, and completes it for others, too."""
    _, content = below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    (part_id,) = stored_ids(rig.host)
    (piece,) = rig.store.fetch(lease, [tail])
    assert piece.segment_id != part_id
    assert wait_for((piece,)) == [ends_of(content, kept)]
    wait_until(lambda: rig.store.stats().fetched_segments == 2)
    assert stored_ids(rig.host) == [piece.segment_id]
    rig.store.release(lease)
    assert rig.store.stats().used_bytes == 128 + 64 + FLAGS_BYTES
    assert (rig.ssd.num_puts, rig.mooncake.num_puts) == (0, 0)
    rig.assert_nothing_is_held()


def test_a_part_on_its_way_is_joined_by_who_wants_no_more(rig: Rig) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    rig.ssd.reads_go_on.clear()
    early, first = leased(rig, "c", 0, 3), leased(rig, "c", 0, 3)
    (piece,) = rig.store.fetch(first, [TAIL])
    # Given while it arrives: it shows what comes, as a segment of its tier.
    late = leased(rig, "c", 0, 3)
    assert tiers_of(late) == [("ssd", 3)]
    assert late.slices[0].header.layer_first_token == TAIL.layer_first_token
    joined = (*rig.store.fetch(early, [LESS]), *rig.store.fetch(late))
    assert {other.segment_id for other in joined} == {piece.segment_id}
    rig.ssd.reads_go_on.set()
    assert wait_for((piece, *joined)) == [ends_of(content, KEPT)] * 3
    assert rig.ssd.num_reads == 1
    for lease in (early, first, late):
        rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()


def test_a_whole_prefetch_on_its_way_is_enough_for_any_end(rig: Rig) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    rig.ssd.reads_go_on.clear()
    lease = leased(rig, "c", 0, 3)
    keys = page_keys("c", 0, 3)
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 3
    pieces = rig.store.fetch(lease, [TAIL])
    rig.ssd.reads_go_on.set()
    assert wait_for(pieces) == [content]
    assert rig.ssd.num_reads == 1
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("first_page", [0, 1, 2])
def test_a_lease_of_some_pages_takes_a_part_that_holds_these(rig: Rig, first_page: int) -> None:
    """Layers of the copy may lack tokens before the first page that was leased."""
    below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", first_page, 3)
    fetch_part(rig, "c", 0, 3, SegmentTail((8, 4), (30, 40)))
    (piece,) = rig.store.fetch(lease)
    # Layer 0 is there from page 2 on.
    assert (piece.tier == "dram") == (first_page == 2)
    wait_for((piece,))
    rig.store.release(lease)


def test_a_fetch_of_a_model_that_was_cleared_meanwhile_leaves_nothing(rig: Rig) -> None:
    below(rig.ssd, "c", 0, 3)
    lease = leased(rig, "c", 0, 3)
    rig.store.clear(MODEL)
    rig.store.fetch(lease, [TAIL])
    assert rig.store.find_missing(MODEL, page_keys("c", 0, 3)) == [range(3)]
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().used_bytes == 0)
    rig.assert_nothing_is_held()


# Other tiers


def test_a_part_is_not_written_to_the_tiers_above_its_own(rig: Rig) -> None:
    """What came whole is."""
    _, whole = below(rig.mooncake, "whole", 0, 3)
    below(rig.mooncake, "part", 0, 3)
    fetch_part(rig, "part", 0, 3, TAIL)
    fetch_part(rig, "whole", 0, 3, SegmentTail((0, 0), SIZES))
    assert rig.store.flush(10)
    assert [manifest.page_keys[0] for manifest in rig.ssd.puts] == ["whole/0"]
    (record,) = rig.ssd.records.values()
    assert record.content == whole
    assert rig.mooncake.num_puts == 0
    rig.assert_nothing_is_held()


def test_a_part_that_a_tier_needs_before_its_continuation_says_that_it_is_one(rig: Rig) -> None:
    """The next turn is stored while of the one before DRAM has only the end, which came from the cluster."""
    _, content = below(rig.mooncake, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    _, next_turn = put(rig.store, "c", 3, 5, SIZES)
    assert rig.store.flush(10)
    records = rig.ssd.records.values()
    before, after = sorted(records, key=lambda record: record.manifest.start_token)
    assert before.manifest.layer_first_token == TAIL.layer_first_token
    assert before.manifest.layer_num_bytes == KEPT
    assert before.content == ends_of(content, KEPT)
    assert after.content == next_turn
    # The whole one stays where it was.
    assert next(iter(rig.mooncake.records.values())).content == content
    # And who finds the conversation below is told what there is of it.
    rig.host.clear()
    lease = leased(rig, "c", 0, 5)
    assert [piece.header.layer_first_token for piece in lease.slices] == [TAIL.layer_first_token, (12, 12)]
    assert wait_for(rig.store.fetch(lease)) == [ends_of(content, KEPT), next_turn]
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    rig.assert_nothing_is_held()


def test_what_cannot_be_decoded_leaves_every_tier_although_dram_has_a_part(rig: Rig) -> None:
    below(rig.ssd, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    (segment_id,) = stored_ids(rig.host)
    assert rig.store.report_damage(segment_id, "undecodable")
    assert rig.store.find_missing(MODEL, page_keys("c", 0, 3)) == [range(3)]
    assert rig.ssd.records == {}


def test_a_damaged_part_is_dropped_and_the_whole_one_found_again(rig: Rig) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    lease = leased(rig, "c", 0, 3)
    (piece,) = lease.slices
    rig.host.buffer[offset_in(rig.host, piece.blocks[1])] ^= 0x10
    assert rig.store.report_damage(piece.segment_id)
    rig.store.release(lease)
    assert rig.store.stats().used_bytes == 0
    lease = leased(rig, "c", 0, 3)
    assert tiers_of(lease) == [("ssd", 3)]
    assert wait_for(rig.store.fetch(lease)) == [content]
    rig.store.release(lease)


def test_a_part_is_evicted_like_any_segment(rig: Rig) -> None:
    """Then the whole one is found below again."""
    _, content = below(rig.ssd, "c", 0, 3)
    fetch_part(rig, "c", 0, 3, TAIL)
    reservation = present(rig.store.reserve((rig.store.stats().capacity_bytes,)))
    stats = rig.store.stats()
    assert (stats.evicted_segments, stats.evicted_bytes, stats.num_pages) == (1, sum(KEPT), 0)
    assert_adds_up(rig)
    rig.store.abort(reservation)
    lease = leased(rig, "c", 0, 3)
    assert lease.slices[0].header.layer_first_token == (0, 0)
    assert wait_for(rig.store.fetch(lease)) == [content]
    rig.store.release(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 2)
    rig.assert_nothing_is_held()


# Through a daemon


@pytest.fixture
def client(rig: Rig) -> Iterator[WatchedStore]:
    with serving(rig.store) as runtime_dir:
        store = WatchedStore(runtime_dir, model=MODEL, request_timeout_s=10.0)
        yield store
        store.close()


def test_a_daemons_client_fetches_ends(rig: Rig, client: WatchedStore) -> None:
    _, first = below(rig.ssd, "c", 0, 3)
    _, second = below(rig.ssd, "c", 3, 6)
    _, third = below(rig.ssd, "c", 6, 8)
    lease = present(lease_pages(client, "c", 0, 8))
    pieces = client.fetch(lease, [TAIL, None])
    assert wait_for(pieces) == [ends_of(first, KEPT), second]
    assert [piece.header.layer_first_token for piece in pieces] == [TAIL.layer_first_token, (12, 12)]
    assert rig.ssd.num_bytes_read == sum(KEPT) + sum(SIZES)
    assert wait_for(client.fetch(lease)) == [ends_of(first, KEPT), second, third]
    client.release(lease)
    wait_until(lambda: client.stats().fetched_segments == 3)
    again = present(lease_pages(client, "c", 0, 8))
    assert again.is_in_dram
    assert client.fetch(again, [None]) == again.slices[:1]
    assert client.fetch(again, [TAIL, TAIL]) == again.slices[:2]
    client.release(again)


def test_a_daemons_client_is_told_of_ends_that_cannot_be(rig: Rig, client: WatchedStore) -> None:
    _, content = below(rig.ssd, "c", 0, 3)
    lease = present(lease_pages(client, "c", 0, 3))
    with pytest.raises(ManifestError, match="cannot hold the tokens from 4 on in 100 bytes"):
        client.fetch(lease, [SegmentTail((4, 8), (100, 30))])
    assert wait_for(client.fetch(lease)) == [content]
    client.release(lease)


# Any history

NUM_SEGMENTS = 3
PAGES = 3
CAPACITY_BYTES = 2 * (TAKEN_BYTES + FLAGS_BYTES)
names = st.sampled_from(["c", "d"])


class PartsMachine(RuleBasedStateMachine):
    """Leases, fetches of any ends, releases and evictions, in any order: what is read is always the end of
    what was stored, holds what the lease was promised, and every byte is accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(CAPACITY_BYTES)
        self.contents = {
            (name, first): below(self.rig.ssd, name, first, first + PAGES)[1]
            for name in ("c", "d")
            for first in range(0, NUM_SEGMENTS * PAGES, PAGES)
        }
        self.leases: list[tuple[str, Lease]] = []
        # Slices by lease that were fetched before: they stay what they were.
        self.fetched: dict[int, set[int]] = {}

    @rule(name=names, first_page=st.integers(0, 4), num_pages=st.integers(1, 6))
    def lease(self, name: str, first_page: int, num_pages: int) -> None:
        lease = lease_pages(self.rig.store, name, first_page, first_page + num_pages)
        if lease is not None:
            self.leases.append((name, lease))
            for piece in lease.slices:
                if piece.blocks:
                    self.check(name, piece)

    @precondition(lambda self: self.leases)
    @rule(choice=st.integers(0, 99), data=st.data())
    def fetch(self, choice: int, data: st.DataObject) -> None:
        name, lease = self.leases[choice % len(self.leases)]
        num_wanted = data.draw(st.integers(0, len(lease.slices)))
        tails: list[SegmentTail | None] = []
        for piece in lease.slices[:num_wanted]:
            start, end = piece.header.start_token, piece.header.end_token
            firsts = [data.draw(st.integers(start, end)) for _ in SIZES]
            tails.append(data.draw(st.sampled_from([None, self.tail(firsts, end)])))
        fetched_before = self.fetched.setdefault(lease.lease_id, set())
        seen = set(fetched_before)
        # Also what comes before one for which there is no room.
        fetched_before.update(promised.segment_id for promised in lease.slices[:num_wanted])
        try:
            pieces = self.rig.store.fetch(lease, tails)
        except NotAdmittedError:
            return
        assert len(pieces) == num_wanted
        wait_for(pieces)
        for promised, tail, piece in zip(lease.slices, tails, pieces, strict=False):
            self.check(name, piece)
            first_leased = piece.header.start_token + promised.first_page * PAGE_SIZE
            if promised.tier != "dram" and promised.segment_id not in seen:
                for layer, first in enumerate(piece.header.layer_first_token):
                    wanted = promised.header.layer_first_token[layer]
                    if tail is not None:
                        wanted = max(wanted, tail.layer_first_token[layer])
                    assert first <= max(wanted, first_leased)

    @precondition(lambda self: self.leases)
    @rule(choice=st.integers(0, 99))
    def release(self, choice: int) -> None:
        _, lease = self.leases.pop(choice % len(self.leases))
        self.rig.store.release(lease)

    @rule(num_bytes=st.integers(1, CAPACITY_BYTES))
    def evict(self, num_bytes: int) -> None:
        reservation = self.rig.store.reserve((num_bytes,))
        if reservation is not None:
            self.rig.store.abort(reservation)

    @rule()
    def verify(self) -> None:
        assert self.rig.store.verify().bad_segments == ()

    @invariant()
    def adds_up(self) -> None:
        stats = self.rig.store.stats()
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
        assert stats.num_leases == len(self.leases)
        assert (self.rig.ssd.num_puts, stats.corrupted_segments) == (0, 0)
        listed = self.rig.host.list_segments()
        assert sum(info.num_bytes for info in listed) == stats.stored_bytes

    def teardown(self) -> None:
        while self.leases:
            self.release(0)
        wait_until(lambda: self.rig.ssd.num_holds == 0)
        self.rig.assert_nothing_is_held()
        self.rig.store.close()

    def check(self, name: str, piece: SegmentSlice) -> None:
        """A slice's blocks are the ends of what was stored, and hold what its header says."""
        header = piece.header
        content = self.contents[name, header.start_token // PAGE_SIZE]
        blocks = tuple(block.tobytes() for block in piece.blocks)
        assert blocks == ends_of(content, header.layer_num_bytes)
        for layer, first in enumerate(header.layer_first_token):
            needed = self.tail([first] * len(SIZES), header.end_token).layer_num_bytes[layer]
            assert header.layer_num_bytes[layer] >= min(needed, SIZES[layer])

    @staticmethod
    def tail(first_tokens: Sequence[int], end_token: int) -> SegmentTail:
        """About as many bytes for each token; a token in the front of the block costs the rest."""
        num_tokens = PAGES * PAGE_SIZE
        sizes = tuple(
            size * (end_token - first) // num_tokens for size, first in zip(SIZES, first_tokens, strict=True)
        )
        return SegmentTail(tuple(first_tokens), sizes)


TestParts = PartsMachine.TestCase
TestParts.settings = settings(max_examples=100, stateful_step_count=30)
