"""Eviction policies to compare with: FIFO, S3-FIFO, and Belady's, which knows the future."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import cast

from benchmarks.policy.workload import Future
from krul_backend.tiers.common.eviction import Evictable, EvictionPolicy
from krul_backend.tiers.common.interface import Clock
from krul_backend.tiers.dram.stored_segment import StoredSegment


class TreePolicy(EvictionPolicy):
    """Knows which segment continues which, so that a segment leaves before those that it continues."""

    def __init__(self) -> None:
        self.segments: dict[int, Evictable] = {}
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, set[int]] = {}

    def touch(self, path: Sequence[Evictable]) -> None:
        parent = None
        for segment in path:
            segment_id = segment.segment_id
            if segment_id not in self.segments:
                self.segments[segment_id] = segment
                self._children[segment_id] = set()
                self._parent[segment_id] = parent
                if parent is not None:
                    self._children[parent].add(segment_id)
                self.added(segment)
            else:
                self.used(segment)
            parent = segment_id

    def remove(self, segment_id: int) -> None:
        segment = self.segments.pop(segment_id)
        parent = self._parent.pop(segment_id)
        if parent is not None:
            self._children[parent].discard(segment_id)
        for child in self._children.pop(segment_id):
            self._parent[child] = None
        self.left(segment)

    def leaves(self) -> list[int]:
        return [segment_id for segment_id, children in self._children.items() if not children]

    def parent_of(self, segment_id: int) -> int | None:
        return self._parent.get(segment_id)

    def children_of(self, segment_id: int) -> set[int]:
        return self._children.get(segment_id, set())

    @abstractmethod
    def added(self, segment: Evictable) -> None:
        """A segment is new."""

    @abstractmethod
    def used(self, segment: Evictable) -> None:
        """A known segment is used again."""

    @abstractmethod
    def left(self, segment: Evictable) -> None:
        """A segment has gone."""


class FifoPolicy(TreePolicy):
    """Of the segments that nothing continues, the one that was stored first."""

    def added(self, segment: Evictable) -> None:
        pass

    def used(self, segment: Evictable) -> None:
        pass

    def left(self, segment: Evictable) -> None:
        pass

    def victims(self) -> Iterator[int]:
        # Segment ids ascend with the time of storing.
        candidates = self.leaves()
        heapq.heapify(candidates)
        gone: set[int] = set()
        while candidates:
            segment_id = heapq.heappop(candidates)
            parent = self.parent_of(segment_id)
            gone.add(segment_id)
            yield segment_id
            if parent is not None and self.children_of(parent) <= gone:
                heapq.heappush(candidates, parent)

    def fresh(self) -> FifoPolicy:
        return FifoPolicy()


_SMALL_SHARE = 0.1
_MAX_USES = 3


class S3FifoPolicy(TreePolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for what is new, a main queue, and a list of what left.

    At the end of the small queue, which has a tenth of the bytes, a segment that was used since it came goes
    on to the main one; what comes back soon after it left the cache from there goes to the main queue at
    once. In the main queue a segment stays for another round for each use, up to three. A segment that others
    continue always stays. (A turn counts as two uses, because it looks pages up and stores others.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._small_bytes = self._all_bytes = 0
        self._uses: dict[int, int] = {}
        self._ghosts: OrderedDict[str, None] = OrderedDict()

    def added(self, segment: Evictable) -> None:
        segment_id, num_bytes = segment.segment_id, segment.taken_bytes
        self._uses[segment_id] = 0
        self._all_bytes += num_bytes
        if first_key(segment) in self._ghosts:
            self._main[segment_id] = num_bytes
        else:
            self._small[segment_id] = num_bytes
            self._small_bytes += num_bytes

    def used(self, segment: Evictable) -> None:
        self._uses[segment.segment_id] = min(self._uses[segment.segment_id] + 1, _MAX_USES)

    def left(self, segment: Evictable) -> None:
        segment_id = segment.segment_id
        del self._uses[segment_id]
        if segment_id in self._small:
            self._leave_small(segment_id)
        self._all_bytes -= self._main.pop(segment_id)

    def victims(self) -> Iterator[int]:
        offered: set[int] = set()
        num_kept = 0
        while len(offered) < len(self.segments):
            # If nothing of the main queue can leave, what continues it is in the small one.
            is_stuck = num_kept > (_MAX_USES + 1) * len(self._main)
            is_small = is_stuck or self._small_bytes > _SMALL_SHARE * self._all_bytes
            queue = self._small if self._small and is_small else self._main
            segment_id = next(iter(queue))
            uses = self._uses[segment_id]
            is_leaf = self.children_of(segment_id) <= offered
            stays = segment_id in offered or not is_leaf or uses > (queue is self._small)
            if queue is self._small:
                # What is offered and not evicted is in use: it goes on to the main queue, too.
                self._leave_small(segment_id)
                self._uses[segment_id] = 0
                if not stays:
                    self._ghosts[first_key(self.segments[segment_id])] = None
            else:
                self._uses[segment_id] = max(0, uses - 1)
                queue.move_to_end(segment_id)
            num_kept = num_kept + 1 if stays else 0
            if not stays:
                offered.add(segment_id)
                yield segment_id

    def _leave_small(self, segment_id: int) -> None:
        """Move a segment from the small queue to the main one."""
        num_bytes = self._main[segment_id] = self._small.pop(segment_id)
        self._small_bytes -= num_bytes
        while len(self._ghosts) > len(self.segments):
            self._ghosts.popitem(last=False)

    def fresh(self) -> S3FifoPolicy:
        return S3FifoPolicy()


class BeladyPolicy(EvictionPolicy):
    """The segment that is used again last, or never. It looks at the future, so it is no policy for a server.

    The driver sets ``incoming_s``, when what is being stored is used again: a segment that is used sooner is
    no victim, so what is used latest of all is not stored.
    """

    def __init__(self, future: Future, clock: Clock) -> None:
        self.incoming_s = 0.0
        self._future = future
        self._clock = clock
        self._entries: dict[int, tuple[float, int, int]] = {}
        # (next use, position, id): of segments that are used at the same time the deepest leaves first.
        self._order: list[tuple[float, int, int]] = []

    def touch(self, path: Sequence[Evictable]) -> None:
        now_s = self._clock()
        for segment in path:
            old = self._entries.get(segment.segment_id)
            if old is not None and old[0] > now_s:
                continue
            if old is not None:
                self._drop(old)
            next_s = self._future.next_use_s(first_key(segment), now_s)
            start = cast(StoredSegment, segment).manifest.start_token
            entry = (next_s, start, segment.segment_id)
            self._entries[segment.segment_id] = entry
            insort(self._order, entry)

    def remove(self, segment_id: int) -> None:
        self._drop(self._entries.pop(segment_id))

    def victims(self) -> Iterator[int]:
        for next_s, _, segment_id in reversed(self._order.copy()):
            if next_s <= self.incoming_s:
                return
            yield segment_id

    def fresh(self) -> BeladyPolicy:
        return BeladyPolicy(self._future, self._clock)

    def _drop(self, entry: tuple[float, int, int]) -> None:
        del self._order[bisect_left(self._order, entry)]


def first_key(segment: Evictable) -> str:
    """The key of a segment's first page, which names it also after it was evicted and stored again."""
    return cast(StoredSegment, segment).manifest.page_keys[0]
