"""What waiting requests hold, and how it comes from lower tiers while they wait."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from krul_backend.segment import TokenIds
from krul_backend.tiers.common.interface import Prefetched
from krul_sglang.engine.common.asking import PATIENCE_S, AskingThread, DaemonPatience
from krul_sglang.engine.common.moved_runs import RECOMPUTED_TOKENS, FindRun, MovedRun
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore import lease_questions, returning_requests
from krul_sglang.engine.restore.held_lease import (
    MAX_RENEW_INTERVAL_S,
    RENEW_INTERVAL_S,
    HeldLease,
    Waiting,
    whole_segments,
)
from krul_sglang.engine.restore.returning_request import Prompt, State
from krul_sglang.engine.restore.returning_requests import (
    RETRY_MISS_S,
    RETRY_PREFETCH_S,
    WAITED_READS,
    ReturningRequests,
)
from krul_sglang.reasons import Reasons
from tests.support.present import present
from tests.support.store_builders import Clock, make_manifest, page_keys, put, tokens_of, wait_until
from tests.support.tiered_builders import (
    FLAGS_BYTES,
    MODEL,
    SIZES,
    TAKEN_BYTES,
    AskedAtOnce,
    Rig,
    checksums_in,
    content_of,
    look_up,
    put_below,
    put_in_dram,
    tiers_of,
    wait_for,
)

KEYS = page_keys("c", 0, 4)


def requests_on(rig: Rig, clock: Callable[[], float] = time.monotonic, **options: Any) -> ReturningRequests:
    """The table of a server whose store is the rig's, and answers at once."""
    return ReturningRequests(rig.store, ServedModel(MODEL), AskedAtOnce(), clock, **options)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waiting(rig: Rig, clock: Clock) -> ReturningRequests:
    return requests_on(rig, clock)


def lookups(rig: Rig) -> int:
    return rig.store.stats().lookups


def wait_until_read(rig: Rig, num_segments: int = 1) -> None:
    """Until so much has arrived, and nothing is on its way."""
    wait_until(lambda: rig.store.stats().fetched_segments >= num_segments and not rig.store._fetcher._reads)


def look_ahead(waiting: ReturningRequests, rids: str, keys: Sequence[tuple[str, ...]] = ()) -> list[int]:
    """What is promised to requests that wait in this order, each named by a letter: its conversation."""
    with waiting.looking_ahead() as queue:
        queue += rids
        keys = keys or [page_keys(rid, 0, 4) for rid in rids]
        return [promise(waiting, rid, of_rid) for rid, of_rid in zip(rids, keys, strict=True)]


def wait_a_round(waiting: ReturningRequests, rids: str) -> None:
    """A scheduling round that looks up none of the requests that wait."""
    with waiting.looking_ahead() as queue:
        queue += rids


def take_in_dram(rig: Rig, waiting: ReturningRequests, rid: str = "r") -> bool:
    """Take a request's lease, and release it; returns whether all of it was in DRAM."""
    held = present(waiting.take(rid))
    rig.store.release(held.lease)
    return held.lease.is_in_dram


def end_all(rig: Rig, waiting: ReturningRequests, rids: str) -> str:
    """End the leases of these requests, one after the other; returns who held one."""
    held = {rid: waiting.take(rid) for rid in rids}
    for lease in filter(None, held.values()):
        rig.store.release(lease.lease)
    wait_until_read(rig, num_segments=0)
    rig.assert_nothing_is_held()
    return "".join(rid for rid in rids if held[rid])


def make_room(waiting: ReturningRequests, held: HeldLease) -> bool:
    """For a load of all that is leased."""
    return waiting.make_room(held.lease, [None] * len(held.lease.slices))


def promise(waiting: ReturningRequests, rid: str = "r", keys: tuple[str, ...] = KEYS) -> int:
    return look_up(waiting, rid, keys)


def test_the_store_is_asked_once_for_what_is_in_dram(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    put_in_dram(rig, "c", 0, 3)
    for _ in range(5):
        clock.now_s += 10 * RENEW_INTERVAL_S
        assert promise(waiting) == 3
    assert lookups(rig) == 1
    assert waiting.num_leases == 1
    waiting.release("r")
    rig.assert_nothing_is_held()


def test_a_state_that_lies_below_dram_is_brought_ahead(rig: Rig) -> None:
    """As soon as its request is known: a plan has no heads meanwhile, and a load would wait for it."""
    of_states = dataclasses.replace(MODEL, dtype="state")
    put_below(rig.ssd, "c", 0, 1)
    manifest, content = make_manifest("c", 0, 1, SIZES, of_states), content_of("c", 0, 1)
    rig.ssd.add(manifest, content, checksums_in(manifest, content))
    states: Any = SimpleNamespace(identity=of_states)
    waiting = ReturningRequests(rig.store, ServedModel(MODEL), AskedAtOnce(), states=states)
    assert promise(waiting, keys=KEYS[:1]) == 1
    wait_until(lambda: not rig.host.find_missing(of_states, KEYS[:1]))
    waiting.release("r")
    wait_until_read(rig)
    rig.assert_nothing_is_held()


def test_a_miss_holds_nothing_and_is_asked_again_a_second_later(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    asked: list[None] = []

    def tokens() -> TokenIds:
        asked.append(None)
        return tokens_of(KEYS)

    for _ in range(100):
        waiting.expect("r", Prompt(17, 0, tokens))
        assert waiting.look_up("r", KEYS) == 0
        # As the radix cache does in each round that finds nothing.
        waiting.set_aside("r")
        clock.now_s += RETRY_MISS_S / 200
    assert (lookups(rig), len(asked), waiting.num_leases) == (1, 1, 0)
    put_in_dram(rig, "c", 0, 2)
    assert promise(waiting) == 0
    clock.now_s += RETRY_MISS_S / 2
    assert promise(waiting) == 2
    waiting.release_all()
    rig.assert_nothing_is_held()


def test_a_miss_counts_for_its_request_and_its_pages_alone(rig: Rig, waiting: ReturningRequests) -> None:
    assert promise(waiting) == 0
    put_in_dram(rig, "c", 0, 4)
    # Another request, more or other pages of the same one, and the same one after its release.
    assert promise(waiting, "s") == 4
    assert promise(waiting, keys=KEYS[:3]) == 3
    assert promise(waiting, "t", keys=page_keys("d", 0, 4)) == 0
    waiting.release("t")
    put_in_dram(rig, "d", 0, 4)
    assert promise(waiting, "t", keys=page_keys("d", 0, 4)) == 4
    waiting.release_all()
    rig.assert_nothing_is_held()


def test_misses_are_forgotten_with_their_requests(rig: Rig, waiting: ReturningRequests, clock: Clock) -> None:
    assert promise(waiting) == 0
    put_in_dram(rig, "c", 0, 4)
    waiting.release_all()
    assert promise(waiting) == 4
    waiting.release_all()
    # Those of requests that are never released, too.
    for i in range(100):
        assert promise(waiting, f"r{i}", keys=page_keys("d", 0, 4)) == 0
        clock.now_s += RETRY_MISS_S / 10
        wait_a_round(waiting, "")
        assert len(waiting) <= 11


def test_a_run_with_another_end_is_another_promise(rig: Rig, waiting: ReturningRequests) -> None:
    """Two prompts may begin alike and have as many pages."""
    put_in_dram(rig, "c", 0, 4)
    assert promise(waiting) == 4
    other = (*KEYS[:2], *page_keys("d", 2, 4))
    assert promise(waiting, keys=other) == 2
    waiting.release_all()
    rig.assert_nothing_is_held()


def test_what_lies_below_comes_up_while_a_request_waits(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    put_in_dram(rig, "c", 0, 1)
    put_below(rig.ssd, "c", 1, 4)
    assert promise(waiting) == 4
    # Nothing is fetched before it waits: it may be computed rather.
    assert promise(waiting) == 4
    assert rig.ssd.num_reads == 0
    wait_a_round(waiting, "r")
    wait_until_read(rig)
    held = present(waiting.take("r"))
    assert tiers_of(held.lease) == [("dram", 1), ("dram", 3)]
    assert rig.ssd.num_reads == 1
    rig.store.release(held.lease)
    rig.assert_nothing_is_held()


def test_a_lookup_ahead_fetches_at_once_and_is_renewed_like_any(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    assert look_ahead(waiting, "r", [KEYS]) == [4]
    wait_until_read(rig)
    clock.now_s += RENEW_INTERVAL_S
    assert promise(waiting) == 4
    held = present(waiting.take("r"))
    assert tiers_of(held.lease) == [("dram", 4)]
    rig.store.release(held.lease)
    rig.assert_nothing_is_held()


def test_what_found_no_room_is_fetched_when_there_is_some(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    reservation = present(rig.host.reserve((64 * 64,)))
    assert look_ahead(waiting, "r", [KEYS]) == [4]
    assert rig.store.stats().failed_fetches == 1
    rig.host.abort(reservation)
    clock.now_s += RETRY_PREFETCH_S
    # Nobody has to ask for it again.
    wait_a_round(waiting, "r")
    wait_until_read(rig)
    clock.now_s += RENEW_INTERVAL_S
    assert promise(waiting) == 4
    assert take_in_dram(rig, waiting)
    rig.assert_nothing_is_held()


@pytest.mark.parametrize(("num_segments", "expected"), [(0.5, "a"), (1.9, "a"), (2, "ab")])
def test_requests_that_wait_pin_no_more_than_they_may(rig: Rig, num_segments: float, expected: str) -> None:
    """The first of them is held, whatever it takes. The others are found when they are admitted."""
    for name in "abc":
        put_in_dram(rig, name, 0, 4)
    max_ahead_bytes = int(num_segments * sum(SIZES))
    waiting = requests_on(rig, max_ahead_bytes=max_ahead_bytes)
    assert look_ahead(waiting, "abc") == [4, 4, 4]
    assert rig.store.stats().num_leases == waiting.num_leases == len(expected)
    assert promise(waiting, "c", page_keys("c", 0, 4)) == 4
    assert end_all(rig, waiting, "abc") == expected + "c"


def test_what_is_in_dram_is_held_as_far_as_it_fits(rig: Rig) -> None:
    put_in_dram(rig, "a", 0, 4)
    put_in_dram(rig, "b", 0, 4)
    put_in_dram(rig, "c", 0, 2, (10, 10))
    waiting = requests_on(rig, max_ahead_bytes=sum(SIZES) + 20)
    for _ in range(2):
        assert look_ahead(waiting, "abc") == [4, 4, 2]
        assert waiting.num_leases == 2
    waiting.release("b")
    assert end_all(rig, waiting, "abc") == "ac"


def test_one_that_comes_to_the_front_gets_the_room_of_the_last(rig: Rig) -> None:
    for name in "abc":
        put_in_dram(rig, name, 0, 4)
    waiting = requests_on(rig, max_ahead_bytes=2 * sum(SIZES))
    look_ahead(waiting, "ab")
    look_ahead(waiting, "cab")
    assert end_all(rig, waiting, "abc") == "ac"


def test_one_outside_of_the_queue_counts_as_the_last(rig: Rig, clock: Clock) -> None:
    """A cache-aware policy looks up more than the window holds, and the window moves."""
    put_in_dram(rig, "a", 0, 4)
    put_in_dram(rig, "b", 0, 4)
    put_below(rig.ssd, "c", 0, 4)
    waiting = requests_on(rig, clock, max_ahead_bytes=2 * sum(SIZES))
    for name in "ab":
        promise(waiting, name, page_keys(name, 0, 4))
    look_ahead(waiting, "c")
    assert waiting.num_leases == 2
    wait_until_read(rig)
    assert end_all(rig, waiting, "abc") == "ac"


def test_what_waits_below_dram_is_prefetched_when_there_is_room(rig: Rig, clock: Clock) -> None:
    put_in_dram(rig, "a", 0, 4)
    put_below(rig.ssd, "b", 0, 4)
    put_below(rig.ssd, "c", 0, 1, (10, 10))
    waiting = requests_on(rig, clock, max_ahead_bytes=sum(SIZES) + 20)
    for _ in range(2):
        found = look_ahead(waiting, "abc")
        # "c" would fit, but "b" comes before it.
        assert found == [4, 4, 1]
        assert rig.store.stats().fetched_segments == 0
    waiting.release("a")
    wait_a_round(waiting, "bc")
    wait_until_read(rig, num_segments=2)
    assert take_in_dram(rig, waiting, "b")
    waiting.release("c")
    rig.assert_nothing_is_held()


def test_a_request_keeps_its_place_in_dram_when_its_prefix_on_the_device_changes(
    rig: Rig, clock: Clock
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    put_below(rig.ssd, "d", 0, 4)
    waiting = requests_on(rig, clock, max_ahead_bytes=sum(SIZES))
    assert look_ahead(waiting, "c", [KEYS[1:]]) == [3]
    wait_until_read(rig)
    assert look_ahead(waiting, "cd") == [4, 4]
    assert rig.store.stats().num_leases == 2
    assert take_in_dram(rig, waiting, "c")
    waiting.release("d")
    rig.assert_nothing_is_held()


def test_a_segment_that_requests_share_counts_once(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 4)
    waiting = requests_on(rig, max_ahead_bytes=sum(SIZES))
    put_in_dram(rig, "d", 0, 4)
    shared = [KEYS, KEYS[:3], page_keys("d", 0, 4), KEYS[:2]]
    assert look_ahead(waiting, "abdc", shared) == [4, 3, 4, 2]
    assert end_all(rig, waiting, "abdc") == "abc"


def test_the_next_one_gets_the_room_of_those_behind_it(rig: Rig, clock: Clock) -> None:
    put_in_dram(rig, "a", 0, 4)
    put_in_dram(rig, "b", 0, 4)
    put_below(rig.ssd, "c", 0, 4)
    waiting = requests_on(rig, clock, max_ahead_bytes=2 * sum(SIZES))
    assert look_ahead(waiting, "ab") == [4, 4]
    assert look_ahead(waiting, "cab") == [4, 4, 4]
    wait_until_read(rig)
    assert end_all(rig, waiting, "cab") == "ca"


def test_none_loses_its_room_to_one_that_it_is_not_enough_for(rig: Rig, clock: Clock) -> None:
    """That one comes to DRAM when it is the first."""
    put_in_dram(rig, "a", 0, 4)
    put_below(rig.ssd, "b", 0, 4)
    put_in_dram(rig, "c", 0, 2, (10, 10))
    waiting = requests_on(rig, clock, max_ahead_bytes=sum(SIZES) + 20 - 1)
    look_ahead(waiting, "acb")
    assert waiting.num_leases == 2
    assert rig.ssd.num_reads == 0
    waiting.release("a")
    look_ahead(waiting, "bc")
    wait_until_read(rig)
    assert end_all(rig, waiting, "bc") == "b"


@pytest.mark.parametrize(("num_segments", "left"), [(2, "a"), (3, "ab")])
def test_what_is_admitted_takes_the_room_of_the_last_in_the_queue(
    clock: Clock, num_segments: int, left: str
) -> None:
    rig = Rig(num_segments * (TAKEN_BYTES + FLAGS_BYTES))
    waiting = requests_on(rig, clock)
    for name in "abc":
        put_below(rig.ssd, name, 0, 4)
    for number in range(3):
        look_ahead(waiting, "abc"[: number + 1])
        wait_until_read(rig, min(number + 1, num_segments))
    # "c" is looked up last, and admitted first.
    held = present(waiting.take("c"))
    make_room(waiting, held)
    assert wait_for(rig.store.fetch(held.lease)) == [content_of("c", 0, 4)]
    rig.store.release(held.lease)
    assert end_all(rig, waiting, "abc") == left


def test_an_admitted_request_takes_no_more_room_than_it_needs(clock: Clock) -> None:
    """Even if that is of no use: turns that are being stored hold the rest."""
    rig = Rig(3 * TAKEN_BYTES + 128)
    reservation = present(rig.host.reserve((128,)))
    for name in "abc":
        put_in_dram(rig, name, 0, 4)
    put_below(rig.ssd, "x", 0, 4)
    waiting = requests_on(rig, clock)
    assert look_ahead(waiting, "abcx") == [4, 4, 4, 4]
    held = present(waiting.take("x"))
    make_room(waiting, held)
    assert waiting.num_leases == 2
    rig.store.release(held.lease)
    rig.host.abort(reservation)
    assert end_all(rig, waiting, "abc") == "ab"


def test_after_a_refusal_none_asks_for_a_while_and_then_all_do_in_their_order(clock: Clock) -> None:
    """Neither those behind the one that was refused, nor those that come later, get before it."""
    rig = Rig(2 * (TAKEN_BYTES + FLAGS_BYTES))
    waiting = requests_on(rig, clock)
    reservation = present(rig.host.reserve((2 * (TAKEN_BYTES + FLAGS_BYTES),)))
    for name in "abcd":
        put_below(rig.ssd, name, 0, 4)
    look_ahead(waiting, "abc")
    rig.host.abort(reservation)
    for _ in range(10):
        clock.now_s += RETRY_PREFETCH_S / 20
        look_ahead(waiting, "abcd")
    assert (rig.store.stats().failed_fetches, rig.ssd.num_reads) == (1, 0)
    clock.now_s += RETRY_PREFETCH_S / 2
    wait_a_round(waiting, "abcd")
    deadline_s = time.monotonic() + 20
    while rig.store.stats().fetched_segments < 2:
        # The second one may be refused as long as the first one is on its way.
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
        clock.now_s += RETRY_PREFETCH_S
        wait_a_round(waiting, "abcd")
    wait_until_read(rig, num_segments=2)
    assert rig.store.stats().failed_fetches >= 2
    assert [take_in_dram(rig, waiting, name) for name in "abcd"] == [True, True, False, False]
    rig.assert_nothing_is_held()


def test_an_admitted_request_gets_room_while_much_is_being_prefetched(clock: Clock) -> None:
    """Its load is not limited as prefetches are: what it lacks is room."""
    rig = Rig(4 * TAKEN_BYTES + 256 + 64 + FLAGS_BYTES)
    waiting = requests_on(rig, clock)
    for name in "abcd":
        put_in_dram(rig, name, 0, 4)
    put_below(rig.ssd, "e", 0, 4, (200, 40))
    put_below(rig.ssd, "x", 0, 4, (60, 10))
    rig.ssd.reads_go_on.clear()
    look_ahead(waiting, "eabcdx")
    held = present(waiting.take("x"))
    asked = rig.store.prefetch_pages(MODEL, page_keys("x", 0, 4), tokens_of(page_keys("x", 0, 4)))
    assert asked == Prefetched(0, "too much at once")
    make_room(waiting, held)
    pieces = rig.store.fetch(held.lease)
    rig.ssd.reads_go_on.set()
    assert wait_for(pieces) == [content_of("x", 0, 4, (60, 10))]
    rig.store.release(held.lease)
    assert end_all(rig, waiting, "eabcd") == "eabc"


def test_what_is_on_its_way_gives_no_room(clock: Clock) -> None:
    rig = Rig(3 * TAKEN_BYTES + 2 * FLAGS_BYTES)
    waiting = requests_on(rig, clock)
    put_in_dram(rig, "a", 0, 4)
    for name in "bx":
        put_below(rig.ssd, name, 0, 4)
    reservation = present(rig.host.reserve((TAKEN_BYTES + FLAGS_BYTES,)))
    rig.ssd.reads_go_on.clear()
    look_ahead(waiting, "ab")
    promise(waiting, "x", page_keys("x", 0, 4))
    held = present(waiting.take("x"))
    make_room(waiting, held)
    rig.store.release(held.lease)
    rig.host.abort(reservation)
    rig.ssd.reads_go_on.set()
    wait_until_read(rig)
    # Beside what is on its way for "b", the room of "a" is all that there is to give.
    assert end_all(rig, waiting, "ab") == "b"


def test_a_request_waits_for_what_is_read_if_others_gain_more_than_it_loses(rig: Rig, clock: Clock) -> None:
    gains = Waiting(read_s=1.0, lost_s=0.5, saved_s=0.3, longest_s=8.0)
    waiting = requests_on(
        rig, clock, plan_ahead=lambda prompt: lambda held: whole_segments(held)._replace(waiting=gains)
    )
    put_below(rig.ssd, "a", 0, 4)
    rig.ssd.reads_go_on.clear()
    assert not waiting.is_worth_waiting("a", 9)
    promise(waiting, "a", page_keys("a", 0, 4))
    assert waiting.is_worth_waiting("a", 1), "it is known in a moment"
    clock.now_s += PATIENCE_S
    assert not waiting.is_worth_waiting("a", 1)
    look_ahead(waiting, "a")
    assert [waiting.is_worth_waiting("a", others) for others in (1, 2)] == [False, True]
    clock.now_s += WAITED_READS * gains.read_s
    assert waiting.is_worth_waiting("a", 2)
    clock.now_s += RETRY_PREFETCH_S
    assert not waiting.is_worth_waiting("a", 2)
    waiting.release("a")
    look_ahead(waiting, "a")
    assert waiting.is_worth_waiting("a", 2)
    rig.ssd.reads_go_on.set()
    wait_until_read(rig)
    clock.now_s += gains.read_s
    wait_a_round(waiting, "a")
    assert not waiting.is_worth_waiting("a", 2), "it is there"
    end_all(rig, waiting, "a")


@pytest.mark.parametrize(
    "gains", [Waiting(1.0, 0.5, 0.01, 8.0), Waiting(1.0, 0.5, 0.3, 1.0), Waiting(1.0, 3.0, 0.3, 8.0)]
)
def test_nobody_waits_for_little_or_longer_than_computing_takes(gains: Waiting) -> None:
    assert not gains.is_worth(9)
    # What has no room yet would be computed.
    assert gains.is_worth(1, has_to=True) == (gains.read_s < gains.longest_s)


def test_the_first_that_found_no_room_gets_that_of_those_behind_it(clock: Clock) -> None:
    rig = Rig(4 * TAKEN_BYTES + FLAGS_BYTES)
    waiting = requests_on(rig, clock, max_ahead_bytes=3 * sum(SIZES))
    for name in "bcd":
        put_in_dram(rig, name, 0, 4)
    put_below(rig.ssd, "a", 0, 4)
    reservation = present(rig.host.reserve((TAKEN_BYTES,)))
    look_ahead(waiting, "abcd")
    clock.now_s += RETRY_PREFETCH_S
    # "d" has given up what is too much beside "a".
    wait_a_round(waiting, "abcd")
    wait_until_read(rig)
    rig.host.abort(reservation)
    assert end_all(rig, waiting, "abcd") == "abc"


def test_one_that_may_have_no_more_in_dram_holds_nobody_up(clock: Clock) -> None:
    rig = Rig(tenant_quota=0.05)
    waiting = requests_on(rig, clock)
    for name in "ab":
        put_below(rig.ssd, name, 0, 4, tenant="t")
    put_below(rig.ssd, "c", 0, 1, (10, 10))
    look_ahead(waiting, "abc")
    wait_until_read(rig)
    assert [take_in_dram(rig, waiting, name) for name in "abc"] == [False, False, True]
    stats = rig.store.stats()
    assert (stats.failed_fetches, stats.num_leases) == (2, 0)


def test_a_segment_below_dram_that_requests_share_counts_once(rig: Rig, clock: Clock) -> None:
    put_below(rig.ssd, "c", 0, 4)
    put_below(rig.ssd, "d", 0, 1, (10, 10))
    waiting = requests_on(rig, clock, max_ahead_bytes=sum(SIZES) + 20)
    look_ahead(waiting, "abd", [KEYS, KEYS[:3], page_keys("d", 0, 1)])
    wait_until_read(rig, num_segments=2)
    assert end_all(rig, waiting, "abd") == "abd"


def test_a_store_that_fails_leaves_no_lease(
    rig: Rig,
    waiting: ReturningRequests,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    promise(waiting)

    def fail(*args: object, **options: object) -> None:
        raise ValueError("as the store says")

    lease = rig.store.lease
    monkeypatch.setattr(rig.store, "lease", fail)
    clock.now_s += RENEW_INTERVAL_S
    # What is held is still good.
    held = present(waiting.take("r"))
    assert tiers_of(held.lease) == [("ssd", 4)]
    rig.store.release(held.lease)
    # A lookup that fails is a miss.
    assert promise(waiting) == 0
    assert [record.message for record in caplog.records] == 2 * [
        "krul: the store could not answer: as the store says"
    ]
    rig.assert_nothing_is_held()
    monkeypatch.setattr(rig.store, "lease", lease)
    clock.now_s += RETRY_MISS_S
    assert promise(waiting) == 4
    waiting.release_all()
    rig.assert_nothing_is_held()


def test_one_that_waits_gives_a_copy_back_as_soon_as_it_is_encoded(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    put(rig.store, "c", 0, 4, SIZES, is_fast_copy=True)
    look_ahead(waiting, "c")
    before = lookups(rig)

    def held() -> list[bool]:
        with waiting.looking_ahead() as queue:
            queue += "c"
        lease = present(waiting._requests["c"].lease)
        return [piece.is_fast_copy for piece in lease.lease.slices]

    clock.now_s += RENEW_INTERVAL_S
    waiting.give_copies_back()
    assert held() == [True]
    put(rig.store, "c", 0, 4, SIZES)
    waiting.give_copies_back()
    # The store is not asked again at once.
    assert held() == [True]
    clock.now_s += RENEW_INTERVAL_S
    waiting.give_copies_back()
    assert held() == [False]
    # That is no lookup, and the room of the copy is free.
    assert lookups(rig) == before
    assert rig.store.stats().num_leases == 1
    rig.store.drop_fast_copies(MODEL, page_keys("c", 0, 4))
    assert rig.store.stats().fast_copy_bytes == 0
    assert end_all(rig, waiting, "c") == "c"


def test_many_leases_are_renewed_in_several_rounds(
    rig: Rig, waiting: ReturningRequests, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(returning_requests, "MAX_RENEWED_PAGES", 5)
    for name in "abc":
        put_below(rig.ssd, name, 0, 4)
    before = lookups(rig)
    look_ahead(waiting, "abc")
    # Three are leased, and two prefetched.
    assert lookups(rig) == before + 5
    wait_a_round(waiting, "abc")
    assert lookups(rig) == before + 6
    wait_until_read(rig, num_segments=3)
    assert end_all(rig, waiting, "abc") == "abc"


def test_a_round_in_which_nothing_changes_goes_through_no_lease(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_dram(rig, "a", 0, 4)
    put_below(rig.ssd, "b", 0, 4)
    put_below(rig.ssd, "c", 0, 4)
    rig.ssd.reads_go_on.clear()
    # There is no room for "c".
    waiting = requests_on(rig, clock, max_ahead_bytes=2 * sum(SIZES))
    look_ahead(waiting, "abc")
    rounds: list[float] = []
    monkeypatch.setattr(waiting, "_settle", rounds.append)
    wait_a_round(waiting, "abc")
    assert rounds == []
    clock.now_s += RENEW_INTERVAL_S
    wait_a_round(waiting, "abc")
    assert len(rounds) == 1
    wait_a_round(waiting, "bc")
    assert len(rounds) == 2
    monkeypatch.undo()
    rig.ssd.reads_go_on.set()
    waiting.release_all()
    wait_until_read(rig)
    rig.assert_nothing_is_held()


def test_between_two_renewals_the_store_is_left_alone(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    rig.ssd.reads_go_on.clear()
    assert look_ahead(waiting, "r", [KEYS]) == [4]
    before = lookups(rig)
    assert look_ahead(waiting, "r", [KEYS]) == [4]
    assert lookups(rig) == before
    clock.now_s += RENEW_INTERVAL_S
    assert look_ahead(waiting, "r", [KEYS]) == [4]
    assert lookups(rig) == before + 1
    rig.ssd.reads_go_on.set()
    waiting.release("r")
    wait_until_read(rig)
    rig.assert_nothing_is_held()


def test_each_renewal_is_later_than_the_one_before(
    rig: Rig, waiting: ReturningRequests, clock: Clock
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    rig.ssd.reads_go_on.clear()
    look_ahead(waiting, "r", [KEYS])
    asked_s = [clock.now_s]
    before = lookups(rig)
    for _ in range(200):
        clock.now_s += RENEW_INTERVAL_S / 2
        wait_a_round(waiting, "r")
        if lookups(rig) > before:
            before = lookups(rig)
            asked_s.append(clock.now_s)
    pauses = [after - first for first, after in pairwise(asked_s)]
    doubled = [RENEW_INTERVAL_S * 2**number for number in range(4)]
    assert pauses[:4] == pytest.approx(doubled, abs=0.6 * RENEW_INTERVAL_S)
    assert pauses[-1] == pytest.approx(MAX_RENEW_INTERVAL_S, abs=0.6 * RENEW_INTERVAL_S)
    rig.ssd.reads_go_on.set()
    wait_until_read(rig)
    # Its request is admitted: what has arrived is known.
    assert take_in_dram(rig, waiting)
    rig.assert_nothing_is_held()


def test_a_renewed_lease_is_never_shorter(
    rig: Rig, waiting: ReturningRequests, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    lease, shorter = rig.store.lease, KEYS[:2]
    with waiting.looking_ahead() as queue:
        queue.append("r")
        assert promise(waiting) == 4
        monkeypatch.setattr(
            rig.store, "lease", lambda model, keys, tokens: lease(model, shorter, tokens_of(shorter))
        )
        clock.now_s += RENEW_INTERVAL_S
        assert promise(waiting) == 4
    waiting.release_all()
    wait_until_read(rig)
    rig.assert_nothing_is_held()


def test_a_promise_outlives_a_store_that_finds_it_no_more(
    rig: Rig, waiting: ReturningRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    assert promise(waiting) == 4
    monkeypatch.setattr(rig.store, "lease", lambda *args: None)
    wait_a_round(waiting, "r")
    assert promise(waiting) == 4
    waiting.release("r")
    wait_until_read(rig)
    rig.assert_nothing_is_held()


def test_other_pages_are_another_promise(rig: Rig, waiting: ReturningRequests) -> None:
    put_in_dram(rig, "c", 0, 4)
    assert promise(waiting) == 4
    assert promise(waiting, keys=KEYS[1:]) == 3
    assert waiting.num_leases == 1
    waiting.release_all()
    rig.assert_nothing_is_held()


def test_what_was_taken_is_the_takers(rig: Rig, waiting: ReturningRequests) -> None:
    put_in_dram(rig, "c", 0, 4)
    promise(waiting)
    held = present(waiting.take("r"))
    assert waiting.take("r") is None
    waiting.release("r")
    rig.store.release(held.lease)
    rig.assert_nothing_is_held()


@pytest.fixture
def knowing(rig: Rig, waiting: ReturningRequests, monkeypatch: pytest.MonkeyPatch) -> ReturningRequests:
    """A store that says at once what it has not, as a daemon without a cluster does."""
    monkeypatch.setattr(rig.store, "may_have", rig.host.page_filter.may_have)
    return waiting


def test_what_is_stored_nowhere_is_not_asked_for(rig: Rig, knowing: ReturningRequests, clock: Clock) -> None:
    def tokens() -> TokenIds:
        raise AssertionError("nobody needs them")

    for expected in (1, 1, 2):
        knowing.expect("r", Prompt(17, 0, tokens))
        assert knowing.look_up("r", KEYS) == 0
        assert (knowing.num_spared, knowing.state("r")) == (expected, State.MISSED)
        clock.now_s += 0.6 * RETRY_MISS_S
    assert lookups(rig) == 0
    put_in_dram(rig, "c", 0, 2)
    assert promise(knowing) == 0
    # As the radix cache does when a turn has been stored that the prompt goes on from.
    knowing.end_lease("r")
    assert promise(knowing) == 2
    assert promise(knowing, "s") == 2
    assert (lookups(rig), knowing.num_spared) == (2, 2)
    # What follows it has another first page.
    assert promise(knowing, "r", KEYS[2:]) == 0
    assert (lookups(rig), knowing.num_spared, knowing.num_leases) == (2, 3, 1)
    clock.now_s += RETRY_MISS_S
    assert promise(knowing, "r", KEYS[1:]) == 1
    assert lookups(rig) == 3
    knowing.release_all()
    rig.assert_nothing_is_held()


def test_a_miss_that_was_not_asked_for_is_explained(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = Reasons(MODEL.page_size, lambda: MODEL.fingerprint, lambda: True)
    waiting = ReturningRequests(rig.store, ServedModel(MODEL), AskedAtOnce(), clock, reasons=reasons)
    monkeypatch.setattr(rig.store, "may_have", lambda model, page_key: False)
    reasons.look_up("r", 17, 0, lambda: ("", tokens_of(KEYS)))
    assert promise(waiting) == 0
    assert '"new"' in reasons.as_text()


def test_no_question_is_waited_for_when_nothing_is_stored(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.store, "may_have", rig.host.page_filter.may_have)
    asking = AskingThread(DaemonPatience(), lambda: None)
    is_free = threading.Event()
    asking.ask(is_free.wait)
    waiting = ReturningRequests(rig.store, ServedModel(MODEL), asking)
    assert promise(waiting) == 0
    assert asking.patience.is_prompt
    assert waiting.state("r") is State.MISSED
    is_free.set()
    asking.close()


def moved_run(first: int, end: int) -> MovedRun:
    """Pages of conversation "old", which the prompt has from token 10 on; it has nothing on the device."""
    keys = page_keys("old", first, end)
    return MovedRun(10, 10 - 4 * first, keys, tokens_of(keys), first_token=0)


def test_a_moved_run_is_held_where_it_brings_more_than_the_prefix(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_questions, "RECOMPUTED_TOKENS", 4)
    waiting = requests_on(rig, clock)
    keys = page_keys("new", 0, 20)
    put_in_dram(rig, "new", 0, 3)
    put_in_dram(rig, "old", 5, 12)
    asked: list[int] = []

    def find(num_found: int) -> MovedRun:
        asked.append(num_found)
        return moved_run(5, 14)

    def hold(rid: str, find_run: FindRun) -> int:
        return look_up(waiting, rid, keys, find_run)

    for _ in range(3):
        # Seven pages from token 10 on.
        assert hold("a", find) == (10 + 7 * MODEL.page_size) // MODEL.page_size
    assert asked == [3]
    held = present(waiting.take("a"))
    assert held.moved is not None
    assert held.lease.num_pages == 7
    rig.store.release(held.lease)
    # Less its recomputed tokens, one page, two pages are fewer than the three of the prefix; none is nothing.
    assert hold("b", lambda num_found: moved_run(10, 14)) == 3
    assert hold("e", lambda num_found: moved_run(8, 12)) == 3
    assert hold("c", lambda num_found: moved_run(12, 14)) == 3
    assert hold("d", lambda num_found: None) == 3
    assert waiting.num_leases == 4
    waiting.release_all()
    rig.assert_nothing_is_held()


@pytest.mark.parametrize(("num_spare_tokens", "brings_more"), [(-1, False), (0, True)])
def test_a_moved_run_is_not_held_if_its_head_may_not_be_computed_at_once(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch, num_spare_tokens: int, brings_more: bool
) -> None:
    monkeypatch.setattr(lease_questions, "RECOMPUTED_TOKENS", 4)
    waiting = requests_on(rig, clock, max_head_tokens=10 + RECOMPUTED_TOKENS + num_spare_tokens)
    put_in_dram(rig, "new", 0, 3)
    put_in_dram(rig, "old", 5, 12)
    num_pages = look_up(waiting, "r", page_keys("new", 0, 20), lambda num_found: moved_run(5, 14))
    assert (num_pages > 3) == brings_more
    waiting.release_all()
    rig.assert_nothing_is_held()


def test_a_moved_run_is_looked_for_although_the_first_page_is_stored_nowhere(
    rig: Rig, knowing: ReturningRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_questions, "RECOMPUTED_TOKENS", 4)
    put_in_dram(rig, "old", 5, 12)
    keys = page_keys("new", 0, 20)
    assert look_up(knowing, "r", keys, lambda num_found: moved_run(5, 14)) > 0
    assert look_up(knowing, "s", keys, lambda num_found: None) == 0
    assert (knowing.num_spared, look_up(knowing, "t", keys), knowing.num_spared) == (0, 0, 1)
    knowing.release_all()
    rig.assert_nothing_is_held()


def test_a_moved_run_comes_to_dram_while_its_request_waits(
    rig: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_questions, "RECOMPUTED_TOKENS", 4)
    waiting = requests_on(rig, clock)
    keys = page_keys("new", 0, 20)
    put_below(rig.ssd, "old", 5, 9)
    assert look_up(waiting, "a", keys, lambda num_found: moved_run(5, 9)) > 0
    wait_a_round(waiting, "a")
    wait_until_read(rig)
    assert take_in_dram(rig, waiting, "a")
    rig.assert_nothing_is_held()
