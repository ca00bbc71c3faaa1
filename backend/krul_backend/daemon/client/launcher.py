"""Starts a daemon for one engine, and starts it again when it died."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import orjson

import krul_backend
from krul_backend.daemon.protocol.runtime_dir import LOG_NAME, check_socket_path
from krul_backend.errors import DaemonError

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 30.0
MAX_RESTARTS, RESTART_WINDOW_S = 5, 600.0

_PREFIX = "krul-"
_NUM_SHOWN_LINES = 20
_MAX_READY_BYTES = 4096
_END_TIMEOUT_S = 15.0  # the daemon flushes for up to 10 s
_KILL_TIMEOUT_S = 5.0


class EmbeddedDaemon:
    """A ``krul-backend`` process in a private runtime directory, of this process alone.

    It ends by itself some seconds after its last client, or a minute after its start if none came; ``close``
    ends it at once. It has a process group of its own, so that Ctrl-C in the engine's terminal does not reach
    it before it has flushed. It logs to ``log_path``.

    Args:
        arguments: of ``krul-backend serve``, beside the runtime directory: ``("--host-memory", "8GiB")``.
        ready_timeout_s: how long starting may take.

    Raises:
        DaemonError: it does not start; the message has the last lines that it logged.
    """

    def __init__(self, arguments: Sequence[str], *, ready_timeout_s: float = READY_TIMEOUT_S) -> None:
        self._arguments = tuple(arguments)
        self._ready_timeout_s = ready_timeout_s
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._restarts_s: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._is_closed = False
        self.runtime_dir = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_private_parent()))
        try:
            self._process = self._start()
        except BaseException:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """Process id of the daemon that was started last."""
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self.runtime_dir / LOG_NAME

    def restart(self) -> None:
        """Start the daemon again, in the same directory. If the old process still runs, it is killed.

        Raises:
            DaemonError: it was restarted too often lately, does not start, or was closed.
        """
        with self._lock:
            if self._is_closed or os.getpid() != self._owner_pid:
                raise DaemonError(f"the daemon in {self.runtime_dir} is not this process's to restart")
            now_s = time.monotonic()
            if len(self._restarts_s) == MAX_RESTARTS and now_s - self._restarts_s[0] < RESTART_WINDOW_S:
                raise DaemonError(
                    f"the krul daemon ended {MAX_RESTARTS + 1} times within {RESTART_WINDOW_S:g} s and is "
                    f"not started again; {self._last_lines()}"
                )
            self._restarts_s.append(now_s)
            self._process.end(signal.SIGKILL)
            self._process = self._start()
        logger.info("krul daemon restarted, process %d", self.pid)

    def close(self) -> None:
        """End the daemon and remove its directory. Does nothing in a process that did not start it."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if not self._process.end(signal.SIGTERM, _END_TIMEOUT_S):
                logger.warning("krul daemon did not end within %g s: killed", _END_TIMEOUT_S)
            shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _start(self) -> _Process:
        command = [sys.executable, "-m", "krul_backend.daemon", "serve", "--embedded"]
        command += ["--runtime-dir", str(self.runtime_dir), *self._arguments]
        # The daemon has to find the package where this process found it, installed or not.
        package_parent = str(Path(krul_backend.__file__).resolve().parent.parent)
        python_path = os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH"))))
        self.runtime_dir.mkdir(mode=0o700, exist_ok=True)
        with open(self.log_path, "ab") as log:
            # This process ends at once: the daemon is its child, in its group.
            starter = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python_path},
                start_new_session=True,
            )
        assert starter.stdout is not None
        try:
            return _Process(self._wait_until_ready(starter.stdout))
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(starter.pid, signal.SIGKILL)
            raise
        finally:
            starter.stdout.close()
            starter.wait()

    def _wait_until_ready(self, stdout: IO[bytes]) -> int:
        """Wait for the line that says that the daemon serves; returns the process id that it names."""
        deadline_s = time.monotonic() + self._ready_timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n") and len(line) < _MAX_READY_BYTES:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise DaemonError(
                        f"the krul daemon is not ready in {self._ready_timeout_s:g} s; {self._last_lines()}"
                    )
                # Not through the file object: select() would not see what its buffer holds.
                data = os.read(stdout.fileno(), _MAX_READY_BYTES)
                if not data:
                    raise DaemonError(f"the krul daemon ended at start; {self._last_lines()}")
                line += data
        try:
            ready = orjson.loads(line)
            if ready["ready"] is True:
                return int(ready["pid"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            pass
        raise DaemonError(f"the krul daemon said {line!r} instead of that it is ready")

    def _last_lines(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-_NUM_SHOWN_LINES:]
        except OSError as error:
            return f"its log cannot be read: {error}"
        return "its last words:\n" + "\n".join(lines) if lines else "it logged nothing"


def _private_parent() -> Path:
    """Where runtime directories go: the user's own, or the system's directory for temporary files.

    Not ``TMPDIR``, which is often too long for the path of a socket.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        with contextlib.suppress(OSError, DaemonError):
            status = os.stat(given)
            check_socket_path(Path(given) / (_PREFIX + "12345678"))
            if status.st_uid == os.geteuid() and os.access(given, os.W_OK | os.X_OK):
                return Path(given)
    return Path("/tmp")


class _Process:
    """A process that is not this one's child, held by a descriptor: the process id alone could be reused."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(pid)

    def end(self, kind: signal.Signals, timeout_s: float = 0.0) -> bool:
        """Signal it; kill it if it has not ended ``timeout_s`` later. Returns whether it ended by itself."""
        if self._descriptor is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, kind)
        ended = self._has_ended(timeout_s)
        if not ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            self._has_ended(_KILL_TIMEOUT_S)
        os.close(self._descriptor)
        self._descriptor = None
        return ended

    def _has_ended(self, timeout_s: float) -> bool:
        if self._descriptor is None:
            return True
        # A descriptor of a process is readable when it has ended.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))
