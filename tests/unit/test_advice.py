"""Hints about stored conversations: names, comebacks, drops; bounds of all of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from krul_backend.planner.interface import TierCost
from krul_backend.segment import SegmentManifest
from krul_backend.store.advice import MARGIN_S, SessionNames
from krul_backend.store.comebacks import Comeback, Comebacks
from krul_backend.tiers.common.hint import Hint, SessionName
from tests.support.present import present
from tests.support.store_builders import (
    Clock,
    commit_to,
    fill,
    lease_pages,
    make_model,
    page_keys,
    put,
    tokens_of,
    wait_until,
)
from tests.support.tiered_builders import MODEL, Rig, is_in_dram, put_below, put_in_dram

AGENT = SessionName("", "agent")


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.assert_nothing_is_held()
    rig.store.close()


def name(rig: Rig, conversation: str, num_pages: int, session: SessionName = AGENT) -> None:
    """As the end of a turn does."""
    rig.store.advise(Hint(), model=MODEL, page_keys=page_keys(conversation, 0, num_pages), session=session)


# Names


def test_a_named_conversation_can_be_advised_without_its_pages(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 2)
    put_in_dram(rig, "c", 2, 4)
    name(rig, "c", 4)
    assert rig.store.stats().named_conversations == 1
    assert rig.store.stats().hints == 0, "a name alone is no hint"
    assert rig.store.advise(Hint(ttl_s=60.0), session=AGENT) == 4
    assert [info.pinned_s > 0 for info in rig.store.list_segments()] == [True, True]
    assert rig.store.advise(Hint(ttl_s=0), session=AGENT) == 0
    assert rig.store.stats().pinned_bytes == 0
    assert rig.store.stats().hints == 2


def test_a_name_follows_its_conversation_and_belongs_to_a_tenant(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 2)
    name(rig, "c", 2)
    put_in_dram(rig, "c", 2, 3)
    name(rig, "c", 3)
    assert rig.store.advise(Hint(priority=80), session=AGENT) == 3
    with pytest.raises(KeyError, match="'agent'"):
        rig.store.advise(Hint(priority=80), session=SessionName("tenant", "agent"))
    with pytest.raises(KeyError, match="'other'"):
        rig.store.advise(Hint(priority=80), session=SessionName("", "other"))


def test_a_name_stands_for_every_rank() -> None:
    names = SessionNames()
    ranks = [make_model(f"rank-{i}") for i in range(2)]
    for rank in ranks:
        names.put(AGENT, rank, ["c/1"])
    names.put(AGENT, ranks[0], ["c/2"])
    assert set(names.get(AGENT)) == {(ranks[1], ("c/1",)), (ranks[0], ("c/1", "c/2"))}
    # Of a server whose weights change often the latest models stay.
    for i in range(100):
        names.put(AGENT, make_model(f"weights-{i}"), ["c/3"])
    assert len(names.get(AGENT)) == 16
    assert names.get(AGENT)[-1][0].name == "weights-99"


def test_of_a_name_the_last_ends_are_kept() -> None:
    names = SessionNames()
    names.put(AGENT, MODEL, ["a", "b", "c"])
    # A turn that takes an earlier one back.
    names.put(AGENT, MODEL, ["a", "b", "d"])
    names.put(AGENT, MODEL, ["b"])
    assert names.get(AGENT) == ((MODEL, ("c", "a", "d", "b")),)
    for i in range(100):
        names.put(AGENT, MODEL, [f"{i}"])
    assert names.get(AGENT) == ((MODEL, tuple(f"{i}" for i in range(84, 100))),)


def test_a_name_stands_for_what_is_left_of_its_conversation(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 2)
    ids = [put_in_dram(rig, "c", 2, 3)[0], put_in_dram(rig, "c", 3, 5)[0]]
    name(rig, "c", 5)
    for segment_id, num_left in zip(reversed(ids), (3, 2), strict=True):
        # As eviction does: the last one first.
        manifest = present(rig.host.manifest_of(segment_id))
        rig.host.discard(manifest)
        assert rig.store.advise(Hint(priority=80), session=AGENT) == num_left
    # A turn that was not stored takes nothing away.
    name(rig, "c", 6)
    assert rig.store.advise(Hint(priority=80), session=AGENT) == 2
    rig.host.clear()
    with pytest.raises(KeyError, match="nothing is stored"):
        rig.store.advise(Hint(priority=80), session=AGENT)


def test_a_drop_by_name_reaches_earlier_ends(rig: Rig) -> None:
    put(rig.store, "system", 0, 2)
    keys = {branch: (*page_keys("system", 0, 2), *page_keys(branch, 2, 3)) for branch in "ab"}
    for branch in "ab":
        put_branch(rig, branch)
        rig.store.advise(Hint(), model=MODEL, page_keys=keys[branch], session=AGENT)
    rig.store.flush(10)
    rig.store.advise(Hint(drop=True), session=AGENT)
    assert [rig.store.find_missing(MODEL, keys[branch]) for branch in "ab"] == [[range(3)]] * 2
    assert rig.store.stats().used_bytes == 0


def test_nothing_that_a_hint_could_be_about_is_an_error(rig: Rig) -> None:
    with pytest.raises(ValueError, match="neither was given"):
        rig.store.advise(Hint(ttl_s=1.0))
    assert rig.store.advise(Hint(ttl_s=1.0), model=MODEL, page_keys=page_keys("c", 0, 2)) == 0
    name(rig, "gone", 2)
    with pytest.raises(KeyError, match="nothing is stored"):
        rig.store.advise(Hint(ttl_s=1.0), session=AGENT)


def test_a_million_names_are_bounded_in_number_and_memory() -> None:
    names = SessionNames(max_names=1_000)
    for i in range(1_000_000):
        names.put(SessionName("", f"agent-{i}"), MODEL, [f"{i:064x}"])
    assert len(names) == 1_000
    assert names.get(SessionName("", "agent-999999")) == ((MODEL, (f"{999_999:064x}",)),)
    assert names.get(SessionName("", "agent-998999")) == ()
    tracemalloc.start()
    try:
        for i in range(2_000):
            names.put(SessionName("", f"{'n' * 200}{i}"), MODEL, [f"{i:064x}"])
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # All names were replaced while it was traced: 100,000 take less than 60 MB.
    assert len(names) == 1_000
    assert grown_bytes < 1_000 * 600


def test_the_least_recently_used_name_leaves() -> None:
    names = SessionNames(max_names=2)
    first, second, third = (SessionName("", text) for text in "abc")
    names.put(first, MODEL, ["1"])
    names.put(second, MODEL, ["2"])
    assert names.get(first) == ((MODEL, ("1",)),)
    names.put(third, MODEL, ["3"])
    assert (names.get(second), len(names)) == ((), 2)


# Lower tiers


def test_a_prefetch_brings_what_lies_below(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 2)
    put_below(rig.mooncake, "c", 2, 4)
    name(rig, "c", 4)
    assert rig.store.advise(Hint(prefetch=True, ttl_s=60.0), session=AGENT) == 4
    wait_until(lambda: rig.store.stats().fetched_segments == 2)
    assert is_in_dram(rig, "c", 0, 4)
    assert rig.store.stats().comeback_pages == 4
    assert rig.store.stats().pinned_bytes > 0
    # Again: nothing is read twice.
    rig.store.advise(Hint(prefetch=True), session=AGENT)
    assert (rig.ssd.num_reads, rig.mooncake.num_reads) == (1, 1)
    rig.store.advise(Hint(ttl_s=0), session=AGENT)


def test_a_path_with_a_hole_is_not_prefetched(rig: Rig) -> None:
    put_below(rig.ssd, "c", 2, 4)
    name(rig, "c", 4)
    with pytest.raises(KeyError):
        rig.store.advise(Hint(prefetch=True), session=AGENT)
    assert rig.ssd.num_reads == 0


def test_a_conversation_comes_back_before_its_use(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 2)
    name(rig, "c", 2)
    # Due at once: it is expected sooner than it could be read.
    rig.store.advise(Hint(next_use_s=MARGIN_S / 2), session=AGENT)
    wait_until(lambda: rig.store.stats().comeback_pages == 2)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    assert is_in_dram(rig, "c", 0, 2)
    assert len(rig.store._advisor.comebacks) == 0


@pytest.mark.parametrize("later", [Hint(next_use_s=0), Hint(demote=True), Hint()])
def test_a_later_hint_or_turn_ends_a_comeback(rig: Rig, later: Hint) -> None:
    put_below(rig.ssd, "c", 0, 2)
    put_below(rig.ssd, "c", 2, 3)
    keys = page_keys("c", 0, 2)
    rig.store.advise(Hint(next_use_s=3600.0), model=MODEL, page_keys=keys)
    comebacks = rig.store._advisor.comebacks
    assert len(comebacks) == 1
    # Another conversation does not.
    rig.store.advise(later, model=MODEL, page_keys=page_keys("d", 0, 2))
    assert len(comebacks) == 1
    rig.store.advise(later, model=MODEL, page_keys=page_keys("c", 0, 3))
    assert len(comebacks) == 0


def test_a_hint_about_something_else_leaves_a_comeback_as_it_was(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 2)
    name(rig, "c", 2)
    rig.store.advise(Hint(next_use_s=3600.0), session=AGENT)
    rig.store.advise(Hint(ttl_s=5.0, priority=70), session=AGENT)
    assert len(rig.store._advisor.comebacks) == 1
    rig.store.advise(Hint(demote=True), session=AGENT)
    assert len(rig.store._advisor.comebacks) == 0


def comeback(number: int, due_s: float, load_s: float = 0.0) -> Comeback:
    return Comeback((MODEL, f"{number}"), due_s, due_s + 1.0, load_s)


def test_the_first_due_comes_first_and_a_later_hint_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(Comebacks, "_run", lambda self: None)
    comebacks = Comebacks(lambda each: True, clock)
    for number, due_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        comebacks.put(comeback(number, due_s))
    comebacks.put(comeback(2, 40.0))
    taken = []
    for clock.now_s in (19.0, 20.0, 35.0, 35.0, 100.0):
        found = comebacks.take_due()
        taken.append(None if found is None else found.end[1])
    comebacks.close()
    assert taken == [None, "3", "1", None, "2"]


def test_a_million_comebacks_are_bounded() -> None:
    clock = Clock()
    comebacks = Comebacks(lambda each: True, clock, max_comebacks=1_000)
    for number in range(1_000_000):
        comebacks.put(comeback(number % 2_000, 1e6 + number))
        assert len(comebacks._by_due) <= 2 * 1_000 + 65
    assert len(comebacks) == 1_000
    comebacks.cancel(MODEL, ["0", "1999"])
    assert len(comebacks) == 999
    comebacks.close()
    comebacks.put(comeback(0, 0.0))
    assert len(comebacks) == 0


def test_an_error_ends_no_later_comeback() -> None:
    brought: list[str] = []

    def bring(each: Comeback) -> bool:
        brought.append(each.end[1])
        if each.end[1] == "1":
            raise OSError("a broken disk")
        return True

    comebacks = Comebacks(bring, Clock())
    comebacks.put(comeback(1, -2.0))
    comebacks.put(comeback(2, -1.0))
    wait_until(lambda: len(brought) == 2)
    comebacks.close()
    assert brought == ["1", "2"]


def test_a_comeback_begins_earlier_where_the_tier_is_slow(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 2)
    rig.ssd._cost = TierCost(5.0, 0.0)
    rig.store.advise(Hint(next_use_s=100.0), model=MODEL, page_keys=page_keys("c", 0, 2))
    (waiting,) = rig.store._advisor.comebacks._waiting.values()
    # Two layers of 5 s each.
    assert waiting.load_s == 10.0
    assert waiting.next_use_at_s - waiting.due_s == pytest.approx(2 * 10.0 + MARGIN_S)
    rig.store.advise(Hint(next_use_s=0), model=MODEL, page_keys=page_keys("c", 0, 2))


# Dropping


def test_a_dropped_conversation_is_in_no_tier(rig: Rig) -> None:
    put(rig.store, "c", 0, 2)
    put(rig.store, "c", 2, 4)
    rig.store.flush(10)
    put_below(rig.mooncake, "e", 0, 2)
    name(rig, "c", 4)
    assert rig.store.advise(Hint(drop=True), session=AGENT) == 0
    assert lease_pages(rig.store, "c", 0, 4) is None
    assert rig.store.find_missing(MODEL, page_keys("c", 0, 4)) == [range(4)]
    assert [len(tier.records) for tier in rig.tiers] == [0, 1]
    with pytest.raises(KeyError):
        rig.store.advise(Hint(drop=True), session=AGENT)


def test_a_drop_asks_a_tier_once_for_each_segment(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(0, 10, 2):
        put(rig.store, "c", first, first + 2)
    rig.store.flush(10)
    discarded: list[str] = []
    discard = rig.mooncake.discard

    def count(manifest: SegmentManifest) -> None:
        discarded.append(manifest.page_keys[0])
        discard(manifest)

    monkeypatch.setattr(rig.mooncake, "discard", count)
    rig.store.advise(Hint(drop=True), model=MODEL, page_keys=page_keys("c", 0, 10))
    assert discarded == ["c/8", "c/6", "c/4", "c/2", "c/0"]
    assert [len(tier.records) for tier in rig.tiers] == [0, 0]


def test_a_drop_reaches_what_a_tier_is_writing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.ssd.writes_go_on.clear()
    put(rig.store, "c", 0, 2)
    flush = rig.ssd.flush

    def finish(timeout_s: float) -> bool:
        rig.ssd.writes_go_on.set()
        return flush(timeout_s)

    monkeypatch.setattr(rig.ssd, "flush", finish)
    rig.store.advise(Hint(drop=True), model=MODEL, page_keys=page_keys("c", 0, 2))
    assert rig.ssd.num_puts == 1
    assert rig.ssd.records == {}


def test_a_drop_leaves_what_others_go_through(rig: Rig) -> None:
    put(rig.store, "system", 0, 2)
    for branch in "ab":
        put_branch(rig, branch)
    rig.store.flush(10)
    keys = (*page_keys("system", 0, 2), *page_keys("a", 2, 3))
    rig.store.advise(Hint(drop=True), model=MODEL, page_keys=keys)
    assert rig.store.find_missing(MODEL, keys) == [range(2, 3)]
    assert not rig.store.find_missing(MODEL, page_keys("b", 2, 3))
    # The system prompt alone is continued: nothing of it is dropped.
    rig.store.advise(Hint(drop=True), model=MODEL, page_keys=keys[:2])
    assert not rig.store.find_missing(MODEL, keys[:2])
    # The last conversation that goes through it takes it along.
    keys = (*page_keys("system", 0, 2), *page_keys("b", 2, 3))
    rig.store.advise(Hint(drop=True), model=MODEL, page_keys=keys)
    assert rig.store.find_missing(MODEL, keys) == [range(3)]


def put_branch(rig: Rig, branch: str) -> None:
    """A turn of one page after the two pages of ``system``."""
    reservation = present(rig.store.reserve((100, 60)))
    fill(reservation, 0)
    keys = page_keys(branch, 2, 3)
    manifest = SegmentManifest(
        model=MODEL,
        page_keys=keys,
        parent_key="system/1",
        start_token=8,
        token_ids=tokens_of(keys),
        codec="raw",
        layer_num_bytes=(100, 60),
    )
    commit_to(rig.store, reservation, manifest)


def test_a_leased_conversation_can_be_dropped(rig: Rig) -> None:
    put(rig.store, "c", 0, 2)
    rig.store.flush(10)
    lease = present(lease_pages(rig.store, "c", 0, 2))
    content = [block.tobytes() for block in lease.slices[0].blocks]
    rig.store.advise(Hint(drop=True), model=MODEL, page_keys=page_keys("c", 0, 2))
    assert [block.tobytes() for block in lease.slices[0].blocks] == content
    rig.store.release(lease)
    assert rig.store.stats().used_bytes == 0
