"""Runs one configuration and returns the result file's content."""

from __future__ import annotations

import logging
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tiers.cluster import mooncake_rows
from benchmarks.tiers.configuration import Configuration
from benchmarks.tiers.disk import disk_rows, overhead_rows
from benchmarks.tiers.dram import dram_rows
from benchmarks.tiers.fragmentation import fragmentation_row
from benchmarks.tiers.lookup import index_rows, lookup_rows
from benchmarks.tiers.targets import targets
from krul_backend.daemon.client.launcher import EmbeddedDaemon
from krul_sglang.demo.environment import git_revision, machine, versions, without_cwd

logger = logging.getLogger(__name__)


def run(configuration: Configuration) -> dict[str, Any]:
    """Every operation at every size.

    Raises:
        KrulError: bytes came back wrong, or a tier refused what it has to take.
    """
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=configuration.folder) as name:
        folder = Path(name)
        daemon = EmbeddedDaemon(("--host-memory", str(configuration.arena_bytes)))
        try:
            rows += _part("DRAM", lambda: dram_rows(configuration, daemon.runtime_dir))
            rows += _part("lookups", lambda: lookup_rows(configuration, daemon.runtime_dir))
        finally:
            daemon.close()
        rows += _part("index", lambda: index_rows(configuration))
        rows += _part("fragmentation", lambda: [fragmentation_row(configuration)])
        rows += _part("SSD", lambda: disk_rows(configuration, folder))
        rows += _part("metadata", lambda: overhead_rows(configuration, folder))
        rows += _part("Mooncake", lambda: mooncake_rows(configuration, folder))
    return {
        "git_revision": git_revision(),
        "versions": versions(("numpy", "pyzmq", "msgspec", "xxhash")),
        "machine": machine(),
        "command": without_cwd(shlex.join(sys.orig_argv)),
        "configuration": configuration.to_json(),
        "duration_s": round(time.monotonic() - started, 1),
        "targets": targets(rows),
        "rows": rows,
    }


def _part(name: str, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    started = time.monotonic()
    rows = measure()
    logger.info("%s: %d rows in %.1f s", name, len(rows), time.monotonic() - started)
    return rows
