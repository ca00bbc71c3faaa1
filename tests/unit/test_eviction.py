from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.store.eviction import LruPolicy


def test_least_recently_used_leaves_first() -> None:
    policy = LruPolicy()
    for segment_id in (1, 2, 3):
        policy.touch([segment_id])
    policy.touch([1])
    assert list(policy.victims()) == [2, 3, 1]


def test_on_one_path_the_tail_leaves_before_the_head() -> None:
    policy = LruPolicy()
    policy.touch([1])
    policy.touch([1, 2])
    policy.touch([1, 2, 3])
    policy.touch([9])
    assert list(policy.victims()) == [3, 2, 1, 9]


def test_a_shared_head_outlives_both_branches() -> None:
    policy = LruPolicy()
    policy.touch([1, 2])
    policy.touch([1, 3])
    assert list(policy.victims()) == [2, 3, 1]


def test_touching_a_head_alone_keeps_the_order() -> None:
    policy = LruPolicy()
    policy.touch([1, 2])
    policy.touch([1])
    assert list(policy.victims()) == [2, 1]


def test_removed_segments_are_no_victims_and_unknown_ones_raise() -> None:
    policy = LruPolicy()
    policy.touch([1, 2])
    policy.remove(2)
    assert list(policy.victims()) == [1]
    with pytest.raises(KeyError):
        policy.remove(2)


@settings(max_examples=100, deadline=None)
@given(
    parents=st.lists(st.integers(-1, 10**6), min_size=1, max_size=12),
    touches=st.lists(st.tuples(st.integers(0, 10**6), st.booleans()), max_size=40),
)
def test_in_any_tree_and_history_no_segment_leaves_after_its_child(
    parents: list[int], touches: list[tuple[int, bool]]
) -> None:
    # Node i's parent is one of the nodes before it, or none (-1).
    tree = [choice % (i + 1) - 1 for i, choice in enumerate(parents)]

    def path_to(node: int) -> list[int]:
        path = [node]
        while tree[path[-1]] >= 0:
            path.append(tree[path[-1]])
        return path[::-1]

    policy = LruPolicy()
    for node in range(len(tree)):
        policy.touch(path_to(node))
    removed: set[int] = set()
    for choice, is_eviction in touches:
        if is_eviction:
            victim = next(policy.victims(), None)
            if victim is not None:
                policy.remove(victim)
                removed.add(victim)
        else:
            node = choice % len(tree)
            policy.touch(path_to(node))
            removed -= set(path_to(node))
            assert next(reversed(list(policy.victims()))) == path_to(node)[0]
    order = list(policy.victims())
    assert sorted(order) == sorted(set(range(len(tree))) - removed)
    position = {node: i for i, node in enumerate(order)}
    for node in order:
        assert tree[node] < 0 or position[node] < position[tree[node]]
