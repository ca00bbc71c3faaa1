"""The segment that is worth least leaves first."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from krul_backend.tiers.common.eviction import Evictable, EvictionPolicy, as_it_is

UNKNOWN_TOKEN_S = 5e-5
"""Seconds to compute one token where nobody measured it: a model of 8B on one accelerator, roughly."""

NUM_OLDEST = 256
NUM_SAMPLED = 64

_MIN_TAKEN_BYTES = 4096
"""What a segment of no bytes counts as: keys and tokens take space, too, and it holds up its head."""

_MIN_IDLE_S = 1e-3


@dataclass(eq=False)
class _Node:
    """A known segment, after ``parent`` in its conversation; ``children`` are the known ones that follow."""

    segment: Evictable
    last_used_s: float
    parent: _Node | None = None
    children: set[int] = field(default_factory=set)

    def worth(self, now_s: float) -> float:
        saved_s = self.segment.restore_s or self.segment.num_tokens * UNKNOWN_TOKEN_S
        taken_bytes = max(self.segment.taken_bytes, _MIN_TAKEN_BYTES)
        return saved_s / taken_bytes / max(now_s - self.last_used_s, _MIN_IDLE_S)


class ValuePolicy(EvictionPolicy):
    """Worth: seconds saved by having it / bytes it takes / seconds since its last use.

    Idle time changes every worth all the time, so no order of all segments is kept. What is kept is the order
    of last use among the *leaves*, the segments that no known one continues. The next victim is the one that
    is worth least among candidates: the ``NUM_OLDEST`` leaves that were used longest ago, since idle time
    counts most, and ``NUM_SAMPLED`` random ones, which find large segments that save little wherever they
    are. For each victim another leaf takes its place: the next oldest one, and what the victim continued if
    nothing else continues that. So a number of victims costs a number of steps, however many segments there
    are.

    Args:
        clock: seconds, monotonic.
        seed: of the random sample.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, seed: int = 0) -> None:
        self._clock = clock
        self._seed = seed
        self._random = random.Random(seed)
        self._nodes: dict[int, _Node] = {}
        # The leaves twice: by last use, and as a list with positions, from which one can be drawn.
        self._leaf_order: OrderedDict[int, None] = OrderedDict()
        self._leaves: list[int] = []
        self._leaf_position: dict[int, int] = {}

    def touch(self, path: Sequence[Evictable]) -> None:
        now_s = self._clock()
        parent: _Node | None = None
        # Linked from the first on: then the way up from each segment is this path, so no cycle can arise from
        # segments that name each other. For the same reason a segment counts where it comes first.
        for segment_id, segment in {segment.segment_id: segment for segment in path}.items():
            node = self._nodes.get(segment_id)
            if node is None:
                node = self._nodes[segment_id] = _Node(segment, now_s)
                self._add_leaf(segment_id)
            node.last_used_s = now_s
            if node.parent is not parent:
                self._unlink(node)
                node.parent = parent
                if parent is not None:
                    parent.children.add(segment_id)
                    self._drop_leaf(parent.segment.segment_id)
            if segment_id in self._leaf_order:
                self._leaf_order.move_to_end(segment_id)
            parent = node

    def remove(self, segment_id: int) -> None:
        node = self._nodes.pop(segment_id)
        self._unlink(node)
        for child in node.children:
            self._nodes[child].parent = None
        self._drop_leaf(segment_id)

    def victims(self) -> Iterator[int]:
        now_s = self._clock()
        first = list(itertools.islice(self._leaf_order, NUM_OLDEST))
        # With fewer leaves the oldest are all of them.
        sampled = self._random.choices(self._leaves, k=NUM_SAMPLED) if len(self._leaves) > NUM_OLDEST else []
        offered = dict.fromkeys((*first, *sampled))
        later = as_it_is(self._leaf_order, offered)
        candidates = [(self._nodes[segment_id].worth(now_s), segment_id) for segment_id in offered]
        heapq.heapify(candidates)
        num_gone: dict[int, int] = {}
        while candidates:
            _, segment_id = heapq.heappop(candidates)
            yield segment_id
            node = self._nodes.get(segment_id)
            before = node.parent if node is not None else None
            if before is not None:
                before_id = before.segment.segment_id
                num_gone[before_id] = num_gone.get(before_id, 0) + 1
                if num_gone[before_id] == len(before.children):
                    heapq.heappush(candidates, (before.worth(now_s), before_id))
            following = next((leaf for leaf in later if leaf in self._nodes), None)
            if following is not None:
                heapq.heappush(candidates, (self._nodes[following].worth(now_s), following))

    def fresh(self) -> ValuePolicy:
        return ValuePolicy(self._clock, self._seed)

    def _unlink(self, node: _Node) -> None:
        """Take a segment off the one it continues, which may become a leaf."""
        parent, node.parent = node.parent, None
        if parent is None:
            return
        parent.children.discard(node.segment.segment_id)
        if not parent.children:
            self._add_leaf(parent.segment.segment_id)
            # To the front: the next victim may be chosen from it, by its own last use.
            self._leaf_order.move_to_end(parent.segment.segment_id, last=False)

    def _add_leaf(self, segment_id: int) -> None:
        self._leaf_order[segment_id] = None
        self._leaf_position[segment_id] = len(self._leaves)
        self._leaves.append(segment_id)

    def _drop_leaf(self, segment_id: int) -> None:
        if segment_id not in self._leaf_order:
            return
        del self._leaf_order[segment_id]
        position = self._leaf_position.pop(segment_id)
        last = self._leaves.pop()
        if last != segment_id:
            self._leaves[position] = last
            self._leaf_position[last] = position
