"""Carries out hints about stored conversations, and remembers the names of conversations."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.store.comebacks import Comeback, Comebacks
from krul_backend.tiers.common.hint import NO_HINT, Hint, SessionName
from krul_backend.tiers.common.interface import Clock, Prefetched
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.dram import HostStore

MAX_NAMES = 100_000
"""Names of conversations that are kept at most."""

MARGIN_S = 0.5
"""A conversation is read back so long before its use, and twice the time that reading takes."""

_MAX_MODELS = 16
"""Of one name: each rank of a server is a model of its own."""

MAX_ENDS = 16
"""Of one name and model. Eviction takes the last segments first; the name then stands for what is left."""

_DROP_FLUSH_S = 1.0
"""A drop waits so long for segments that are being written to a tier at that moment."""

NamedEnds = tuple[ModelIdentity, tuple[str, ...]]
"""A model, and the last pages of a conversation's last segments, the latest last."""

Prefetch = Callable[[ModelIdentity, Sequence[str], TokenIds], Prefetched]


class SessionNames:
    """Remembers where named conversations end. The least recently used name leaves. Thread-safe.

    A name takes the same memory whatever its length: it is kept as a hash.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._lock = threading.Lock()
        self._ends: OrderedDict[bytes, tuple[NamedEnds, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def put(self, session: SessionName, model: ModelIdentity, page_keys: Sequence[str]) -> None:
        """Let a name stand for a conversation, as far as this model's KV goes.

        ``page_keys``: the last pages of its last segments, in conversation order.
        """
        key = _digest(session)
        with self._lock:
            before = self._ends.get(key, ())
            # Ranks of one server have equal keys: each is kept once.
            known = {page_key: page_key for _, ends in before for page_key in ends}
            newest = [known.get(page_key, page_key) for page_key in page_keys]
            others = [of_model for of_model in before if of_model[0].fingerprint != model.fingerprint]
            earlier = [
                page_key
                for of_model, ends in before
                if of_model.fingerprint == model.fingerprint
                for page_key in ends
                if page_key not in newest
            ]
            self._ends[key] = (*others, (model, (*earlier, *newest)[-MAX_ENDS:]))[-_MAX_MODELS:]
            self._ends.move_to_end(key)
            if len(self._ends) > self._max_names:
                self._ends.popitem(last=False)

    def get(self, session: SessionName) -> tuple[NamedEnds, ...]:
        """Return for each model the pages with which the conversation ended, the latest last.

        Nothing if the name is not known.
        """
        key = _digest(session)
        with self._lock:
            ends = self._ends.get(key, ())
            if ends:
                self._ends.move_to_end(key)
            return ends


def _digest(session: SessionName) -> bytes:
    parts = f"{len(session.tenant)} {session.tenant}{session.name}"
    return hashlib.blake2b(parts.encode(errors="surrogatepass"), digest_size=16).digest()


class Advisor:
    """Carries out hints, over all tiers. Thread-safe.

    ``num_hints`` counts the hints that reached something, ``num_comeback_pages`` the pages that were read
    into DRAM because of hints.

    Args:
        prefetch: as ``KVStore.prefetch``.
        settle: returns when no tier can be given a segment any more that has left DRAM's index.
    """

    def __init__(
        self,
        host: HostStore,
        tiers: Sequence[LowerTier],
        prefetch: Prefetch,
        settle: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._host = host
        self._tiers = tuple(tiers)
        self._stores: tuple[HostStore | LowerTier, ...] = (host, *tiers)
        self._prefetch = prefetch
        self._settle = settle
        self._clock = clock
        self._counting = threading.Lock()
        self.names = SessionNames()
        self.comebacks = Comebacks(self._bring, clock)
        self.num_hints = 0
        self.num_comeback_pages = 0

    def advise(self, model: ModelIdentity, page_keys: Sequence[str], hint: Hint) -> int:
        """Apply a hint to a conversation that was just used; returns for how many pages in DRAM it holds."""
        self.comebacks.cancel(model, page_keys)
        return self._apply(model, page_keys, hint)

    def name(self, session: SessionName, model: ModelIdentity, page_keys: Sequence[str]) -> None:
        """Let a name stand for the conversation of these pages."""
        path = self._path_to(model, page_keys[-1])
        ends = [piece.manifest.page_keys[piece.num_pages - 1] for piece in path[-MAX_ENDS:]]
        self.names.put(session, model, ends or page_keys[-1:])

    def advise_named(self, session: SessionName, hint: Hint) -> int:
        """Apply a hint to the conversation of a name, as far as it is stored; returns as ``advise``.

        Raises:
            KeyError: the name is not known, or nothing is stored of the conversation any more.
        """
        num_pages: list[int] = []
        for model, ends in self.names.get(session):
            for end in reversed(ends):
                path = self._path_to(model, end)
                if path:
                    num_pages.append(self._apply(model, _keys_of(path), hint))
                    # Earlier turns may have ended elsewhere: these are dropped, too.
                    if not hint.drop:
                        break
        if not num_pages:
            raise KeyError(f"nothing is stored of a conversation of the name {session.name!r}")
        return max(num_pages)

    def close(self) -> None:
        self.comebacks.close()

    def _apply(self, model: ModelIdentity, page_keys: Sequence[str], hint: Hint) -> int:
        if hint.next_use_s is not None or hint.demote or hint.drop:
            self.comebacks.cancel(model, page_keys)
        end = self._stored_end(model, page_keys) if hint != NO_HINT else 0
        if not end:
            return 0
        self._count(num_hints=1)
        if hint.drop:
            self._drop(model, page_keys[end - 1])
            return 0
        path = self._path_to(model, page_keys[end - 1]) if hint.prefetch or hint.next_use_s else []
        if hint.prefetch and path:
            self._fetch(model, path)
        if hint.next_use_s and path and self._tiers:
            next_use_at_s = self._clock() + hint.next_use_s
            load_s = max(sum(tier.load_s(piece.manifest) for piece in path) for tier in self._tiers)
            due_s = next_use_at_s - 2 * load_s - MARGIN_S
            self.comebacks.put(Comeback((model, page_keys[end - 1]), due_s, next_use_at_s, load_s))
        return self._host.advise(model, page_keys, hint)

    def _stored_end(self, model: ModelIdentity, page_keys: Sequence[str]) -> int:
        """Count the first pages that are stored without a gap, as far as it is known without a network."""
        end = 0
        while end < len(page_keys):
            at = end
            for store in self._stores:
                missing = store.find_missing(model, page_keys[end:])
                end = len(page_keys) if not missing else end + missing[0].start
            if end == at:
                break
        return end

    def _path_to(self, model: ModelIdentity, page_key: str) -> list[_Piece]:
        """The stored segments up to a page, in conversation order; nothing if one of them is missing.

        Each is named by the first tier that has it, DRAM first. Networks are not asked.
        """
        pieces: list[_Piece] = []
        key: str | None = page_key
        while key is not None:
            holders = (store.holder_of(model, key) for store in self._stores)
            manifest = next((holder for holder in holders if holder is not None), None)
            if manifest is None:
                return []
            piece = _Piece(manifest, manifest.page_keys.index(key) + 1)
            if pieces and piece.end_token != pieces[-1].manifest.start_token:
                return []
            pieces.append(piece)
            key = manifest.parent_key
        return pieces[::-1]

    def _fetch(self, model: ModelIdentity, path: Sequence[_Piece]) -> int:
        num_pages = self._prefetch(model, _keys_of(path), _token_ids_of(path)).num_pages
        self._count(num_comeback_pages=num_pages)
        return num_pages

    def _bring(self, comeback: Comeback) -> bool:
        """Read a conversation that is expected soon; False if there was nothing to read."""
        model, page_key = comeback.end
        path = self._path_to(model, page_key)
        if not path or not self._fetch(model, path):
            return False
        left_s = max(comeback.next_use_at_s - self._clock(), MARGIN_S)
        self._host.advise(model, _keys_of(path), Hint(next_use_s=left_s))
        return True

    def _drop(self, model: ModelIdentity, page_key: str) -> None:
        """Forget a conversation from its end on, up to the first segment that another one goes through."""
        dropped: list[SegmentManifest] = []
        for piece in reversed(self._path_to(model, page_key)):
            manifest = piece.manifest
            last_key = manifest.page_keys[-1]
            if any(store.is_needed(model, last_key) for store in self._stores):
                break
            self._host.discard(manifest, however_encoded=True)
            # After this no tier is given a segment that has left DRAM's index; earlier ones the tiers drop.
            self._settle()
            # What waits to be written is as DRAM had it. What was written may be encoded otherwise.
            encodings = [manifest]
            for tier in self._tiers:
                held = tier.holder_of(model, last_key)
                if held is not None and not any(held.shares_encoded_pages(other) for other in encodings):
                    encodings.append(held)
            for tier in self._tiers:
                for each in encodings:
                    tier.discard(each)
            dropped += encodings
        if dropped:
            # What was being written meanwhile.
            for tier in self._tiers:
                tier.flush(_DROP_FLUSH_S)
                for manifest in dropped:
                    held = tier.holder_of(model, manifest.page_keys[-1])
                    if held is not None and held.shares_encoded_pages(manifest):
                        tier.discard(manifest)

    def _count(self, *, num_hints: int = 0, num_comeback_pages: int = 0) -> None:
        with self._counting:
            self.num_hints += num_hints
            self.num_comeback_pages += num_comeback_pages


@dataclass(frozen=True)
class _Piece:
    """The first ``num_pages`` pages of a stored segment, as part of a conversation."""

    manifest: SegmentManifest
    num_pages: int

    @property
    def end_token(self) -> int:
        return self.manifest.start_token + self.num_pages * self.manifest.model.page_size


def _keys_of(path: Sequence[_Piece]) -> tuple[str, ...]:
    return tuple(itertools.chain(*(piece.manifest.page_keys[: piece.num_pages] for piece in path)))


def _token_ids_of(path: Sequence[_Piece]) -> TokenIds:
    sizes = (piece.num_pages * piece.manifest.model.page_size for piece in path)
    return np.concatenate(
        [piece.manifest.token_ids[:size] for piece, size in zip(path, sizes, strict=True)]
    ).astype(np.int64, copy=False)
