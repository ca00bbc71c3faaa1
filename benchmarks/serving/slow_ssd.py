"""A daemon whose disk reads no faster than asked for: ``python -m benchmarks.serving.slow_ssd MBS serve``.

Only the system call that reads is held back. The tier measures its disk and reads it as it always does.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

from demo import supervisor
from krul_backend.errors import DaemonError
from krul_backend.tiers.ssd.disk import Disk

_ROOT = Path(__file__).parents[2]
_STOP_TIMEOUT_S = 30.0
_NUM_QUOTED_LINES = 20


class Link:
    """Keeps reads from being faster than ``read_mbs``, in 1e6 bytes per second. Threads share it."""

    def __init__(self, read_mbs: float) -> None:
        self._byte_s = 1e-6 / read_mbs
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def hold(self, started_s: float, num_bytes: int) -> None:
        """Return when ``num_bytes`` can have arrived, if they were sent at ``started_s`` (perf_counter)."""
        with self._lock:
            self._free_at_s = max(self._free_at_s, started_s) + num_bytes * self._byte_s
            left_s = self._free_at_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class SlowDisk(Disk):
    """All its reads together, of all files and threads, take at least their bytes over ``read_mbs``.

    ``read_mbs``: 1e6 bytes per second.
    """

    def __init__(self, read_mbs: float) -> None:
        self._link = Link(read_mbs)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        started_s = time.perf_counter()
        num_read = super().preadv(fd, buffers, offset)
        self._link.hold(started_s, num_read)
        return num_read


class SlowSsdDaemon:
    """A daemon with a ``SlowDisk``, for one server to join. Use it as a context manager.

    Args:
        runtime_dir: its sockets; the log is beside it.
        arguments: of ``krul-backend serve``, beside the runtime directory.
    """

    def __init__(self, runtime_dir: Path, arguments: Sequence[str], read_mbs: float) -> None:
        self.runtime_dir = runtime_dir
        self._log_path = runtime_dir.with_suffix(".log")
        self.command = [
            *(sys.executable, "-m", "benchmarks.serving.slow_ssd", str(read_mbs)),
            *("serve", "--runtime-dir", str(runtime_dir), *arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SlowSsdDaemon:
        """Start it; returns when servers can join.

        Raises:
            DaemonError: it did not start; the message has the end of its log.
        """
        with self._log_path.open("ab") as log:
            # The supervisor ends it when this process ends, however that happens.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(supervisor.__file__), *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=_ROOT,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        if b"ready" not in self._process.stdout.readline():
            self.__exit__()
            lines = self._log_path.read_text(errors="replace").splitlines()[-_NUM_QUOTED_LINES:]
            raise DaemonError("\n  | ".join(("the daemon of a slow SSD did not start:", *lines)))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(timeout=_STOP_TIMEOUT_S)


def main(arguments: Sequence[str]) -> None:
    """``krul-backend`` with ``arguments[1:]``, and a disk that reads ``arguments[0]`` MB in a second."""
    from krul_backend.daemon.cli.app import app
    from krul_backend.tiers.ssd import ssd_tier

    with patch.object(ssd_tier, "Disk", partial(SlowDisk, float(arguments[0]))):
        app(list(arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
