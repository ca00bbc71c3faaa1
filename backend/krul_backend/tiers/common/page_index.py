"""The index of a tier: finds the segments that hold given pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds


class Indexable(Protocol):
    """A segment that an index can hold, of DRAM or of a lower tier. Hashed by identity."""

    @property
    def segment_id(self) -> int: ...

    @property
    def manifest(self) -> SegmentManifest: ...


SegmentT = TypeVar("SegmentT", bound=Indexable)


@dataclass(frozen=True)
class PageRun(Generic[SegmentT]):
    """Pages ``[first_page, end_page)`` of one segment."""

    segment: SegmentT
    first_page: int
    end_page: int

    @property
    def num_pages(self) -> int:
        return self.end_page - self.first_page


@dataclass(frozen=True)
class PrefixMatch(Generic[SegmentT]):
    """The longest indexed prefix of a request, in conversation order.

    ``is_contradicted`` says that the key after the prefix is indexed, but for other tokens or for another
    position in the conversation.
    """

    runs: tuple[PageRun[SegmentT], ...]
    is_contradicted: bool


class PageIndex(Generic[SegmentT]):
    """Maps ``(model fingerprint, page key)`` to ``(segment, page in it)``. Not thread-safe: its owner locks.

    A page has one entry: that of the first segment that held it. A later segment that also holds the page is
    entered for its other pages only; its copy of this page is hidden.
    """

    def __init__(self) -> None:
        self._pages: dict[str, dict[str, tuple[SegmentT, int]]] = {}
        # Both by (fingerprint, page key), without zeros: hidden copies of a page (few), and segments whose
        # parent is the page.
        self._num_hidden_copies: Counter[tuple[str, str]] = Counter()
        self._num_continuations: Counter[tuple[str, str]] = Counter()

    @property
    def num_pages(self) -> int:
        return sum(len(pages) for pages in self._pages.values())

    def add(self, segment: SegmentT) -> int:
        """Enter the pages that are not indexed yet; returns their number. If it is 0, nothing has changed."""
        manifest = segment.manifest
        fingerprint = manifest.model.fingerprint
        pages = self._pages.setdefault(fingerprint, {})
        num_before = len(pages)
        hidden = []
        for page, key in enumerate(manifest.page_keys):
            if pages.setdefault(key, (segment, page))[0] is not segment:
                hidden.append((fingerprint, key))
        num_new = len(pages) - num_before
        if num_new:
            self._num_hidden_copies.update(hidden)
            if manifest.parent_key is not None:
                self._num_continuations[fingerprint, manifest.parent_key] += 1
        return num_new

    def remove(self, segment: SegmentT) -> None:
        """Undo ``add``."""
        manifest = segment.manifest
        fingerprint = manifest.model.fingerprint
        pages = self._pages.get(fingerprint, {})
        for key in manifest.page_keys:
            entry = pages.get(key)
            if entry is not None and entry[0] is segment:
                del pages[key]
            else:
                _count_down(self._num_hidden_copies, (fingerprint, key))
        if manifest.parent_key is not None:
            _count_down(self._num_continuations, (fingerprint, manifest.parent_key))
        if not pages:
            self._pages.pop(fingerprint, None)

    def is_shared(self, segment: SegmentT) -> bool:
        """Whether more than one conversation goes through an indexed segment, or holds a page of it.

        That is: another indexed segment holds one of its pages, more than one continues it, or one does so
        before its last page. One look-up per page of the segment, whatever else is stored.
        """
        manifest = segment.manifest
        fingerprint = manifest.model.fingerprint
        *inner_keys, last_key = manifest.page_keys
        if self._num_continuations[fingerprint, last_key] > 1:
            return True
        if any((fingerprint, key) in self._num_continuations for key in inner_keys):
            return True
        pages = self._pages.get(fingerprint, {})
        for key in manifest.page_keys:
            entry = pages.get(key)
            num_others = self._num_hidden_copies[fingerprint, key]
            if entry is None or entry[0] is not segment:
                # This segment's own copy is a hidden one; the entry, if any, is another segment's.
                num_others += (entry is not None) - 1
            if num_others:
                return True
        return False

    def num_continuations(self, segment: SegmentT) -> int:
        """How many indexed segments begin right after this one's last page."""
        manifest = segment.manifest
        return self._num_continuations[manifest.model.fingerprint, manifest.page_keys[-1]]

    def is_needed(self, model: ModelIdentity, page_key: str) -> bool:
        """Whether the segment of a page, if it is indexed, is shared or continued."""
        return any(
            self.is_shared(holder) or self.num_continuations(holder) > 0
            for holder in self.holders_of(model, (page_key,))
        )

    def manifest_of(self, model: ModelIdentity, page_key: str) -> SegmentManifest | None:
        """The manifest of the segment of a page; None if it is not indexed."""
        holders = self.holders_of(model, (page_key,))
        return holders[0].manifest if holders else None

    def segments_of(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[SegmentT]:
        """The segments that hold ``page_keys``, each once, in the order of their first pages among them."""
        return list(dict.fromkeys(self.holders_of(model, page_keys)))

    def holders_of(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[SegmentT]:
        """The segment of each of ``page_keys`` that is indexed; one entry per page."""
        pages = self._pages.get(model.fingerprint, {})
        return [entry[0] for entry in filter(None, map(pages.get, page_keys))] if pages else []

    def has_target(self, segment: SegmentT) -> bool:
        """Whether a page is indexed of the target for whose draft model a segment is stored."""
        pages = self._pages.get(segment.manifest.model.target)
        return pages is not None and any(key in pages for key in segment.manifest.page_keys)

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        """The maximal runs of ``page_keys`` that are not indexed, as ascending ranges of their positions."""
        pages = self._pages.get(model.fingerprint, {})
        return missing_runs([key in pages for key in page_keys])

    def match_prefix(
        self,
        model: ModelIdentity,
        page_keys: tuple[str, ...],
        token_ids: TokenIds,
        next_token: int | None = None,
        preferred: PageIndex[SegmentT] | None = None,
    ) -> PrefixMatch[SegmentT]:
        """Walk ``page_keys`` from the first as long as they are indexed, for these tokens, without a gap.

        ``token_ids``: ``[len(page_keys) * page_size]``. The first page is at position ``next_token`` of the
        conversation, if that is known (the request may start anywhere in it); each later run must start where
        the one before it ended. Where a run begins, the ``preferred`` index is asked first. Keys and tokens
        are compared a run at a time: a conversation has few segments and many pages.
        """
        pages = self._pages.get(model.fingerprint, {})
        preferred_pages = {} if preferred is None else preferred._pages.get(model.fingerprint, {})
        page_size = model.page_size
        runs: list[PageRun[SegmentT]] = []
        i = 0
        while i < len(page_keys):
            entry = preferred_pages.get(page_keys[i]) or pages.get(page_keys[i])
            if entry is None:
                break
            segment, first_page = entry
            manifest = segment.manifest
            start_token = manifest.start_token + first_page * page_size
            if next_token is not None and start_token != next_token:
                return PrefixMatch(tuple(runs), is_contradicted=True)
            num_pages, num_right = num_right_pages(manifest, first_page, page_keys, i, token_ids)
            if num_right:
                runs.append(PageRun(segment, first_page, first_page + num_right))
            if num_right < num_pages:
                return PrefixMatch(tuple(runs), is_contradicted=True)
            i += num_pages
            next_token = start_token + num_pages * page_size
        return PrefixMatch(tuple(runs), is_contradicted=False)

    def before(self, segment: SegmentT) -> SegmentT | None:
        """The indexed segment that ``segment`` continues; None if there is none."""
        return self._page_before(segment, self._pages.get(segment.manifest.model.fingerprint, {}))

    def path_to(self, segment: SegmentT) -> list[SegmentT]:
        """The indexed segments that ``segment`` continues, in conversation order, ``segment`` last.

        Looked up at each call, not kept: what comes before a segment may be evicted, and stored again as
        another segment.
        """
        pages = self._pages.get(segment.manifest.model.fingerprint, {})
        path = [segment]
        seen = {segment.segment_id}
        while True:
            before = self._page_before(path[-1], pages)
            # Segments that share pages can name each other; a path visits each of them once.
            if before is None or before.segment_id in seen:
                return path[::-1]
            path.append(before)
            seen.add(before.segment_id)

    @staticmethod
    def _page_before(segment: SegmentT, pages: dict[str, tuple[SegmentT, int]]) -> SegmentT | None:
        """The segment that holds the page right before the first page that is indexed as this segment's."""
        key_before = segment.manifest.parent_key
        for key in segment.manifest.page_keys:
            entry = pages.get(key)
            if entry is None or entry[0] is segment:
                break
            key_before = key
        entry = pages.get(key_before) if key_before is not None else None
        return entry[0] if entry is not None else None


def _count_down(counts: Counter[tuple[str, str]], key: tuple[str, str]) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def missing_runs(is_there: Sequence[bool]) -> list[range]:
    """The maximal runs of what is not there, as ascending ranges of positions."""
    missing: list[range] = []
    run_start: int | None = None
    for i, is_found in enumerate(is_there):
        if is_found:
            if run_start is not None:
                missing.append(range(run_start, i))
                run_start = None
        elif run_start is None:
            run_start = i
    if run_start is not None:
        missing.append(range(run_start, len(is_there)))
    return missing


def num_right_pages(
    manifest: SegmentManifest, first_page: int, page_keys: tuple[str, ...], start: int, token_ids: TokenIds
) -> tuple[int, int]:
    """Compare a segment from ``first_page`` on with a request from its page ``start`` on: how many pages have
    equal keys, and how many leading ones of these have equal tokens, too.

    ``token_ids``: ``[len(page_keys) * page_size]``.
    """
    page_size = manifest.model.page_size
    num_pages = _num_equal_keys(page_keys, start, manifest.page_keys, first_page)
    num_right = _num_equal_pages(
        token_ids[start * page_size : (start + num_pages) * page_size],
        manifest.token_ids[first_page * page_size : (first_page + num_pages) * page_size],
        page_size,
    )
    return num_pages, num_right


def _num_equal_keys(left: tuple[str, ...], left_start: int, right: tuple[str, ...], right_start: int) -> int:
    """How many keys of two sequences are equal, from the given positions on."""
    num_pages = min(len(left) - left_start, len(right) - right_start)
    left_run = left[left_start : left_start + num_pages]
    right_run = right[right_start : right_start + num_pages]
    if left_run == right_run:
        return num_pages
    return next(i for i in range(num_pages) if left_run[i] != right_run[i])


def _num_equal_pages(left: TokenIds, right: TokenIds, page_size: int) -> int:
    """How many leading pages have all token ids equal; both are ``[num_pages * page_size]``."""
    # Comparing memory, with its copies, is several times faster than comparing elements.
    if left.dtype == right.dtype and left.tobytes() == right.tobytes():
        return len(left) // page_size
    if np.array_equal(left, right):
        return len(left) // page_size
    return int(np.argmax(left != right)) // page_size
