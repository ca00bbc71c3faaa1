"""Which daemon a command means: the one that was named, or the only one of this user that runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from krul_backend.daemon.protocol.messages import CONTROL_SOCKET, SESSION_SOCKET
from krul_backend.daemon.protocol.runtime_dir import check_private
from krul_backend.errors import DaemonError

DIRECTORY_PATTERN = "krul-*"
_CONNECT_TIMEOUT_S = 1.0


def default_parents() -> tuple[Path, ...]:
    """Where runtime directories are looked for: the user's own place, if there is one, and ``/tmp``."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(given), Path("/tmp")) if given else (Path("/tmp"),)


def find_runtime_dirs(parents: Sequence[Path] | None = None) -> list[Path]:
    """Runtime directories of this user in which a daemon listens, sorted.

    A directory of somebody else, one that others may enter, a link, or one that a daemon left behind is none
    of them.
    """
    parents = default_parents() if parents is None else parents
    found = {path.absolute() for parent in parents for path in parent.glob(DIRECTORY_PATTERN)}
    return sorted(path for path in found if _is_private(path) and _is_served(path))


def resolve_endpoint(endpoint: str | None, parents: Sequence[Path] | None = None) -> str:
    """``endpoint`` as it was given, or the directory of the only daemon that runs.

    Raises:
        DaemonError: none was given, and none runs or several do; names them.
    """
    if endpoint is not None:
        return endpoint
    parents = default_parents() if parents is None else parents
    found = find_runtime_dirs(parents)
    if len(found) == 1:
        return str(found[0])
    if not found:
        places = " or ".join(str(parent / DIRECTORY_PATTERN) for parent in parents)
        raise DaemonError(
            f"no krul daemon of this user listens in {places}; give --endpoint with its runtime directory"
        )
    raise DaemonError(
        f"{len(found)} krul daemons run: choose one with --endpoint, out of "
        + ", ".join(str(path) for path in found)
    )


def _is_private(path: Path) -> bool:
    try:
        check_private(path)
    except (DaemonError, OSError):
        return False
    return True


def _is_served(path: Path) -> bool:
    """A socket that is left behind refuses; only a process that listens does not."""
    if not (path / CONTROL_SOCKET).exists():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path / SESSION_SOCKET))
        except OSError:
            return False
    return True
