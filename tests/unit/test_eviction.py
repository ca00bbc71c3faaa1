from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.errors import ConfigError
from krul_backend.tiers.common.eviction import (
    NUM_OLDEST,
    NUM_SAMPLED,
    POLICIES,
    UNKNOWN_TOKEN_S,
    EvictionPolicy,
    LruPolicy,
    ValuePolicy,
    make_policy,
    value_of,
)
from krul_backend.tiers.common.hint import Hint


@dataclasses.dataclass
class Item:
    """A segment as a policy sees it; counts how often its worth was looked at."""

    segment_id: int
    taken_bytes: int = 10_000
    num_tokens: int = 100
    saved_s: float = 1.0
    num_looks: int = 0
    start_token: int = 0

    @property
    def value(self) -> float:
        self.num_looks += 1
        return value_of(self.saved_s, self.num_tokens, self.taken_bytes)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def items(*segment_ids: int) -> list[Item]:
    return [Item(segment_id) for segment_id in segment_ids]


KINDS: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "value": ValuePolicy}


def test_policies_by_name() -> None:
    assert isinstance(make_policy("lru"), LruPolicy)
    clock = Clock()
    policy = make_policy("value", clock)
    assert isinstance(policy, ValuePolicy)
    assert sorted(KINDS) == sorted(POLICIES)
    with pytest.raises(ConfigError, match="'lfu' is unknown; accepted are value, lru"):
        make_policy("lfu")


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_the_place_of_another_one_leaves_when_that_would_have(kind: str) -> None:
    policy = KINDS[kind]()
    policy.touch(items(1, 2, 3))
    policy.touch(items(9))
    policy.advise(3, Hint(demote=True))
    policy.replace(2, Item(12))
    policy.replace(3, Item(13))
    victims = list(policy.victims())
    assert (victims[0], sorted(victims)) == (13, [1, 9, 12, 13])
    assert victims.index(12) < victims.index(1), "as what it continues is needed for it"
    assert kind != "lru" or victims == [13, 12, 1, 9]
    policy.replace(13, Item(23))
    policy.remove(23)
    policy.touch(items(1, 12))
    victims = list(policy.victims())
    assert sorted(victims) == [1, 9, 12]
    assert kind != "lru" or victims == [9, 12, 1]


def test_a_segment_in_another_ones_place_cuts_off_nothing_and_keeps_its_weight() -> None:
    clock = Clock()
    policy = ValuePolicy(clock)
    policy.touch(items(1, 2))
    policy.advise(2, Hint(priority=100))
    for other in (7, 8):
        policy.touch(items(other))
    policy.replace(1, Item(11))
    policy.replace(2, Item(12))
    clock.now_s += 30
    assert list(policy.victims())[:2] == [7, 8]
    # What follows it can be restored as before: it is not worth nothing.
    policy.advise(12, Hint(priority=50))
    policy.advise(7, Hint(priority=0))
    assert next(policy.victims()) == 7


# Least recently used


def test_least_recently_used_leaves_first() -> None:
    policy = LruPolicy()
    for segment_id in (1, 2, 3):
        policy.touch(items(segment_id))
    policy.touch(items(1))
    assert list(policy.victims()) == [2, 3, 1]


def test_on_one_path_the_tail_leaves_before_the_head() -> None:
    policy = LruPolicy()
    policy.touch(items(1))
    policy.touch(items(1, 2))
    policy.touch(items(1, 2, 3))
    policy.touch(items(9))
    assert list(policy.victims()) == [3, 2, 1, 9]


def test_a_shared_head_outlives_both_branches() -> None:
    policy = LruPolicy()
    policy.touch(items(1, 2))
    policy.touch(items(1, 3))
    assert list(policy.victims()) == [2, 3, 1]


def test_touching_a_head_alone_keeps_the_order() -> None:
    policy = LruPolicy()
    policy.touch(items(1, 2))
    policy.touch(items(1))
    assert list(policy.victims()) == [2, 1]


# Both


@pytest.mark.parametrize("kind", KINDS)
def test_removed_segments_are_no_victims_and_unknown_ones_raise(kind: str) -> None:
    policy = KINDS[kind]()
    policy.touch(items(1, 2))
    policy.remove(2)
    assert list(policy.victims()) == [1]
    assert list(policy.fresh().victims()) == []
    with pytest.raises(KeyError):
        policy.remove(2)
    policy.remove(1)
    assert list(policy.victims()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_segments_that_name_each_other_are_all_victims(kind: str) -> None:
    policy = KINDS[kind]()
    policy.touch(items(1, 2))
    policy.touch(items(2, 1))
    policy.touch(items(2, 1, 3, 2))
    assert sorted(policy.victims()) == [1, 2, 3]


@settings(max_examples=100)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    parents=st.lists(st.integers(-1, 10**6), min_size=1, max_size=12),
    worths=st.lists(st.tuples(st.integers(0, 50_000), st.floats(0, 3)), min_size=12, max_size=12),
    touches=st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from(["touch", "evict", "hold", "release"])), max_size=40
    ),
)
def test_in_any_tree_and_history_no_segment_leaves_after_its_child(
    kind: str, parents: list[int], worths: list[tuple[int, float]], touches: list[tuple[int, str]]
) -> None:
    # Node i's parent is one of the nodes before it, or none (-1).
    tree = [choice % (i + 1) - 1 for i, choice in enumerate(parents)]

    def path_to(node: int) -> list[int]:
        path = [node]
        while tree[path[-1]] >= 0:
            path.append(tree[path[-1]])
        return path[::-1]

    def touch(node: int) -> None:
        policy.touch([Item(i, worths[i][0], 100, worths[i][1]) for i in path_to(node)])

    policy = KINDS[kind]()
    for node in range(len(tree)):
        touch(node)
    removed: set[int] = set()
    held: set[int] = set()
    for choice, action in touches:
        node = choice % len(tree)
        if action == "evict":
            blocked = {before for each in held for before in path_to(each)}
            victim = next((victim for victim in policy.victims() if victim not in blocked), None)
            if victim is not None:
                policy.remove(victim)
                removed.add(victim)
        elif action != "touch":
            # As a pin does: with all that comes before it.
            path = [each for each in path_to(node) if each not in removed]
            for each in path:
                policy.hold(each, is_held=action == "hold")
            held = held.union(path) if action == "hold" else held.difference(path)
        else:
            touch(node)
            removed -= set(path_to(node))
            if kind == "lru":
                assert next(reversed(list(policy.victims()))) == path_to(node)[0]
    order = list(policy.victims())
    stored = set(range(len(tree))) - removed
    assert stored - {before for each in held for before in path_to(each)} <= set(order) <= stored
    if kind == "value":
        assert held.isdisjoint(order)
    for node in held:
        policy.hold(node, is_held=False)
    order = list(policy.victims())
    assert sorted(order) == sorted(stored)
    position = {node: i for i, node in enumerate(order)}
    for node in order:
        assert tree[node] < 0 or position[node] < position[tree[node]]


# Worth


def test_what_saves_least_per_byte_and_idle_second_leaves_first() -> None:
    clock = Clock()
    policy = ValuePolicy(clock)
    policy.touch([Item(1, taken_bytes=10_000, saved_s=1.0)])
    policy.touch([Item(2, taken_bytes=20_000, saved_s=1.0)])
    policy.touch([Item(3, taken_bytes=10_000, saved_s=0.4)])
    clock.now_s += 10
    policy.touch([Item(4, taken_bytes=10_000, saved_s=0.4)])
    clock.now_s += 10
    # Roots of the saving per 10 KB, per second: 1/20, 0.71/20, 0.63/20, 0.63/10.
    assert list(policy.victims()) == [3, 2, 1, 4]
    clock.now_s += 1000
    # By now all have been idle for about as long.
    assert list(policy.victims()) == [3, 4, 2, 1]


def test_a_segment_of_unknown_cost_counts_by_its_tokens() -> None:
    policy = ValuePolicy(Clock())
    known_s = 1000 * UNKNOWN_TOKEN_S
    policy.touch([Item(1, num_tokens=1000, saved_s=0.0)])
    policy.touch([Item(2, saved_s=known_s * 0.9)])
    policy.touch([Item(3, saved_s=known_s * 1.1)])
    assert list(policy.victims()) == [2, 1, 3]


def test_worth_is_what_a_segment_is_worth_now() -> None:
    policy = ValuePolicy(Clock())
    one, two = Item(1, saved_s=1.0), Item(2, saved_s=0.5)
    policy.touch([one])
    policy.touch([two])
    assert list(policy.victims()) == [2, 1]
    # It was written to a lower tier, say.
    one.saved_s = 0.1
    assert list(policy.victims()) == [1, 2]


def test_what_usually_comes_back_soon_stays() -> None:
    clock = Clock()
    policy = ValuePolicy(clock)
    # Both come back now and then; the first one every 20 s, the second one every 100 s.
    for second in range(0, 401, 20):
        clock.now_s = 100.0 + second
        policy.touch([Item(1)])
        if second % 100 == 0:
            policy.touch([Item(2)])
    clock.now_s += 5
    assert list(policy.victims()) == [2, 1]
    # What continues a conversation is expected back as soon as the conversation.
    policy.touch([Item(1), Item(3, start_token=100)])
    clock.now_s += 5
    assert list(policy.victims()) == [2, 3, 1]
    # Its usual pause has long been over: all three have been away for about as long.
    policy.touch([Item(2)])
    clock.now_s += 1000
    assert next(policy.victims()) == 3


def test_what_follows_a_missing_segment_leaves_first() -> None:
    clock = Clock()
    policy = ValuePolicy(clock)
    policy.touch([Item(1, saved_s=0.1)])
    path = [Item(2), Item(3, start_token=100), Item(4, start_token=200), Item(5, start_token=300)]
    policy.touch(path)
    assert list(policy.victims()) == [1, 5, 4, 3, 2]
    policy.remove(3)
    assert list(policy.victims()) == [5, 4, 1, 2]
    # As when a turn is stored that does not fit: its next segment has nothing to continue.
    policy.touch([Item(6, start_token=400)])
    assert next(policy.victims()) in (5, 6)
    # It was stored again.
    policy.touch([path[0], Item(7, start_token=100), path[2], path[3]])
    assert list(policy.victims()) == [6, 1, 5, 4, 7, 2]


def test_a_worthless_head_waits_for_a_tail_of_no_bytes() -> None:
    policy = ValuePolicy(Clock())
    head, tail, other = Item(1, 10**6, saved_s=0.01), Item(2, 0, saved_s=0.01), Item(3, 10_000, saved_s=5.0)
    policy.touch([head, tail])
    policy.touch([other])
    assert list(policy.victims()) == [2, 1, 3]


def simulate(policy: EvictionPolicy, clock: Clock, requests: Sequence[Item], capacity_bytes: int) -> float:
    """Seconds that hits save when ``requests`` come one a second into a cache of ``capacity_bytes``."""
    stored: dict[int, Item] = {}
    saved_s = 0.0
    for item in requests:
        clock.now_s += 1
        if item.segment_id in stored:
            saved_s += item.saved_s
        else:
            victims = policy.victims()
            leaving: list[int] = []
            free_bytes = capacity_bytes - sum(held.taken_bytes for held in stored.values())
            while free_bytes < item.taken_bytes:
                leaving.append(next(victims))
                free_bytes += stored[leaving[-1]].taken_bytes
            for segment_id in leaving:
                policy.remove(segment_id)
                del stored[segment_id]
            stored[item.segment_id] = item
        policy.touch([item])
    return saved_s


def test_value_saves_more_seconds_than_lru_where_segments_differ() -> None:
    # Few segments are small and save much, many are large and save little; all return at random.
    rng = np.random.default_rng(7)
    dear = [Item(i, 10_000, saved_s=2.0) for i in range(20)]
    cheap = [Item(100 + i, 200_000, saved_s=0.1) for i in range(60)]
    everything = [*dear, *cheap]
    requests = [everything[i] for i in rng.integers(0, len(everything), 3000)]
    saved_s = {}
    for name in KINDS:
        clock = Clock()
        saved_s[name] = simulate(make_policy(name, clock), clock, requests, 2_000_000)
    assert saved_s["value"] > 1.5 * saved_s["lru"]


def test_a_victim_costs_a_number_of_looks_whatever_is_stored() -> None:
    clock = Clock()
    policy = ValuePolicy(clock)
    rng = np.random.default_rng(0)
    stored = [
        Item(i, int(size), saved_s=1.0) for i, size in enumerate(rng.integers(10_000, 8_000_000, 100_000))
    ]
    for item in stored:
        clock.now_s += 0.001
        policy.touch([item])
    assert sum(item.num_looks for item in stored) == 0
    num_victims = 50
    victims = list(islice(policy.victims(), num_victims))
    num_looks = sum(item.num_looks for item in stored)
    assert len(set(victims)) == num_victims
    assert num_looks <= NUM_OLDEST + NUM_SAMPLED + num_victims
    # They are among the worst of all: found without a sort, so not exactly the worst.
    worth = np.array(
        [
            item.saved_s / item.taken_bytes / (clock.now_s - 100 - i * 0.001 + 1e-3)
            for i, item in enumerate(stored)
        ]
    )
    rank = worth.argsort().argsort()
    assert np.median(rank[victims]) < 5_000


class CountingOrder(OrderedDict[int, None]):
    """Counts how many of its keys are read."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        for key in super().__iter__():
            self.num_read += 1
            yield key


@pytest.mark.parametrize(("kind", "name"), [("value", "_leaf_order"), ("lru", "_order")])
def test_victims_are_found_without_reading_the_whole_order(kind: str, name: str) -> None:
    policy = KINDS[kind]()
    order = CountingOrder()
    setattr(policy, name, order)
    for segment_id in range(20_000):
        policy.touch(items(segment_id))
    victims = list(islice(policy.victims(), 300))
    assert len(set(victims)) == 300
    assert order.num_read < 3_000
    # All of them are found all the same, although some leave and others come while they are looked for.
    left = policy.victims()
    first = list(islice(left, 1_000))
    for segment_id in first:
        policy.remove(segment_id)
    policy.touch(items(20_000))
    assert sorted([*first, *left]) == list(range(20_001))


# Hints


def two_conversations(idle_s: float = 20.0) -> tuple[ValuePolicy, Clock]:
    """Segments 1 and 2, equal but for their last uses: 1 was used longer ago, so it would leave first."""
    clock = Clock()
    policy = ValuePolicy(clock)
    policy.touch(items(1))
    clock.now_s += idle_s
    policy.touch(items(2))
    clock.now_s += idle_s
    assert list(policy.victims()) == [1, 2]
    return policy, clock


def test_what_is_expected_soon_outlives_what_was_just_used() -> None:
    policy, clock = two_conversations()
    policy.advise(1, Hint(next_use_s=12.0))
    assert list(policy.victims()) == [2, 1], "in 12 s, against 20 s since its use"
    policy.advise(1, Hint(next_use_s=300.0))
    assert list(policy.victims()) == [1, 2]
    clock.now_s += 290.0
    assert list(policy.victims()) == [2, 1]


def test_what_is_expected_late_leaves_before_what_may_come_at_any_time() -> None:
    policy, _ = two_conversations()
    policy.advise(2, Hint(next_use_s=3600.0))
    assert list(policy.victims()) == [2, 1]
    policy.advise(2, Hint(next_use_s=0))
    assert list(policy.victims()) == [1, 2], "taken back"


def test_an_expectation_that_was_not_met_fades() -> None:
    policy, clock = two_conversations()
    policy.advise(1, Hint(next_use_s=5.0))
    clock.now_s += 5.0
    worths = []
    for _ in range(4):
        worths.append(policy._nodes[1].worth(clock.now_s))
        clock.now_s += 4.0
    # Since then 0, 4 and 8 s; after a usual pause of 10 s the 57 s since its last use count again.
    assert [worths[0] / worth for worth in worths] == pytest.approx([1.0, 4.0, 8.0, 57.0])
    assert list(policy.victims()) == [1, 2]


def test_a_use_ends_an_expectation_and_a_demotion() -> None:
    for hint in (Hint(next_use_s=3600.0), Hint(demote=True)):
        policy, _ = two_conversations()
        policy.advise(2, hint)
        assert list(policy.victims()) == [2, 1]
        policy.touch(items(2))
        assert list(policy.victims()) == [1, 2]


def test_a_priority_weighs_within_bounds_and_can_be_lowered() -> None:
    policy, _ = two_conversations()
    worth = policy._nodes[1].worth(policy._clock())
    for priority, factor in ((100, 16.0), (75, 4.0), (50, 1.0), (0, 1 / 16)):
        policy.advise(1, Hint(priority=priority))
        assert policy._nodes[1].worth(policy._clock()) == pytest.approx(factor * worth)
    policy.advise(1, Hint(priority=50))
    policy.advise(1, Hint(ttl_s=60.0))
    assert list(policy._leaf_order) == [2, 1], "a pin alone is no change of worth, and no use"
    policy.advise(1, Hint(priority=75))
    assert list(policy.victims()) == [2, 1], "40 s idle and 4 times as dear, against 20 s"
    policy.touch(items(1))
    assert policy._nodes[1].weight == 4.0, "a use does not end it"


@pytest.mark.parametrize("later", [Hint(priority=50), Hint(next_use_s=10.0)])
def test_a_later_hint_ends_a_demotion(later: Hint) -> None:
    policy, _ = two_conversations()
    policy.advise(2, Hint(demote=True, priority=100))
    assert list(policy.victims()) == [2, 1]
    policy.advise(2, later)
    assert list(policy.victims()) == [1, 2]


def test_what_is_demoted_is_found_among_many() -> None:
    clock = Clock()
    policy = ValuePolicy(clock)
    for segment_id in range(10 * NUM_OLDEST):
        policy.touch(items(segment_id))
        clock.now_s += 1.0
    demoted = 10 * NUM_OLDEST - 1
    policy.advise(demoted, Hint(demote=True))
    assert next(policy.victims()) == demoted
    # Many that are protected do not hide those that are not.
    for segment_id in range(5 * NUM_OLDEST):
        policy.advise(segment_id, Hint(priority=100))
    first = [segment_id for segment_id, _ in zip(policy.victims(), range(100), strict=False)]
    assert first[0] == demoted
    assert all(segment_id >= 5 * NUM_OLDEST for segment_id in first)


def test_the_oldest_used_first_knows_demotion_alone() -> None:
    policy = LruPolicy()
    policy.touch(items(1))
    policy.touch(items(2))
    policy.advise(1, Hint(priority=100, next_use_s=1.0))
    assert list(policy.victims()) == [1, 2]
    policy.advise(2, Hint(demote=True))
    assert list(policy.victims()) == [2, 1]
