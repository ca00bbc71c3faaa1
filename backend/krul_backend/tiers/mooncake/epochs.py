"""Epochs: numbers in the names of objects; a clear replaces the number, so that no old name is found."""

from __future__ import annotations

import re
import secrets
import threading
from dataclasses import dataclass

from krul_backend.segment import FORMAT_VERSION
from krul_backend.tiers.common.interface import Clock
from krul_backend.tiers.mooncake.mooncake_client import ObjectStore

ROOT = f"krul/{FORMAT_VERSION}"
EPOCH_AGE_S = 1.0
"""For how long a daemon uses an epoch that it has read."""

_EPOCH = re.compile(rb"[0-9a-f]{16}")


@dataclass(frozen=True)
class KnownPrefix:
    """The prefix that was current at ``read_at_s``; None if nothing of the model was stored."""

    prefix: str | None
    read_at_s: float


class Epochs:
    """Gives the prefix of a model's objects: ``krul/<format>/<fingerprint>/<epoch of all><epoch of model>``.

    A store cannot enumerate its objects, so a clear replaces an epoch instead of removing all of them. An
    epoch is a random 64-bit number in an object that is never evicted. It is random, not counted, so that
    when two daemons clear at once, nothing was ever stored under either number. If an epoch's object is lost
    (the master was restarted), nothing is found, and the next daemon that stores draws another number: what
    was cleared stays cleared.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, KnownPrefix] = {}
        self._pending: set[str | None] = set()
        self._num_clears = 0

    def known(self, fingerprint: str) -> KnownPrefix | None:
        """The prefix if it was read at most ``EPOCH_AGE_S`` ago, else None. Does not ask the cluster."""
        with self._lock:
            known = self._known.get(fingerprint)
            if known is None or self._pending or self._clock() - known.read_at_s >= EPOCH_AGE_S:
                return None
            return known

    def prefix(self, store: ObjectStore, fingerprint: str, *, may_create: bool = False) -> str | None:
        """The model's prefix, read from the cluster if not known; None if nothing was ever stored.

        Raises:
            ObjectStoreError: the cluster does not answer, perhaps to an earlier clear.
        """
        self.settle(store)
        known = self.known(fingerprint)
        if known is not None and (known.prefix is not None or not may_create):
            return known.prefix
        with self._lock:
            num_clears = self._num_clears
        read_at_s = self._clock()
        numbers = [_read(store, name, may_create=may_create) for name in _names(fingerprint)]
        found = [number for number in numbers if number is not None]
        prefix = f"{ROOT}/{fingerprint}/{''.join(found)}" if len(found) == len(numbers) else None
        with self._lock:
            if num_clears == self._num_clears:
                self._known[fingerprint] = KnownPrefix(prefix, read_at_s)
        return prefix

    def clear(self, fingerprint: str | None) -> None:
        """Forget all prefixes until ``settle`` has replaced this model's epoch (None: that of all models)."""
        with self._lock:
            self._pending.add(fingerprint)
            self._known.clear()
            self._num_clears += 1

    def settle(self, store: ObjectStore) -> None:
        """Replace the epochs of pending clears, and remove cleared objects that nobody is reading.

        Raises:
            ObjectStoreError: the cluster does not answer; the clears stay pending.
        """
        with self._lock:
            pending = set(self._pending)
        for fingerprint in pending:
            name = _names(fingerprint)[-1] if fingerprint is not None else _names("")[0]
            store.replace(name, secrets.token_hex(8).encode(), is_pinned=True)
            with self._lock:
                self._pending.discard(fingerprint)
                self._known.clear()
                self._num_clears += 1
            model = re.escape(fingerprint) if fingerprint is not None else "[0-9a-f]+"
            current = self.prefix(store, fingerprint, may_create=True) if fingerprint is not None else None
            kept = f"(?!{current.rpartition('/')[2]}/)" if current is not None else ""
            store.remove_matching(f"^{ROOT}/{model}/{kept}[0-9a-f]{{32}}/.*")


def _names(fingerprint: str) -> tuple[str, str]:
    """The objects that hold the epoch of all models, and of one."""
    return f"{ROOT}/epoch", f"{ROOT}/{fingerprint}/epoch"


def _read(store: ObjectStore, name: str, *, may_create: bool) -> str | None:
    number = _number(store.get(name, 16))
    if number is None and may_create:
        store.put(name, secrets.token_hex(8).encode(), is_pinned=True)
        # Another daemon may have been first.
        number = _number(store.get(name, 16))
        if number is None:  # The object is not an epoch.
            store.replace(name, secrets.token_hex(8).encode(), is_pinned=True)
            number = _number(store.get(name, 16))
    return number


def _number(value: bytes | None) -> str | None:
    return value.decode() if value is not None and _EPOCH.fullmatch(value) else None
