"""The segments of the cluster that this daemon knows of, from what it wrote and asked."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.tiers.common.page_index import PageIndex, PrefixMatch
from krul_backend.tiers.mooncake.stored_object import StoredObject

KNOWN_FOR_S = 1.0
"""How long an answer of the cluster is used: that a segment is there, or that none begins with a page."""

_MAX_ABSENT = 65536


class KnownSegments:
    """Remembers segments that were seen in the cluster, and pages with which none begins. Thread-safe.

    A known segment may have been evicted since; see ``StoredObject.confirmed_at_s``. Segments of at most
    ``max_tokens`` tokens are remembered; the least recently matched ones are forgotten first.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float], max_tokens: int = 8 << 20) -> None:
        self._clock = clock
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._index: PageIndex[StoredObject] = PageIndex()
        self._segments: OrderedDict[int, StoredObject] = OrderedDict()
        self._num_tokens = 0
        self._absent_until_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._num_clears = 0

    @property
    def num_clears(self) -> int:
        """The number of clears so far, to be read before the cluster is asked; see ``add``."""
        with self._lock:
            return self._num_clears

    def segments(self) -> list[StoredObject]:
        with self._lock:
            return list(self._segments.values())

    @property
    def num_pages(self) -> int:
        with self._lock:
            return self._index.num_pages

    def segments_of(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[StoredObject]:
        """The known segments that hold the pages, each once."""
        with self._lock:
            return self._index.segments_of(model, page_keys)

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        with self._lock:
            return self._index.find_missing(model, page_keys)

    def match_prefix(
        self, model: ModelIdentity, page_keys: tuple[str, ...], token_ids: TokenIds
    ) -> PrefixMatch[StoredObject]:
        with self._lock:
            match = self._index.match_prefix(model, page_keys, token_ids)
            for run in match.runs:
                self._segments.move_to_end(run.segment.segment_id)
            return match

    def add(self, segment: StoredObject, num_clears: int) -> bool:
        """Remember a segment, unless something was cleared since ``num_clears`` was read.

        False too if it has no page that another known segment does not have.
        """
        with self._lock:
            if num_clears != self._num_clears:
                return False
            if self._index.add(segment) == 0:
                return False
            self._segments[segment.segment_id] = segment
            self._absent_until_s.pop((segment.prefix, segment.manifest.page_keys[0]), None)
            self._num_tokens += segment.manifest.num_tokens
            while self._num_tokens > self._max_tokens and len(self._segments) > 1:
                self._remove(next(iter(self._segments.values())))
            return True

    def forget(self, segment: StoredObject) -> bool:
        """Forget a segment; False if it was not known."""
        with self._lock:
            is_known = segment.segment_id in self._segments
            if is_known:
                self._remove(segment)
            return is_known

    def forget_model(self, fingerprint: str | None, *, except_prefix: str | None = None) -> None:
        """Forget a model's segments (None: all models'), except those under ``except_prefix``."""
        with self._lock:
            for segment in list(self._segments.values()):
                is_meant = fingerprint in (None, segment.manifest.model.fingerprint)
                if is_meant and segment.prefix != except_prefix:
                    self._remove(segment)

    def clear(self, fingerprint: str | None) -> None:
        """Forget a model (None: all), and do not remember answers to questions that were asked before."""
        with self._lock:
            self._num_clears += 1
        self.forget_model(fingerprint)

    def note_absent(self, prefix: str, page_key: str) -> None:
        """Note that no segment begins with this page; it counts for a second."""
        with self._lock:
            self._absent_until_s[prefix, page_key] = self._clock() + KNOWN_FOR_S
            self._absent_until_s.move_to_end((prefix, page_key))
            if len(self._absent_until_s) > _MAX_ABSENT:
                self._absent_until_s.popitem(last=False)

    def is_absent(self, prefix: str, page_key: str) -> bool:
        with self._lock:
            return self._absent_until_s.get((prefix, page_key), -1.0) > self._clock()

    def is_confirmed(self, segment: StoredObject) -> bool:
        return self._clock() - segment.confirmed_at_s < KNOWN_FOR_S

    def _remove(self, segment: StoredObject) -> None:
        self._index.remove(segment)
        del self._segments[segment.segment_id]
        self._num_tokens -= segment.manifest.num_tokens
