"""A lease over several tiers: the walk that finds its parts, and what holds them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import ge
from typing import Any

from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.tiers.common.interface import DRAM_TIER, FastCopies, Lease, SegmentSlice, checksum_of_tail
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.dram import HostStore

LEAST_USED_SHARE = 1 / 8
"""Lower tiers read blocks to their ends. No segment is read of which less would be used, all that follows it
included: many prompts share their first page, and computing it is sooner than reading a conversation."""


@dataclass(frozen=True, eq=False)
class LowerPart:
    """A run of pages that a lower tier holds for a lease until it is fetched.

    ``segment_id`` names its segment to the lease's owner until then; it is no id of the tier.
    """

    tier: LowerTier
    run: PageRun[Any]
    segment_id: int

    @property
    def num_pages(self) -> int:
        return self.run.num_pages

    @property
    def least_num_pages(self) -> float:
        """With fewer pages from this part on, a prefix is not worth reading it."""
        return LEAST_USED_SHARE * len(self.run.segment.manifest.page_keys)

    @property
    def slices(self) -> tuple[SegmentSlice, ...]:
        """The run as a lease shows it, without blocks; like ``Lease.slices``."""
        segment = self.run.segment
        piece = SegmentSlice(
            segment_id=self.segment_id,
            header=segment.manifest.header,
            tier=self.tier.name,
            blocks=(),
            spans=(),
            checksums=segment.checksums,
            first_page=self.run.first_page,
            end_page=self.run.end_page,
        )
        return (piece,)


Part = Lease | LowerPart
"""One part of a tiered lease: a lease on DRAM, or a run that a lower tier holds."""


@dataclass(eq=False)
class TieredLease:
    """The parts of a lease in conversation order. ``lock`` guards all of it.

    ``clear_mark`` is a mark of ``HostStore.clear_mark``, taken before any tier was asked. ``completions``, by
    the number of a slice: the copy in a lower tier that has more of it than DRAM, or what was made of both.
    ``ahead``: what prefetches have brought, or will bring; the rest stays as if there had been none.
    """

    parts: list[Part]
    clear_mark: int
    completions: dict[int, Part] = field(default_factory=dict)
    ahead: list[Part] = field(default_factory=list)
    is_released: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


def fuller_copies(
    host: HostStore,
    tiers: Sequence[LowerTier],
    model: ModelIdentity,
    page_keys: Sequence[str],
    token_ids: TokenIds,
    slices: Sequence[SegmentSlice],
) -> dict[int, LowerPart]:
    """Hold the copies in lower tiers that have more of leased slices than DRAM, by the slices' numbers.

    Only copies of which DRAM has the ends, as all their checksums say, and that the tiers know of. A tier is
    asked once for slices that follow each other.
    """
    size, copies = model.page_size, dict[int, LowerPart]()
    others: list[LowerPart] = []
    bounds = [0, *accumulate(piece.end_page - piece.first_page for piece in slices)]
    parts = [number for number, piece in enumerate(slices) if _is_part(piece)]

    def keys_of(number: int) -> Sequence[str]:
        return page_keys[bounds[number] : bounds[number + 1]]

    try:
        for tier in tiers:
            wanted = [
                one for one in parts if one not in copies and not tier.find_missing(model, keys_of(one))
            ]
            # Numbers that follow each other grow like their places.
            for _, places in groupby(enumerate(wanted), lambda place: place[1] - place[0]):
                numbers = [number for _, number in places]
                at, end, first = bounds[numbers[0]], bounds[numbers[-1] + 1], slices[numbers[0]]
                next_token = first.header.start_token + first.first_page * size
                keys, tokens = page_keys[at:end], token_ids[at * size : end * size]
                for run in tier.match(model, keys, tokens, next_token):
                    part = LowerPart(tier, run, host.next_id())
                    number = bounds.index(at) if at in bounds else None
                    if number is not None and has_more(part.slices[0], slices[number]):
                        copies[number] = part
                    else:
                        others.append(part)
                    at += run.num_pages
    except BaseException:
        release_parts(host, [*copies.values()])
        raise
    finally:
        release_parts(host, others)
    return copies


def _is_part(piece: SegmentSlice) -> bool:
    """Return whether the slice is in DRAM, but without some layer's first tokens."""
    return piece.tier == DRAM_TIER and max(piece.header.layer_first_token) > piece.header.start_token


def has_more(copy: SegmentSlice, piece: SegmentSlice) -> bool:
    """Return whether a lower tier's copy has the same bytes as the slice, and more before them."""
    whole, part = copy.header, piece.header
    alike = ("start_token", "num_tokens", "codec", "codec_params", "range_bytes")
    ends = zip(copy.checksums, piece.checksums, part.layer_num_bytes, strict=True)
    return (
        (copy.first_page, copy.end_page) == (piece.first_page, piece.end_page)
        and all(getattr(whole, name) == getattr(part, name) for name in alike)
        and all(map(ge, whole.layer_num_bytes, part.layer_num_bytes))
        and whole.layer_num_bytes != part.layer_num_bytes
        and all(checksum_of_tail(of_copy, size, part.range_bytes) == own for of_copy, own, size in ends)
    )


def release_parts(host: HostStore, parts: Sequence[Part]) -> None:
    """Release every part, even if the release of another one fails."""
    with ExitStack() as stack:
        for part in parts:
            if isinstance(part, Lease):
                stack.callback(host.release, part)
            else:
                stack.callback(part.tier.release, part.run)


class PrefixWalk:
    """Finds and holds the longest prefix of one request over all tiers.

    It ends before a segment of a lower tier of which too little would be used (``LEAST_USED_SHARE``).

    ``token_ids``: ``[len(page_keys) * page_size]``, the tokens that the keys stand for.

    ::

        [0, at)    held, as ``parts``
        at         the next page to be asked for, at position ``next_token`` of the conversation
    """

    def __init__(
        self,
        host: HostStore,
        tiers: Sequence[LowerTier],
        model: ModelIdentity,
        page_keys: tuple[str, ...],
        token_ids: TokenIds,
        *,
        fast_copies: FastCopies,
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._model = model
        self._page_keys = page_keys
        self._token_ids = token_ids
        self._fast_copies = fast_copies
        self._parts: list[Part] = []
        self._at = 0
        self._next_token: int | None = None

    def run(self) -> list[Part]:
        """Walk to the end of the prefix; returns its parts in conversation order, for the caller to release.

        Raises:
            ValueError: there are not ``page_size`` tokens for each page.
        """
        try:
            self._extend_in_dram()
            while self._at < len(self._page_keys) and self._extend_below():
                self._extend_in_dram()
            self._drop_little_used()
        except BaseException:
            release_parts(self._host, self._parts)
            raise
        return self._parts

    def _extend_in_dram(self) -> None:
        rest = self._page_keys[self._at :]
        lease = self._host.lease(
            self._model,
            rest,
            self._token_ids[self._at * self._model.page_size :],
            self._next_token,
            fast_copies=self._fast_copies,
        )
        if lease is not None:
            self._parts.append(lease)
            last = lease.slices[-1]
            self._advance(lease.num_pages, last.header.start_token, last.end_page)

    def _extend_below(self) -> bool:
        """Extend the prefix from the first lower tier that has the next page; False if none has.

        Stops at the next page that DRAM holds, which is not read from below.
        """
        rest = self._page_keys[self._at :]
        missing = self._host.find_missing(self._model, rest)
        end = missing[0].stop if missing and missing[0].start == 0 else len(rest)
        first_token = self._at * self._model.page_size
        token_ids = self._token_ids[first_token : first_token + end * self._model.page_size]
        for tier in self._tiers:
            runs = tier.match(self._model, rest[:end], token_ids, self._next_token)
            self._parts.extend(LowerPart(tier, run, self._host.next_id()) for run in runs)
            for run in runs:
                self._advance(run.num_pages, run.segment.manifest.start_token, run.end_page)
            if runs:
                return True
        return False

    def _drop_little_used(self) -> None:
        num_pages = sum(part.num_pages for part in self._parts)
        for number, part in enumerate(self._parts):
            # With this part all later ones become useful.
            if isinstance(part, LowerPart) and num_pages < part.least_num_pages:
                release_parts(self._host, self._parts[number:])
                del self._parts[number:]
                break
            num_pages -= part.num_pages

    def _advance(self, num_pages: int, start_token: int, end_page: int) -> None:
        self._at += num_pages
        self._next_token = start_token + end_page * self._model.page_size
