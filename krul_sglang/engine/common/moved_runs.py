"""Finds stored runs of tokens that a prompt repeats at another place, as after it dropped its oldest turns.

A client that truncates a conversation keeps its beginning and its last turns. The prompt then matches what is
stored only up to the first token that was dropped; the turns after it are stored, too, but at later positions
and under keys that name the text before them. They are found by their content: by a hash of the tokens in a
short window, taken at places that the content itself chooses, so that the same text has the same windows
wherever it stands.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from krul_backend.segment import TokenIds

WINDOW_TOKENS = 32
"""A window is this long: shorter runs are not found, and text that is alike for less is not mistaken."""

WINDOW_EVERY = 32
"""On average one window in so many tokens is taken."""

MAX_WINDOWS = 1 << 18
"""Windows that are remembered, about 8 million tokens of conversations; those not used for longest leave."""

RECOMPUTED_TOKENS = 128
"""The first tokens of a run are computed, as the gap before it is: what they were computed with is missing in
this prompt, and they depend on it most. With SmolLM2 recall loses 2 points with 32 of them, and none that can
be told from chance with 128 (``docs/measured.md``)."""

MOVED_TOKENS = "krul_moved_tokens"
"""Attribute of SGLang's requests: how many tokens of their prompt came back as a moved run."""

_Hashes = npt.NDArray[np.uint64]

_FACTORS = np.random.default_rng(7).integers(1, 1 << 63, WINDOW_TOKENS, dtype=np.uint64) | np.uint64(1)


class _StoredPage(NamedTuple):
    """A page that begins at token ``first_token`` of a stored conversation, ``offset`` tokens after a window.

    ``prior_key`` is the key of the page before it, from which the keys of the pages that follow can be
    computed, as far as they have the same ``chain``; None for the first page.
    """

    prior_key: str | None
    chain: str
    first_token: int
    offset: int


@dataclass(frozen=True)
class RunStart:
    """Where a stored run begins: ``offset`` tokens into the tokens that were searched. It ends at ``end`` or
    before.

    ``stored_at`` is the position at which its first token is stored; ``prior_key`` the key of the page before
    it.
    """

    offset: int
    end: int
    stored_at: int
    prior_key: str | None


@dataclass(frozen=True, eq=False)
class MovedRun:
    """Stored pages that a prompt repeats from its token ``start`` on.

    They are stored at ``start - shift``: a negative ``shift`` says that they moved to the front.
    ``page_keys`` and ``token_ids`` are what a lease is asked for. ``first_token`` is the first token of the
    prompt that is not on the device.
    """

    start: int
    shift: int
    page_keys: Sequence[str]
    token_ids: TokenIds
    first_token: int

    @property
    def num_head_tokens(self) -> int:
        """Tokens that are computed before the first one that can be loaded."""
        return self.start + RECOMPUTED_TOKENS - self.first_token

    def num_pages(self, num_leased: int, page_size: int) -> int:
        """Whole pages of the prompt between ``first_token`` and the end of the first ``num_leased`` pages."""
        return (self.start - self.first_token + num_leased * page_size) // page_size


FindRun = Callable[[int], MovedRun | None]
"""Finds a run in a prompt after its first given number of pages, which are found without it."""


class RunIndex:
    """Remembers where windows of stored conversations lie. Thread-safe: one thread stores, another looks up.

    It knows what this server has stored since its start. Namespaces (``tenant``) never find each other's.
    """

    def __init__(self, page_size: int, max_windows: int = MAX_WINDOWS) -> None:
        self._page_size = page_size
        self._max_windows = max_windows
        self._pages: OrderedDict[tuple[str, int], _StoredPage] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    def add(
        self,
        tenant: str,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        stored: range,
        moved_from: int | None = None,
    ) -> None:
        """Remember the pages ``stored`` of a conversation that has ``page_keys`` and ``token_ids``.

        Pages from ``moved_from`` on, if given, are named after ``moved_key``.
        """
        size = self._page_size
        chain = "" if moved_from is None else page_keys[moved_from]
        begin = max(0, stored.start * size - WINDOW_TOKENS + 1)
        places, hashes = _windows(token_ids[begin : stored.stop * size])
        with self._lock:
            for place, digest in zip(places.tolist(), hashes.tolist(), strict=True):
                page = -(-(begin + place) // size)
                if stored.start <= page < stored.stop:
                    key = tenant, digest
                    is_moved = moved_from is not None and page >= moved_from
                    prior_key = page_keys[page - 1] if page else None
                    if page == moved_from:
                        prior_key = moved_key(prior_key, tenant)
                    self._pages[key] = _StoredPage(
                        prior_key, chain if is_moved else "", page * size, page * size - begin - place
                    )
                    self._pages.move_to_end(key)
            while len(self._pages) > self._max_windows:
                self._pages.popitem(last=False)

    def find(self, tenant: str, token_ids: TokenIds) -> RunStart | None:
        """Where the run begins that shares most windows with ``token_ids``; None if no page of one fits.

        A run has the same shift and the same chain of keys throughout.
        """
        places, hashes = _windows(token_ids)
        found: list[tuple[int, _StoredPage]] = []
        with self._lock:
            for place, digest in zip(places.tolist(), hashes.tolist(), strict=True):
                page = self._pages.get((tenant, digest))
                if page is not None and place + page.offset + self._page_size <= len(token_ids):
                    self._pages.move_to_end((tenant, digest))
                    found.append((place, page))
        if not found:
            return None
        runs = [(place + page.offset - page.first_token, page.chain) for place, page in found]
        (longest, _), *_ = Counter(runs).most_common(1)
        place, page = found[runs.index(longest)]
        last = max(place for (place, _), run in zip(found, runs, strict=True) if run == longest)
        # The next window is another one: the run ends within it.
        end = next((int(after) + WINDOW_TOKENS for after in places if after > last), len(token_ids))
        return RunStart(place + page.offset, min(end, len(token_ids)), page.first_token, page.prior_key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._pages.clear()


def moved_key(prior_key: str | None, tenant: str) -> str:
    """The key after which pages are named that were computed on top of a moved run.

    Such pages hold KV that the text before them does not give. No key that is computed of text alone follows
    this one, so that only ``RunIndex`` leads to them.
    """
    before = f"tenant {tenant}" if prior_key is None else prior_key
    return hashlib.sha256(f"krul: after a moved run: {before}".encode()).hexdigest()


def _windows(token_ids: TokenIds) -> tuple[npt.NDArray[np.int64], _Hashes]:
    """Where the chosen windows of some tokens begin, and their hashes."""
    num_windows = len(token_ids) - WINDOW_TOKENS + 1
    if num_windows < 1:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    tokens = np.asarray(token_ids).astype(np.uint64)
    hashes = np.zeros(num_windows, np.uint64)
    for place, factor in enumerate(_FACTORS):
        # Multiplied before they are added up, so that order counts; modulo 2^64.
        hashes += (tokens[place : place + num_windows] + np.uint64(1)) * factor
    hashes ^= hashes >> np.uint64(29)
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(32)
    places = np.flatnonzero(hashes % np.uint64(WINDOW_EVERY) == 0)
    return places, hashes[places]
