"""Which segment leaves first when space is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

_NUM_FIRST = 256


class Evictable(Protocol):
    """What an order may go by. All of it may change between calls, except the id."""

    @property
    def segment_id(self) -> int: ...

    @property
    def taken_bytes(self) -> int:
        """Bytes that its leaving sets free."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def restore_s(self) -> float:
        """Seconds that a restore saves by finding it here; 0 if not known."""


def as_it_is(segment_ids: Iterable[int], named: Collection[int]) -> Iterator[int]:
    """The elements of a collection when the first one is asked for, but those in ``named``.

    They are copied in one step: the collection may change between two elements.
    """
    yield from (segment_id for segment_id in list(segment_ids) if segment_id not in named)


class EvictionPolicy(ABC):
    """Orders whole segments. Not thread-safe: called under the lock of whoever owns it; knows no pins."""

    @abstractmethod
    def touch(self, path: Sequence[Evictable]) -> None:
        """Note a use of the segments ``path``, in conversation order. Segments not seen before are added.

        ``path`` reaches from the conversation's first stored segment to the last one used, so that the policy
        can keep the rule that every order must obey: a segment leaves before those that it continues, because
        KV without the KV before it can never be restored.
        """

    @abstractmethod
    def remove(self, segment_id: int) -> None:
        """Forget a segment.

        Raises:
            KeyError: if it is not known.
        """

    @abstractmethod
    def victims(self) -> Iterator[int]:
        """All known segments, the first to leave first.

        The order is worked out as far as it is asked for. The policy may change meanwhile: then a few
        segments may be left out, and some be named that are not known any more.
        """

    @abstractmethod
    def fresh(self) -> EvictionPolicy:
        """A policy of the same kind that knows no segment."""


class LruPolicy(EvictionPolicy):
    """The least recently used segment first; on one path the head counts as used last."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, path: Sequence[Evictable]) -> None:
        for segment in reversed(path):
            self._order[segment.segment_id] = None
            self._order.move_to_end(segment.segment_id)

    def remove(self, segment_id: int) -> None:
        del self._order[segment_id]

    def victims(self) -> Iterator[int]:
        # Most searches end within the first few.
        first = list(islice(self._order, _NUM_FIRST))
        yield from first
        yield from as_it_is(self._order, set(first))

    def fresh(self) -> LruPolicy:
        return LruPolicy()
