"""Keeps why tokens of the last prompts were computed, and not restored, for ``krul-sglang why``.

Scheduler, asking and storing threads tell it what they come by anyway. To say where a prompt parted from
what was stored, it remembers the token ids of conversations that were stored lately, and finds the one that
a prompt follows longest by hashes of all tokens before a place, taken every ``PLACE_TOKENS``.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

REASONS = "krul_reasons"
"""Where ``/server_info`` has the reasons, in each of ``internal_states``: a text, see ``Reasons.as_text``."""

MAX_REQUESTS = 2048
"""Requests of which reasons are kept: about 3 MiB."""
MAX_TOKENS = 1 << 21
"""Tokens of stored conversations that are remembered: about 24 MiB, with the places in them. A turn takes the
place of the one that it goes on from."""
PLACE_TOKENS = 32
FIRST_PLACE_TOKENS = 8
"""Prompts that part before this token have nothing in common."""
AROUND_TOKENS = 8
"""Tokens that are shown on each side of the place where a prompt parts from what was stored."""
MEDIA_IDS_FROM = 1_000_000
"""Token ids from here on are no text: SGLang makes them of the contents of an image or sound, and has no
vocabularies so large."""
_MAX_ERROR = 200
"""Characters of an error that are kept."""

_Tokens = npt.NDArray[np.int64]
Origin = Callable[[], tuple[str, _Tokens]]
"""Returns whose a prompt is (its tenant), and its tokens in whole pages."""


class Run(Struct, frozen=True, array_like=True):
    """Tokens ``[first, end)`` of a prompt. ``what``: the tier that has them, or why none has."""

    first: int
    end: int
    what: str


class Parting(Struct, frozen=True, array_like=True):
    """A prompt and a stored conversation differ at ``token`` first. Before it both have ``common`` tokens,
    after that the prompt has those ``here``, the conversation those ``stored``; a few of each."""

    token: int
    common: tuple[int, ...]
    here: tuple[int, ...]
    stored: tuple[int, ...]


class RequestReasons(Struct, array_like=True):
    """What is known of one request whose prompt has ``num_tokens``.

    ``[0, device_tokens)`` were on the device, ``[device_tokens, found_end)`` were found in the store, what is
    ``missing`` after that was not. ``loaded`` are runs that a load was planned for, ``head_ends`` where its
    heads end in the first and the last layer; ``declined`` says why there was none. ``failed`` is the error
    of a load that failed, of which what is before ``salvaged_end`` was used.
    """

    rid: str
    num_tokens: int
    device_tokens: int
    found_end: int = 0
    declined: str = ""
    loaded: list[Run] = []
    head_ends: tuple[int, int] = (0, 0)
    failed: str = ""
    salvaged_end: int = 0
    missing: list[Run] = []
    parting: Parting | None = None


@dataclass(eq=False, slots=True)
class StoredTokens:
    """A conversation that was stored when a turn of it ended, or was to be. Whoever stores it changes it.

    Its first ``num_stored`` tokens were stored; ``cause`` says why the others were not. ``gone`` says why
    what was stored is not there any more, if that is known.
    """

    tokens: _Tokens
    fingerprint: str
    session: object
    gone: str = ""
    num_stored: int = 0
    cause: str = "waiting"
    num_places: int = 0
    places: array[int] = field(default_factory=lambda: array("q"))


@dataclass(eq=False, slots=True)
class _Entry:
    """``origin`` is None as soon as it is known what is missing. ``is_over``: it has ended."""

    reasons: RequestReasons
    origin: Origin | None
    is_over: bool = False


class Reasons:
    """Keeps the reasons of the last ``MAX_REQUESTS`` requests of one rank.

    ``fingerprint()`` is that of the model now; ``is_reachable()`` says whether the store can be asked.
    """

    def __init__(
        self,
        page_size: int,
        fingerprint: Callable[[], str],
        is_reachable: Callable[[], bool],
        *,
        has_states: bool = False,
    ) -> None:
        """``has_states``: the model has recurrent layers or windows, and goes on only where a turn ended."""
        self._has_states = has_states
        self._page_size = page_size
        self._fingerprint = fingerprint
        self._is_reachable = is_reachable
        # Changed by the scheduler's thread alone.
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        # Guards what follows.
        self._lock = threading.Lock()
        self._stored: dict[StoredTokens, None] = {}
        self._stored_at: dict[int, StoredTokens] = {}
        self._num_tokens = 0

    # ---- requests ----

    def look_up(self, rid: str, num_tokens: int, device_tokens: int, origin: Origin) -> None:
        """A request is looked up, in this scheduling round again. For the scheduler's thread."""
        entry = self._entries.get(rid)
        if entry is None or entry.is_over or entry.reasons.num_tokens != num_tokens:
            reasons = RequestReasons(rid, num_tokens, device_tokens, device_tokens)
            # Less is computed in any case.
            if num_tokens - device_tokens > self._page_size:
                reasons.missing = [Run(device_tokens, num_tokens, "unknown")]
            self._entries[rid] = _Entry(reasons, origin)
            self._entries.move_to_end(rid)
            while len(self._entries) > MAX_REQUESTS:
                self._entries.popitem(last=False)
        else:
            entry.reasons.device_tokens = device_tokens
            entry.reasons.found_end = max(entry.reasons.found_end, device_tokens)

    def found(self, rid: str, end_token: int, *, is_late: bool = False) -> bool:
        """The store has what is before ``end_token``; whether ``explain`` should say why it has not more.

        ``is_late``: that is known after the round that asked for it, in which the request may have begun.
        """
        entry = self._entries.get(rid)
        if entry is not None:
            if entry.origin is None and end_token < entry.reasons.found_end:
                lost = Run(end_token, entry.reasons.found_end, "evicted")
                entry.reasons.missing = [lost, *entry.reasons.missing]
            entry.reasons.found_end = end_token
            entry.reasons.declined = "late" if is_late else ""
        return entry is not None and entry.origin is not None

    def decline(self, rid: str, why: str) -> None:
        """What was found will not be loaded, unless something else is said later."""
        entry = self._entries.get(rid)
        if entry is not None:
            entry.reasons.declined = why

    def load(self, rid: str, runs: Iterable[Run], head_ends: tuple[int, int]) -> None:
        """A load of these runs is planned, with heads that end there in the first and the last layer."""
        entry = self._entries.get(rid)
        if entry is None:
            return
        loaded: list[Run] = []
        for run in runs:
            if loaded and (loaded[-1].end, loaded[-1].what) == (run.first, run.what):
                run = Run(loaded.pop().first, run.end, run.what)
            loaded.append(run)
        entry.reasons.loaded, entry.reasons.head_ends, entry.reasons.declined = loaded, head_ends, ""

    def fail(self, rid: str, error: str, salvaged_end: int) -> None:
        """Its load failed, or came late; what is before ``salvaged_end`` had come."""
        entry = self._entries.get(rid)
        if entry is not None:
            entry.reasons.failed, entry.reasons.salvaged_end = error[:_MAX_ERROR], salvaged_end

    def end(self, rid: str) -> None:
        """The request has ended: its prompt is not kept any more. For the scheduler's thread."""
        entry = self._entries.get(rid)
        if entry is not None:
            entry.origin, entry.is_over = None, True

    def explain(self, rid: str) -> None:
        """Find out why the store has not more of a request. Not for the scheduler's thread: it takes time."""
        entry = self._entries.get(rid)
        origin = None if entry is None else entry.origin
        if entry is None or origin is None:
            return
        entry.origin = None
        tenant, tokens = origin()
        reasons = entry.reasons
        first, end = reasons.found_end, len(tokens)
        reasons.missing = []
        if first >= end:
            return
        if not self._is_reachable():
            reasons.missing = [Run(first, end, "unreachable")]
            return
        stored = self._nearest(tenant, tokens)
        num_common = 0 if stored is None else _num_common(tokens, stored.tokens)
        shared = min(max(num_common // self._page_size * self._page_size, first), end)
        missing: list[Run] = []
        cause = "new"
        if stored is not None:
            gone = "weights" if stored.fingerprint != self._fingerprint() else stored.gone or "evicted"
            if gone == "evicted" and self._has_states and num_common < len(stored.tokens):
                gone = "between"
            stored_end = min(max(stored.num_stored, first), shared)
            missing = [Run(first, stored_end, gone), Run(stored_end, shared, stored.cause)]
            if first <= num_common < len(stored.tokens):
                cause = "parted"
                after = slice(num_common, num_common + AROUND_TOKENS)
                reasons.parting = Parting(
                    num_common,
                    tuple(tokens[max(0, num_common - AROUND_TOKENS) : num_common].tolist()),
                    tuple(tokens[after].tolist()),
                    tuple(stored.tokens[after].tolist()),
                )
        missing.append(Run(shared, end, cause))
        reasons.missing = [run for run in missing if run.first < run.end]

    def as_text(self) -> str:
        """JSON of the ``RequestReasons`` of all requests, the latest one last."""
        return msgspec.json.encode([entry.reasons for entry in self._entries.values()]).decode()

    # ---- what was stored ----

    def store(
        self, rid: str, tenant: str, tokens: _Tokens, fingerprint: str, session: object, gone: str
    ) -> StoredTokens:
        """A turn of request ``rid`` is going to be stored; returns what says how far. For one thread."""
        # Before its own turn is known.
        self.explain(rid)
        tokens = np.asarray(tokens, dtype=np.int64)
        stored = StoredTokens(tokens, fingerprint, session, gone)
        stored.places.extend(_places(tenant, tokens))
        stored.num_places = len(stored.places)
        if not stored.num_places:
            return stored
        with self._lock:
            for place in stored.places:
                older = self._stored_at.get(place)
                if older is not None:
                    older.num_places -= 1
                    if not older.num_places:
                        self._forget(older)
                self._stored_at[place] = stored
            self._stored[stored] = None
            self._num_tokens += len(tokens)
            while self._num_tokens > MAX_TOKENS:
                self._forget(next(iter(self._stored)))
        return stored

    def lose(self, cause: str, session: object = None) -> None:
        """What was stored (of one session, if it is given) has been dropped, or leaves before others."""
        with self._lock:
            for stored in self._stored:
                if session is None or stored.session == session:
                    stored.gone = cause

    def _nearest(self, tenant: str, tokens: _Tokens) -> StoredTokens | None:
        """The stored conversation that has most of these tokens in common, about; None if none has any."""
        places, nearest = list(_places(tenant, tokens)), None
        with self._lock:
            for place in places:
                stored = self._stored_at.get(place)
                if stored is None:
                    break
                nearest = stored
        return nearest

    def _forget(self, stored: StoredTokens) -> None:
        del self._stored[stored]
        self._num_tokens -= len(stored.tokens)
        for place in stored.places:
            if self._stored_at.get(place) is stored:
                del self._stored_at[place]


def _places(tenant: str, tokens: _Tokens) -> Iterable[int]:
    """Hashes of all tokens before the first place, the second one, and so on."""
    content, size = tokens.tobytes(), tokens.itemsize
    digest, begin = hash(tenant), 0
    for end in (FIRST_PLACE_TOKENS, *range(PLACE_TOKENS, len(tokens) + 1, PLACE_TOKENS)):
        if end <= len(tokens):
            digest = hash((digest, content[begin * size : end * size]))
            yield digest
            begin = end


def _num_common(tokens: _Tokens, others: _Tokens) -> int:
    """How many tokens from the first one on are the same."""
    length = min(len(tokens), len(others))
    is_other = tokens[:length] != others[:length]
    return int(is_other.argmax()) if is_other.any() else length
