"""A real daemon for tests, in a directory whose path is short enough for its sockets."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_daemon(
    *arguments: str, directory: Path | None = None
) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Its runtime directory and process; both are gone when the block is left."""
    with tempfile.TemporaryDirectory(prefix="krul-test-", dir="/tmp") as temporary:
        runtime_dir = Path(temporary) / "run" if directory is None else directory
        process = start_daemon(runtime_dir, *arguments)
        try:
            yield runtime_dir, process
        finally:
            process.kill()
            process.wait()


def start_daemon(runtime_dir: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Returns when it serves; what it logs goes where this process's errors go."""
    command = [sys.executable, "-m", "krul_backend.daemon", "serve", "--runtime-dir", str(runtime_dir)]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert b"ready" in line, f"the daemon said {line!r}"
    return process
