"""Eviction policies: which segment leaves first when space is needed."""

from __future__ import annotations

import heapq
import math
import random
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from krul_backend.errors import ConfigError
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import Clock

_NUM_FIRST = 256

UNKNOWN_TOKEN_S = 5e-5
"""Seconds to compute one token where nobody measured it: a model of 8B on one accelerator, roughly."""

NUM_OLDEST = 256
NUM_SAMPLED = 64

_MIN_TAKEN_BYTES = 4096
"""The least that a segment counts as: one without bytes still has keys and tokens."""

_TURN_S = 1.0
"""Uses in quicker succession are of one turn: they say nothing about pauses."""

UNKNOWN_PAUSE_S = 10.0
"""The usual pause between two uses of a conversation that was used only once: that of an agent with tools."""

_PAUSE_LEARNING_RATE = 0.3

_DEMOTED_WEIGHT = 1e-9


class Evictable(Protocol):
    """The properties of a segment that an order may depend on. All but the id may change between calls."""

    @property
    def segment_id(self) -> int: ...

    @property
    def start_token(self) -> int:
        """Position in the conversation; 0 for the first segment of one."""

    @property
    def value(self) -> float:
        """See ``value_of``."""


def _in_order(order: Collection[int], named: Collection[int] = ()) -> Iterator[int]:
    """Iterate over a collection without ``named``; it may change between two elements.

    It is copied a part at a time: its first few, then twice as many each time, without those that came
    before. So what an element costs does not depend on how large the collection is.
    """
    seen = set(named)
    num_copied = _NUM_FIRST
    while True:
        part = list(islice(order, num_copied))
        for each in part:
            if each not in seen:
                seen.add(each)
                yield each
        if len(part) < num_copied:
            return
        num_copied *= 2


def usual_pause_s(usual_s: float, pause_s: float) -> float:
    """The usual pause between two uses of a segment, after another pause."""
    return usual_s if pause_s <= _TURN_S else usual_s + _PAUSE_LEARNING_RATE * (pause_s - usual_s)


def value_of(restore_s: float, num_tokens: int, taken_bytes: int) -> float:
    """Return the value of a segment, the root of seconds saved per byte; see ``ValuePolicy``.

    ``restore_s``: what a restore saves by finding it in this tier, 0 if not known. ``taken_bytes``: what its
    eviction frees.
    """
    saved_s = restore_s or num_tokens * UNKNOWN_TOKEN_S
    return math.sqrt(saved_s / max(taken_bytes, _MIN_TAKEN_BYTES))


class EvictionPolicy(ABC):
    """Orders whole segments by when to evict them; pinned ones too. Not thread-safe: its owner locks."""

    @abstractmethod
    def touch(self, path: Sequence[Evictable]) -> None:
        """Note a use of the segments ``path``, in conversation order. Segments not seen before are added.

        ``path`` reaches from the conversation's first stored segment to the last one used. With it the policy
        can keep the rule of every order: a segment leaves before those that it continues, because KV without
        the KV before it can never be restored.
        """

    def advise(self, segment_id: int, hint: Hint) -> None:  # noqa: B027
        """Note a hint about a known segment. An order that does not depend on hints leaves it at this."""

    def hold(self, segment_id: int, *, is_held: bool) -> None:  # noqa: B027
        """Note that a known segment may not be evicted for now, or may be again.

        An order may name held segments all the same, and leave it to its owner to pass over them.
        """

    @abstractmethod
    def replace(self, segment_id: int, by: Evictable) -> None:
        """Put a segment in the place of a known one: what uses and hints have said of that holds for it."""

    @abstractmethod
    def remove(self, segment_id: int) -> None:
        """Forget a segment.

        Raises:
            KeyError: if it is not known.
        """

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """All known segments (but held ones, see ``hold``), the first to leave first.

        The order is computed lazily. If the policy changes meanwhile, a few segments may be left out, and
        some be named that are not known any more.
        """

    @abstractmethod
    def fresh(self) -> EvictionPolicy:
        """A policy of the same kind that knows no segment."""


class LruPolicy(EvictionPolicy):
    """The least recently used segment first; of one conversation the first segment counts as used last.

    Of hints it knows ``demote`` alone.
    """

    def __init__(self) -> None:
        # The ids by the places that segments have: a place has the id of the first one that had it.
        self._order: OrderedDict[int, int] = OrderedDict()
        # Of those that have the place of another one.
        self._places: dict[int, int] = {}

    def touch(self, path: Sequence[Evictable]) -> None:
        for segment in reversed(path):
            place = self._places.get(segment.segment_id, segment.segment_id)
            self._order[place] = segment.segment_id
            self._order.move_to_end(place)

    def advise(self, segment_id: int, hint: Hint) -> None:
        if hint.demote:
            self._order.move_to_end(self._places.get(segment_id, segment_id), last=False)

    def replace(self, segment_id: int, by: Evictable) -> None:
        place = self._places.pop(segment_id, segment_id)
        self._order[place] = by.segment_id
        self._places[by.segment_id] = place

    def remove(self, segment_id: int) -> None:
        del self._order[self._places.pop(segment_id, segment_id)]

    def victims(self) -> Iterator[int]:
        return _in_order(self._order.values())

    def fresh(self) -> LruPolicy:
        return LruPolicy()


@dataclass(eq=False)
class _Node:
    """A known segment; it continues ``parent``, and the segments ``children`` continue it.

    ``pause_s``: the usual time between two uses, a moving average. ``is_reachable``: all segments before it
    were known at the last use, and none of them has left since. ``weight``, ``is_demoted`` and
    ``next_use_at_s`` (None: nobody said) are from hints.
    """

    segment: Evictable
    last_used_s: float
    pause_s: float = UNKNOWN_PAUSE_S
    is_reachable: bool = True
    is_held: bool = False
    parent: _Node | None = None
    children: set[int] = field(default_factory=set)
    weight: float = 1.0
    is_demoted: bool = False
    next_use_at_s: float | None = None

    def use(self, now_s: float) -> None:
        """Note a use."""
        self.is_demoted, self.next_use_at_s = False, None
        self.pause_s = usual_pause_s(self.pause_s, now_s - self.last_used_s)
        self.last_used_s = now_s

    def worth(self, now_s: float) -> float:
        """See ``ValuePolicy``."""
        if not self.is_reachable:
            return 0.0
        idle_s = max(now_s - self.last_used_s, self.pause_s)
        next_use_at_s = self.next_use_at_s
        # Once a usual pause has passed after a use that a hint expects, it says nothing any more.
        if next_use_at_s is not None and now_s - next_use_at_s <= self.pause_s:
            idle_s = max(abs(next_use_at_s - now_s), _TURN_S)
        weight = _DEMOTED_WEIGHT if self.is_demoted else self.weight
        return weight * self.segment.value / idle_s


class ValuePolicy(EvictionPolicy):
    """The segment of least worth first: root of (seconds saved by having it / bytes taken) / seconds idle.

    Idle are the seconds since its last use, or the usual pause between two uses if that is longer: so a
    conversation that comes back every few seconds does not make room for one that has just left, but comes
    back every few minutes. Without the root, replays of recorded sessions lose hits and save no more time.
    A segment is worth nothing if one before it is missing, as when a turn is stored that does not fit whole:
    nobody could restore it.

    Hints change this: the time until an expected use takes the place of the idle seconds, and for a usual
    pause after a use that did not come the time since then; a priority multiplies; what is demoted is worth
    almost nothing.

    Every worth changes with time, so no order of all segments is kept, only the order of last use among the
    *leaves*, the segments that no known one continues and that are not held. The next victim is the one that
    is worth least among some candidates: the ``NUM_OLDEST`` leaves that were used longest ago, because idle
    time counts most, and ``NUM_SAMPLED`` random leaves, to find large segments that save little. After each
    victim the next oldest leaf becomes a candidate, and so does the segment that the victim continued, if
    nothing else continues it. So the cost grows with the number of victims, not with the number of segments.

    Args:
        seed: of the random sample.
    """

    def __init__(self, clock: Clock = time.monotonic, seed: int = 0) -> None:
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
        # Segments that share pages can name each other. Linking along this path from its start, each segment
        # where it comes first, can make no cycle of them.
        for segment_id, segment in {segment.segment_id: segment for segment in path}.items():
            node = self._nodes.get(segment_id)
            if node is None:
                node = self._nodes[segment_id] = _Node(segment, now_s)
                if parent is not None:
                    node.pause_s = parent.pause_s
                self._add_leaf(segment_id)
            node.use(now_s)
            node.is_reachable = parent.is_reachable if parent is not None else segment.start_token == 0
            if node.parent is not parent:
                self._unlink(node)
                node.parent = parent
                if parent is not None:
                    parent.children.add(segment_id)
                    self._drop_leaf(parent.segment.segment_id)
            if segment_id in self._leaf_order:
                # What nobody can restore goes to the front, so that it is a candidate at once.
                self._leaf_order.move_to_end(segment_id, last=node.is_reachable)
            parent = node

    def advise(self, segment_id: int, hint: Hint) -> None:
        node = self._nodes[segment_id]
        now_s = self._clock()
        before = node.worth(now_s)
        if hint.weight is not None:
            node.weight = hint.weight
        if hint.next_use_s is not None:
            node.next_use_at_s = now_s + hint.next_use_s if hint.next_use_s else None
        if hint.priority is not None or hint.next_use_s:
            node.is_demoted = False
        node.is_demoted |= hint.demote
        after = node.worth(now_s)
        if segment_id in self._leaf_order and after != before:
            # Among those used longest ago victims are looked for: what is worth less now has to be there, and
            # what is worth more must not take the place of others.
            self._leaf_order.move_to_end(segment_id, last=after > before)

    def hold(self, segment_id: int, *, is_held: bool) -> None:
        # Held segments that were used long ago are worth least of all: as leaves, all of them would be named
        # before any other.
        node = self._nodes[segment_id]
        if is_held == node.is_held:
            return
        node.is_held = is_held
        if is_held:
            self._drop_leaf(segment_id)
        elif not node.children:
            self._add_leaf(segment_id, is_next=True)

    def replace(self, segment_id: int, by: Evictable) -> None:
        node = self._nodes[by.segment_id] = self._nodes.pop(segment_id)
        node.segment = by
        if node.parent is not None:
            node.parent.children.remove(segment_id)
            node.parent.children.add(by.segment_id)
        if segment_id in self._leaf_order:
            self._drop_leaf(segment_id)
            self._add_leaf(by.segment_id, is_next=True)

    def remove(self, segment_id: int) -> None:
        node = self._nodes.pop(segment_id)
        self._unlink(node)
        for child_id in node.children:
            self._nodes[child_id].parent = None
        cut_off = list(node.children)
        while cut_off:
            child = self._nodes[cut_off.pop()]
            if child.is_reachable:
                child.is_reachable = False
                cut_off += child.children
        self._drop_leaf(segment_id)

    def victims(self) -> Iterator[int]:
        now_s = self._clock()
        first = list(islice(self._leaf_order, NUM_OLDEST))
        # If there are no more leaves than this, the oldest are all of them.
        sampled = self._random.choices(self._leaves, k=NUM_SAMPLED) if len(self._leaves) > NUM_OLDEST else []
        offered = dict.fromkeys((*first, *sampled))
        later = _in_order(self._leaf_order, offered)
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
                if num_gone[before_id] == len(before.children) and not before.is_held:
                    heapq.heappush(candidates, (before.worth(now_s), before_id))
            following = next((leaf for leaf in later if leaf in self._nodes), None)
            if following is not None:
                heapq.heappush(candidates, (self._nodes[following].worth(now_s), following))

    def fresh(self) -> ValuePolicy:
        return ValuePolicy(self._clock, self._seed)

    def _unlink(self, node: _Node) -> None:
        """Cut the link to the segment that this one continues, which may become a leaf."""
        parent, node.parent = node.parent, None
        if parent is None:
            return
        parent.children.discard(node.segment.segment_id)
        if not parent.children and not parent.is_held:
            self._add_leaf(parent.segment.segment_id, is_next=True)

    def _add_leaf(self, segment_id: int, *, is_next: bool = False) -> None:
        """Add a leaf to the end of the order, or to its front, so that it ``is_next`` to be a candidate."""
        self._leaf_order[segment_id] = None
        self._leaf_order.move_to_end(segment_id, last=not is_next)
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


POLICIES = ("value", "lru")


def make_policy(name: str, clock: Clock = time.monotonic) -> EvictionPolicy:
    """Make a policy by its name in the configuration; it knows no segment. ``clock`` counts seconds.

    Raises:
        ConfigError: there is none of this name.
    """
    if name == "value":
        return ValuePolicy(clock)
    if name == "lru":
        return LruPolicy()
    raise ConfigError(f"eviction policy {name!r} is unknown; accepted are {', '.join(POLICIES)}")
