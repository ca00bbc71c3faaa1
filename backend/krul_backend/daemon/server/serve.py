"""Runs a daemon process, from its configuration to its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

import msgspec

from krul_backend.daemon.protocol.messages import DaemonStats
from krul_backend.daemon.protocol.runtime_dir import HINTS_TOKEN_NAME, RuntimeDir
from krul_backend.daemon.server.build_store import build_store
from krul_backend.daemon.server.config import DaemonConfig
from krul_backend.daemon.server.metrics import DaemonMetrics, ReadStats
from krul_backend.daemon.server.server import DaemonServer
from krul_backend.memory import format_bytes
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import StoreStats

logger = logging.getLogger(__name__)

SWITCH_S = 0.001
"""How soon Python switches threads: a thread that plans an eviction must not hold up the one that answers."""

OPEN_PATIENCE_S = 2.0
"""How long clients wait at the daemon's start for the tiers to know what lies in them. A large disk takes
minutes; it joins when it has been read."""

END_FLUSH_S = 10.0
"""How long the daemon waits at its end for committed segments to become durable."""


def serve(config: DaemonConfig) -> None:
    """Serve until a signal, a shutdown request, or nobody uses the daemon any more; then flush and return.

    When clients can connect, one JSON line is printed: ``{"ready": true, "runtime_dir": ..., "pid": ...}``.
    Changes the process: standard output, umask, limit of open files, garbage collection, how soon threads
    switch, and what SIGTERM and SIGINT do.

    Raises:
        DaemonError, ConfigError: it cannot start; the message says why.
    """
    os.umask(0o077)
    _allow_many_files()
    stdout = _take_stdout()
    with contextlib.ExitStack() as stack:
        runtime_dir = RuntimeDir(config.runtime_dir)
        stack.callback(runtime_dir.close)
        store = build_store(config)
        stack.callback(store.close)

        # ``server`` is set below, before anybody can ask for statistics.
        def read_stats() -> tuple[StoreStats, DaemonStats]:
            return store.stats(), server.daemon_stats()

        metrics = DaemonMetrics(read_stats)
        stack.callback(metrics.close)
        server = DaemonServer(
            runtime_dir,
            store,
            # A lookup in a cluster waits for its network.
            may_lookup_wait=config.mooncake is not None or config.bucket is not None,
            observer=metrics.observe if config.metrics_port else None,
            exit_when_unused=config.exit_when_unused,
        )
        with _stopped_by_signals(server):
            try:
                if not store.wait_until_open(OPEN_PATIENCE_S):
                    logger.info("serving before the tiers below DRAM have been read: they join later")
                tune_garbage_collection()
                sys.setswitchinterval(SWITCH_S)
                if config.metrics_port:
                    metrics.serve(config.metrics_port)
                if config.hints_port:
                    stack.enter_context(_hint_endpoint(config, store, read_stats))
                _announce(config, stdout)
                server.run()
            finally:
                server.disconnect()
                _flush(store)
                store.close()
                server.close()
    logger.info("ended")


def tune_garbage_collection() -> None:
    """Make full garbage collections rare: one would walk the page index in the middle of a request.

    The store's millions of long-lived objects have no cycles, and reference counts free those that leave. A
    full collection would stop every client for a good part of a second and find nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000)


def _announce(config: DaemonConfig, stdout: TextIO) -> None:
    logger.info("serving %s of memory in %s", format_bytes(config.arena_bytes), config.runtime_dir)
    ready = {"ready": True, "runtime_dir": str(config.runtime_dir.absolute()), "pid": os.getpid()}
    stdout.write(msgspec.json.encode(ready).decode() + "\n")
    stdout.flush()


def _take_stdout() -> TextIO:
    """The standard output, for the ready line alone: what libraries print goes to the log from now on."""
    sys.stdout.flush()
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stdout


def _flush(store: TieredStore) -> None:
    try:
        if not store.flush(END_FLUSH_S):
            logger.warning(
                "ending with segments that are not durable: they took longer than %g s", END_FLUSH_S
            )
    except Exception:
        logger.exception("what was committed last may not be durable")


@contextlib.contextmanager
def _hint_endpoint(config: DaemonConfig, store: TieredStore, read_stats: ReadStats) -> Iterator[None]:
    # Imported late: a daemon without the endpoint loads nothing that it needs.
    from krul_backend.daemon.server.hint_endpoint import HintEndpoint
    from krul_backend.daemon.server.status_page import StatusPage

    token_path = config.runtime_dir.absolute() / HINTS_TOKEN_NAME
    endpoint = HintEndpoint(
        config.hints_port,
        token_path,
        lambda session, hint: store.advise(hint, session=session),
        StatusPage(read_stats, store.list_segments),
    )
    try:
        yield
    finally:
        endpoint.close()


@contextlib.contextmanager
def _stopped_by_signals(server: DaemonServer) -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        server.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _allow_many_files() -> None:
    """Raise the limit of open files: each session takes several descriptors, and the usual limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
