"""One round: let engines work, kill something at a random moment, start it again, compare."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import orjson

from krul_backend.daemon.client.daemon_store import DaemonStore
from tests.crash.conversations import Turn, model_of, page_keys, tokens_of
from tests.crash.engine import check_lease
from tests.crash.journal import ExpectedState
from tests.support.store_builders import wait_until

NUM_ENGINES = 2
_SETTLE_TIMEOUT_S = 15.0
_DAEMON_SIZES = ("--host-memory", "12MiB", "--ssd-capacity", "16GiB")
"""Little memory, so that most of what is found comes from the disk; as much disk as is ever written."""


@dataclass
class Outcome:
    """``found`` and ``missed`` count the turns that a check asked for; every one was allowed to be so."""

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    found: int = 0
    missed: int = 0
    durable: int = 0


class CrashTest:
    """Daemon and engines in ``directory``; ``seed`` decides what is killed when, and whether there are one or
    two directories of the SSD tier."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.outcome = Outcome()
        self._directory = directory
        self._runtime_dir = directory / "run"
        self._rng = random.Random(seed)
        self._ssd_dirs = [str(directory / f"ssd-{number}") for number in range(1 + seed % 2)]
        self._daemon: subprocess.Popen[bytes] | None = None
        self._engines: dict[int, subprocess.Popen[bytes]] = {}
        self._num_started = 0

    @contextmanager
    def running(self) -> Iterator[CrashTest]:
        """All processes have ended when the block is left."""
        try:
            self._start_missing()
            yield self
        finally:
            for process in (self._daemon, *self._engines.values()):
                if process is not None:
                    process.kill()
                    process.wait()

    def run_round(self) -> None:
        """Raises AssertionError (WrongBytesError for wrong bytes) if something is not as promised."""
        time.sleep(self._rng.uniform(0.1, 1.5))
        victim = self._rng.choice(("daemon", "engine", "both"))
        if victim in ("daemon", "both"):
            self._kill_daemon()
        if victim in ("engine", "both"):
            self._kill_engine(self._rng.randrange(NUM_ENGINES))
        self._start_missing()
        self._check()
        self.outcome.rounds += 1
        self.outcome.kills[victim] += 1

    def _kill_daemon(self) -> None:
        assert self._daemon is not None
        self._daemon.kill()
        self._daemon.wait()
        self._daemon = None

    def _kill_engine(self, engine: int) -> None:
        process = self._engines.pop(engine)
        process.kill()
        process.wait()

    def _start_missing(self) -> None:
        if self._daemon is None:
            arguments = ("serve", "--runtime-dir", str(self._runtime_dir), *_DAEMON_SIZES)
            ssd = ("--ssd-timeout", "10", *chain(*(("--ssd-dir", each) for each in self._ssd_dirs)))
            self._daemon = self._start("krul_backend.daemon", *arguments, *ssd)
        for engine in range(NUM_ENGINES):
            if engine not in self._engines:
                self._num_started += 1
                seed = str(1000 * self._rng.randrange(1000) + self._num_started)
                self._engines[engine] = self._start(
                    "tests.crash.engine",
                    str(self._runtime_dir),
                    str(self._journal(engine)),
                    str(engine),
                    seed,
                )

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Returns when the process has said that it is ready."""
        with (self._directory / f"{module}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=log
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert b"ready" in line, f"{module} did not start: {self._log(module)}"
        return process

    def _log(self, module: str) -> str:
        return (self._directory / f"{module}.log").read_text()[-3000:]

    def _journal(self, engine: int) -> Path:
        return self._directory / f"journal-{engine}"

    def _check(self) -> None:
        """Stop the engines where they are, and look for everything that they ever stored."""
        for engine, process in self._engines.items():
            assert process.poll() is None, f"engine {engine} ended: {self._log('tests.crash.engine')}"
            process.send_signal(signal.SIGSTOP)
        try:
            for engine in range(NUM_ENGINES):
                self._check_engine(engine)
        finally:
            for process in self._engines.values():
                process.send_signal(signal.SIGCONT)

    def _check_engine(self, engine: int) -> None:
        expected = ExpectedState.read(self._journal(engine))
        model = model_of(engine)
        store = DaemonStore(self._runtime_dir, model=model, request_timeout_s=10.0)
        try:
            # A daemon is ready before its disk has been read, if that takes long.
            wait_until(lambda: not any(tier.is_opening for tier in store.stats().tiers))
            for conversation, turns in _by_conversation(expected.possible).items():
                found = self._restore(store, engine, conversation, max(turn.end_page for turn in turns))
                unexpected = found - turns
                assert not unexpected, f"found, but never committed or cleared since: {unexpected}"
                lost = turns & expected.durable - found
                assert not lost, f"flushed and lost: {lost}"
                self.outcome.found += len(found)
                self.outcome.missed += len(turns - found)
                self.outcome.durable += len(turns & expected.durable)
            self._check_books(store)
        finally:
            store.close()

    def _restore(self, store: DaemonStore, engine: int, conversation: str, num_pages: int) -> set[Turn]:
        """The turns of a conversation that can be restored, asked for one after the other."""
        found: set[Turn] = set()
        keys = page_keys(conversation, 0, num_pages)
        page = 0
        while page < num_pages:
            lease = store.lease(model_of(engine), keys[page:], tokens_of(keys[page:]))
            if lease is None:
                page += 1
                continue
            try:
                found.update(check_lease(store, lease))
            finally:
                store.release(lease)
            page += lease.num_pages
        return found

    def _check_books(self, store: DaemonStore) -> None:
        """Bytes add up; of engines that died nothing is held after a moment."""
        deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            stats = store.stats()
            assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
            for tier in stats.tiers:
                assert tier.used_bytes + tier.free_bytes == tier.capacity_bytes, tier
            # An engine that is stopped may be in the middle of one thing; nobody else may hold anything.
            if stats.num_leases <= NUM_ENGINES and stats.num_reservations <= NUM_ENGINES:
                return
            assert time.monotonic() < deadline_s, f"held for nobody: {stats}"
            time.sleep(0.1)


def _by_conversation(turns: set[Turn]) -> dict[str, set[Turn]]:
    grouped: dict[str, set[Turn]] = {}
    for turn in turns:
        grouped.setdefault(turn.conversation, set()).add(turn)
    return grouped


def run_rounds(directory: Path, num_rounds: int, seed: int) -> Outcome:
    """``num_rounds`` rounds in an empty directory. Raises AssertionError at the first broken promise."""
    test = CrashTest(directory, seed)
    with test.running():
        for _ in range(num_rounds):
            test.run_round()
    return test.outcome


def describe(outcome: Outcome) -> str:
    return orjson.dumps({**vars(outcome), "kills": dict(outcome.kills)}).decode()
