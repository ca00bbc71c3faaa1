"""Stands for an engine: stores and restores conversations until somebody kills it.

``python -m tests.crash.engine RUNTIME_DIR JOURNAL ENGINE SEED``
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.errors import DaemonError, KrulError
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease, SegmentTail, block_checksum, block_checksums
from tests.crash.conversations import NUM_LAYERS, TOKEN_BYTES, Turn, model_of, page_keys, tokens_of
from tests.crash.journal import Journal

_PATIENCE_S = 10.0
_MAX_CONVERSATIONS = 6
_MAX_PAGES = 48


class WrongBytesError(AssertionError):
    """The one thing that must never happen."""


def check_lease(
    store: KVStore, lease: Lease, tails: Sequence[SegmentTail | None] | None = None
) -> list[Turn]:
    """Compare every byte of a lease with the end of what was stored; the turns that it covers.

    ``tails`` is what is read of what lies in lower tiers, or lacks something in DRAM; None for all there is.

    A block whose checksum is wrong may be found by its reader, which then does without; wrong bytes behind a
    right checksum may not.

    Raises:
        WrongBytesError: they differ.
        TierReadError: a lower tier does not give them.
    """
    slices = store.fetch(lease, tails)
    turns = []
    for part in slices:
        header = part.header
        turn = Turn(*header.codec_params["turn"])
        for layer, block in enumerate(part.blocks):
            if part.status is not None:
                part.status.wait(layer, _PATIENCE_S)
            if block_checksum(block, header.range_bytes) != part.checksums[layer]:
                raise WrongBytesError(f"layer {layer} of {turn} has a wrong checksum in {part.tier}")
            written = turn.block(layer)
            if not np.array_equal(block, written[written.nbytes - block.nbytes :]):
                raise WrongBytesError(f"layer {layer} of {turn} has other bytes in {part.tier}")
            if block.nbytes < (header.end_token - header.layer_first_token[layer]) * TOKEN_BYTES:
                raise WrongBytesError(f"layer {layer} of {turn} holds less than it says in {part.tier}")
        turns.append(turn)
    return turns


class Engine:
    """Appends turns to a few conversations, and restores them, in random order."""

    def __init__(self, runtime_dir: Path, model: ModelIdentity, journal: Journal, seed: int) -> None:
        self._runtime_dir = runtime_dir
        self._store = DaemonStore(runtime_dir, model=model)
        self._model = model
        self._journal = journal
        self._rng = random.Random(seed)
        self._seed = seed
        self._num_begun = 0
        self._num_pages: dict[str, int] = {}

    def step(self) -> None:
        action = self._rng.choices(
            (self._store_turn, self._restore, self._abandon, self._flush, self._clear), (600, 400, 50, 40, 4)
        )[0]
        action()

    def _store_turn(self) -> None:
        conversation = self._some_conversation()
        first = self._num_pages[conversation]
        turn = Turn(conversation, first, first + self._rng.randint(1, 12))
        reservation = self._store.reserve(turn.layer_num_bytes)
        if reservation is None:
            return
        for layer in range(NUM_LAYERS):
            reservation.blocks[layer][:] = turn.block(layer)
        self._journal.write("commit", turn)
        self._num_pages[conversation] = turn.end_page
        connection = self._connection()
        try:
            self._store.commit(reservation, turn.manifest(self._model), block_checksums(reservation.blocks))
        except KrulError:
            return  # The daemon is gone; whether it committed nobody knows.
        if self._is_still(connection):
            self._journal.write("committed", turn, connection)

    def _restore(self) -> None:
        conversation = self._some_conversation()
        keys = page_keys(conversation, 0, self._num_pages[conversation])
        lease = self._store.lease(self._model, keys, tokens_of(keys)) if keys else None
        if lease is None:
            return
        try:
            check_lease(self._store, lease, self._some_tails(lease))
        except KrulError:
            pass  # A miss.
        finally:
            self._store.release(lease)

    def _some_tails(self, lease: Lease) -> list[SegmentTail | None] | None:
        """Half of all restores read all; the others the last tokens of each segment, as with heads."""
        if self._rng.random() < 0.5:
            return None
        tails = []
        for part in lease.slices:
            start, end = part.header.start_token, part.header.end_token
            firsts = sorted((self._rng.randint(start, end) for _ in range(NUM_LAYERS)), reverse=True)
            tails.append(SegmentTail(tuple(firsts), tuple((end - first) * TOKEN_BYTES for first in firsts)))
        return [*tails]

    def _abandon(self) -> None:
        """Reserve, write a part, think better of it."""
        turn = Turn(f"abandoned-{self._seed}", 0, self._rng.randint(1, 12))
        reservation = self._store.reserve(turn.layer_num_bytes)
        if reservation is not None:
            reservation.blocks[0][:] = turn.block(0)
            self._store.abort(reservation)

    def _flush(self) -> None:
        connection = self._connection()
        try:
            with AdminClient(self._runtime_dir) as admin:
                is_durable = admin.flush(_PATIENCE_S)
        except DaemonError:
            return
        if is_durable and self._is_still(connection):
            self._journal.write("flushed", connection=connection)

    def _clear(self) -> None:
        connection = self._connection()
        self._journal.write("clear")
        self._store.clear(self._model)
        # One that waits for the daemon to come back dies with this process.
        if self._is_still(connection):
            self._journal.write("cleared")
        self._num_pages.clear()

    def _connection(self) -> str:
        # No two processes have the same seed.
        return f"{self._seed}/{self._store.counters.lost}"

    def _is_still(self, connection: str) -> bool:
        """Whether there was one connection all the time since ``connection`` was asked for."""
        return self._store.is_connected and self._connection() == connection

    def _some_conversation(self) -> str:
        """One of the last few, or a new one; one that has become long is left alone."""
        open_ones = [name for name, pages in self._num_pages.items() if pages < _MAX_PAGES]
        if (len(open_ones) < _MAX_CONVERSATIONS and self._rng.random() < 0.2) or not open_ones:
            self._num_begun += 1
            name = f"{self._seed}-{self._num_begun}"
            self._num_pages[name] = 0
            return name
        return self._rng.choice(open_ones[-_MAX_CONVERSATIONS:])


def main() -> None:
    runtime_dir, journal = Path(sys.argv[1]), Path(sys.argv[2])
    model, seed = model_of(int(sys.argv[3])), int(sys.argv[4])
    engine = Engine(runtime_dir, model, Journal(journal), seed)
    print("ready", flush=True)
    while True:
        engine.step()


if __name__ == "__main__":
    main()
