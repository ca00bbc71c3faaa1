"""Finds the segments of a prefix: those that this daemon knows of, and others by asking the object store."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.interface import Clock
from krul_backend.tiers.common.page_index import PageIndex, PageRun, PrefixMatch, num_right_pages
from krul_backend.tiers.objects.object_client import ObjectClient, get_written
from krul_backend.tiers.objects.stored_object import (
    MAX_METADATA_BYTES,
    MAX_POINTER_BYTES,
    MAX_POINTERS,
    Epochs,
    StoredObject,
    decode_object,
    decode_pointer,
    encode_pointer,
    pointer_key,
)

KNOWN_FOR_S = 1.0
"""Seconds for which an answer counts: that a segment is stored, or that none begins with a page."""

_MAX_ABSENT = 65536


class KnownSegments:
    """Remembers segments that were seen in the object store, and pages with which none begins. Thread-safe.

    A known segment may have been evicted since; see ``StoredObject.confirmed_at_s``. Segments of at most
    ``max_tokens`` tokens are remembered; the least recently matched ones are forgotten first.
    """

    def __init__(self, clock: Clock, max_tokens: int = 8 << 20) -> None:
        self._clock = clock
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._index: PageIndex[StoredObject] = PageIndex()
        self._segments: OrderedDict[int, StoredObject] = OrderedDict()
        # By model's fingerprint and prefix: of a model there is one, until a clear is noticed.
        self._by_prefix: defaultdict[tuple[str, str], set[StoredObject]] = defaultdict(set)
        self._num_tokens = 0
        self._num_bytes = 0
        self._absent_until_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._num_clears = 0

    @property
    def num_clears(self) -> int:
        """The number of clears so far, to be read before the object store is asked; see ``add``."""
        with self._lock:
            return self._num_clears

    def sizes(self) -> tuple[int, int, int]:
        """The number of segments, of their pages, and of the bytes of their blocks."""
        with self._lock:
            return len(self._segments), self._index.num_pages, self._num_bytes

    def segments(self) -> list[StoredObject]:
        with self._lock:
            return list(self._segments.values())

    @contextmanager
    def index(self) -> Iterator[PageIndex[StoredObject]]:
        """The pages of the known segments, to look things up inside the block."""
        with self._lock:
            yield self._index

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
            if num_clears != self._num_clears or self._index.add(segment) == 0:
                return False
            self._segments[segment.segment_id] = segment
            self._by_prefix[segment.manifest.model.fingerprint, segment.prefix].add(segment)
            self._absent_until_s.pop((segment.prefix, segment.manifest.page_keys[0]), None)
            self._num_tokens += segment.manifest.num_tokens
            self._num_bytes += segment.manifest.num_bytes
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
            for (model, prefix), segments in list(self._by_prefix.items()):
                if fingerprint in (None, model) and prefix != except_prefix:
                    for segment in list(segments):
                        self._remove(segment)
                    del self._by_prefix[model, prefix]

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
        self._by_prefix[segment.manifest.model.fingerprint, segment.prefix].remove(segment)
        self._num_tokens -= segment.manifest.num_tokens
        self._num_bytes -= segment.manifest.num_bytes


class Lookup:
    """Finds segments in the object store, and remembers them as known segments. Thread-safe.

    Args:
        on_damage: called for each object whose content does not belong to its name.
    """

    def __init__(
        self, known: KnownSegments, epochs: Epochs, clock: Clock, on_damage: Callable[[], None]
    ) -> None:
        self._known = known
        self._epochs = epochs
        self._clock = clock
        self._on_damage = on_damage

    def known_runs(
        self, model: ModelIdentity, page_keys: tuple[str, ...], token_ids: TokenIds
    ) -> tuple[tuple[PageRun[StoredObject], ...], bool]:
        """The known, recently confirmed runs of a prefix, and whether the store could not tell more."""
        epoch = self._epochs.known(model.fingerprint)
        if epoch is None or epoch.prefix is None:
            return (), epoch is not None
        match = self._known.match_prefix(model, page_keys, token_ids)
        num_pages = 0
        for num_runs, run in enumerate(match.runs):
            if run.segment.prefix != epoch.prefix or not self._known.is_confirmed(run.segment):
                return match.runs[:num_runs], False
            num_pages += run.end_page - run.first_page
        is_end = num_pages == len(page_keys) or match.is_contradicted
        return match.runs, is_end or self._known.is_absent(epoch.prefix, page_keys[num_pages])

    def ask(
        self, store: ObjectClient, model: ModelIdentity, page_keys: tuple[str, ...], token_ids: TokenIds
    ) -> None:
        """Ask the object store for a prefix; afterwards ``known_runs`` returns what it has.

        Raises:
            ObjectStoreError: the object store does not answer.
        """
        num_clears = self._known.num_clears
        prefix = self._epochs.prefix(store, model.fingerprint)
        self._known.forget_model(model.fingerprint, except_prefix=prefix)
        if prefix is None:
            return
        num_pages = -1
        while True:
            match = self._known.match_prefix(model, page_keys, token_ids)
            if not all(self._confirm(store, run.segment) for run in match.runs):
                continue
            num_before, num_pages = num_pages, sum(run.end_page - run.first_page for run in match.runs)
            if num_pages == len(page_keys) or match.is_contradicted:
                return
            rest = page_keys[num_pages:], token_ids[num_pages * model.page_size :]
            if num_pages <= num_before or not self._learn(store, prefix, model, *rest, num_clears):
                self._known.note_absent(prefix, page_keys[num_pages])
                return

    def find_copy(self, store: ObjectClient, prefix: str, manifest: SegmentManifest) -> bool:
        """Return whether one stored segment has all pages of this one, and remember what was found."""
        num_clears = self._known.num_clears
        return self._learn(
            store, prefix, manifest.model, manifest.page_keys, manifest.token_ids, num_clears
        ) >= len(manifest.page_keys)

    def _confirm(self, store: ObjectClient, segment: StoredObject) -> bool:
        """Whether a known segment is still there; forgets it if not."""
        if self._known.is_confirmed(segment):
            return True
        now_s = self._clock()
        if store.have_all([segment.metadata_key, *segment.block_keys]):
            segment.confirmed_at_s = now_s
            return True
        self._known.forget(segment)
        return False

    def _learn(
        self,
        store: ObjectClient,
        prefix: str,
        model: ModelIdentity,
        page_keys: tuple[str, ...],
        token_ids: TokenIds,
        num_clears: int,
    ) -> int:
        """Find the segment that holds most of ``page_keys`` from the first on; returns how many it holds."""
        most_pages = 0
        best: StoredObject | None = None
        for n in range(MAX_POINTERS):
            pointer = store.get(pointer_key(prefix, page_keys[0], n), MAX_POINTER_BYTES)
            if pointer is None:
                break
            digest = decode_pointer(pointer)
            if digest is None:
                self._on_damage()
                continue
            place = f"{prefix}/s/{digest}"
            metadata = store.get(f"{place}/m", MAX_METADATA_BYTES)
            if metadata is None:
                continue
            decoded = decode_object(digest, metadata, model)
            if decoded is None:
                self._on_damage()
                continue
            manifest, checksums = decoded
            _, num_pages = num_right_pages(manifest, 0, page_keys, 0, token_ids)
            if num_pages > most_pages:
                most_pages = num_pages
                best = StoredObject(prefix, place, manifest, checksums, 0.0, store.joins_blocks)
            if num_pages == len(page_keys):
                break
        if best is None:
            return 0
        best.confirmed_at_s = self._clock()
        if not store.have_all([best.metadata_key, *best.block_keys]):
            return 0
        self._known.add(best, num_clears)
        return most_pages


def publish(store: ObjectClient, prefix: str, first_page_key: str, digest: str) -> bool:
    """Store a pointer to a written segment; False if too many others begin with this page."""
    pointer = encode_pointer(digest)
    for n in range(MAX_POINTERS):
        key = pointer_key(prefix, first_page_key, n)
        store.put(key, pointer)
        found = get_written(store, key, MAX_POINTER_BYTES)
        if found == pointer:
            return True
        other = decode_pointer(found) if found is not None else None
        if other is None or not store.have_all([f"{prefix}/s/{other}/m"]):
            store.replace(key, pointer)
            return True
    return False
