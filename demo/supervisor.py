"""Runs one command and makes sure that nothing of it survives the process that asked for it.

Started as a script by ``ServerProcess``: ``python -P supervisor.py COMMAND...``. Its standard input is a
lifeline, a pipe whose other end only the parent holds. When the pipe reports end of file (the parent closed
it, crashed, or was killed: the kernel closes it in every case), the command and its descendants are ended.

The supervisor is a child subreaper: a descendant whose own parent has died becomes a child of the supervisor
instead of escaping to init, so "all its descendants" stays exact even if the command's main process is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

TERMINATE_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_INTERVAL_S = 0.2


def run(command: list[str]) -> int:
    """Run ``command`` until it ends or the lifeline (file descriptor 0) breaks; returns its exit status.

    Descendants that the command leaves behind are ended too.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A polite kill of the supervisor must not orphan the command.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # The death signal covers the one case the lifeline cannot: the supervisor itself killed with SIGKILL.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    try:
        while child.poll() is None and not _lifeline_broken(_POLL_INTERVAL_S):
            pass
    finally:
        _end_descendants(child)
    return child.returncode


def _end_descendants(child: subprocess.Popen[bytes]) -> None:
    """Ask ``child`` to end, which a server answers by ending its own children; kill what is left over."""
    if child.poll() is None:
        child.terminate()
        _wait_for_descendants(child, TERMINATE_GRACE_S)
    # A dying process may still start another one: look again until nobody is left.
    while survivors := _wait_for_descendants(child, 0.0):
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_for_descendants(child, 1.0)


def _wait_for_descendants(child: subprocess.Popen[bytes], timeout_s: float) -> list[psutil.Process]:
    """Reap until no descendant is left or the time is over; returns those still there."""
    deadline = time.monotonic() + timeout_s
    while True:
        child.poll()  # before the reaping of orphans below, which would swallow its exit status
        if child.returncode is not None:
            _reap_orphans()
        descendants: list[psutil.Process] = psutil.Process().children(recursive=True)
        if not descendants or time.monotonic() >= deadline:
            return descendants
        time.sleep(0.05)


def _reap_orphans() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def _lifeline_broken(timeout_s: float) -> bool:
    readable, _, _ = select.select([0], [], [], timeout_s)
    return bool(readable) and os.read(0, 1) == b""


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:
    sys.exit(128 + signal_number)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    status = run(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)
