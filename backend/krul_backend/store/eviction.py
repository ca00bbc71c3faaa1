"""Which segment leaves first when space is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence


class EvictionPolicy(ABC):
    """Orders whole segments by their ids. Called under the store's lock; knows no sizes, pins or bytes."""

    @abstractmethod
    def touch(self, path: Sequence[int]) -> None:
        """Note a use of the segments ``path``, in conversation order. Ids not seen before are added.

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
        """All known segments, the first to leave first. Do not touch or remove while iterating."""


class LruPolicy(EvictionPolicy):
    """The least recently used segment first; on one path the head counts as used last."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, path: Sequence[int]) -> None:
        for segment_id in reversed(path):
            self._order[segment_id] = None
            self._order.move_to_end(segment_id)

    def remove(self, segment_id: int) -> None:
        del self._order[segment_id]

    def victims(self) -> Iterator[int]:
        return iter(self._order)
