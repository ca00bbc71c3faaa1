"""The longest prefix of a request over all tiers."""

from __future__ import annotations

from collections.abc import Sequence

from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.store.tiered_lease import LowerPart, Part, release_parts
from krul_backend.tiers.common.interface import SegmentSlice
from krul_backend.tiers.common.lower_tier import LowerTier, TierRun
from krul_backend.tiers.dram.host_store import HostStore


class PrefixWalk:
    """One lookup. ``token_ids``: ``[len(page_keys) * page_size]``, the tokens that the keys stand for.

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
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._model = model
        self._page_keys = page_keys
        self._token_ids = token_ids
        self._parts: list[Part] = []
        self._at = 0
        self._next_token: int | None = None

    def run(self) -> list[Part]:
        """What is held of the prefix, in conversation order; the caller's to release.

        Raises:
            ValueError: there are not ``page_size`` tokens for each page.
        """
        try:
            self._extend_in_dram()
            while self._at < len(self._page_keys) and self._extend_below():
                self._extend_in_dram()
        except BaseException:
            release_parts(self._host, self._parts)
            raise
        return self._parts

    def _extend_in_dram(self) -> None:
        rest = self._page_keys[self._at :]
        lease = self._host.lease(
            self._model, rest, self._token_ids[self._at * self._model.page_size :], self._next_token
        )
        if lease is not None:
            self._parts.append(lease)
            last = lease.slices[-1]
            self._advance(lease.num_pages, last.header.start_token, last.end_page)

    def _extend_below(self) -> bool:
        """Go on with the first tier that has the next page; whether one has.

        Only as far as DRAM does not know better: pages that it holds are not read from below.
        """
        rest = self._page_keys[self._at :]
        missing = self._host.find_missing(self._model, rest)
        end = missing[0].stop if missing and missing[0].start == 0 else len(rest)
        first_token = self._at * self._model.page_size
        token_ids = self._token_ids[first_token : first_token + end * self._model.page_size]
        for tier in self._tiers:
            runs = tier.match(self._model, rest[:end], token_ids, self._next_token)
            self._parts.extend(LowerPart(tier, run, self._slice_of(run)) for run in runs)
            for run in runs:
                self._advance(run.end_page - run.first_page, run.manifest.start_token, run.end_page)
            if runs:
                return True
        return False

    def _advance(self, num_pages: int, start_token: int, end_page: int) -> None:
        self._at += num_pages
        self._next_token = start_token + end_page * self._model.page_size

    def _slice_of(self, run: TierRun) -> SegmentSlice:
        """A run as a lease shows it: it gets blocks, and the id of a segment in DRAM, when it is fetched."""
        return SegmentSlice(
            segment_id=self._host.next_id(),
            header=run.manifest.header,
            tier=run.tier,
            blocks=(),
            spans=(),
            checksums=run.checksums,
            first_page=run.first_page,
            end_page=run.end_page,
        )
