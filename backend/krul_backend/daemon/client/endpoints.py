"""Finds the daemon that a store or a command means, and reads the keys for one that is asked over TCP."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq.auth

from krul_backend.daemon.protocol.runtime_dir import CONTROL_SOCKET, SESSION_SOCKET, check_private
from krul_backend.errors import ConfigError, DaemonError

DIRECTORY_PATTERN = "krul-*"
_CONNECT_TIMEOUT_S = 1.0

CLIENT_KEY = "client.key_secret"
SERVER_PUBLIC_KEY = "server.key"
"""In the directory of CURVE keys that an operator names."""


def runtime_dir_of(endpoint: str | Path) -> Path:
    """The runtime directory that an endpoint means: the directory itself, or ``ipc://<dir>/control.sock``.

    Raises:
        DaemonError: the endpoint names no directory; that of TCP does not.
    """
    text = str(endpoint)
    if "://" not in text:
        return Path(text)
    path = Path(text.removeprefix("ipc://"))
    if not text.startswith("ipc://") or path.name != CONTROL_SOCKET:
        raise DaemonError(
            f"{text} shares no memory: give the daemon's runtime directory, or ipc://<directory>/{CONTROL_SOCKET}"
        )
    return path.parent


def default_parents() -> tuple[Path, ...]:
    """Where runtime directories are looked for: the user's own place, if there is one, and ``/tmp``."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(given), Path("/tmp")) if given else (Path("/tmp"),)


def find_runtime_dirs(parents: Sequence[Path] | None = None) -> list[Path]:
    """Runtime directories of this user in which a daemon listens, sorted.

    Left out are links, directories of others or that others may enter, and those that a daemon left behind.
    """
    parents = default_parents() if parents is None else parents
    found = {path.absolute() for parent in parents for path in parent.glob(DIRECTORY_PATTERN)}
    return sorted(path for path in found if _is_private(path) and _is_served(path))


def resolve_endpoint(endpoint: str | None, parents: Sequence[Path] | None = None) -> str:
    """``endpoint`` as it was given, or the directory of the only daemon that runs.

    Raises:
        DaemonError: no endpoint was given, and no daemon runs, or several do (the message names them).
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


@dataclass(frozen=True)
class CurveKeys:
    """Z85 text of 40 characters each: the client's own pair, and the public key of the server to trust."""

    public: bytes
    secret: bytes
    server: bytes


def load_client_keys(curve_dir: Path) -> CurveKeys:
    """The client's own pair and the server's public key, from the directory that ``--curve-dir`` names.

    Raises:
        ConfigError: a file is missing, is no certificate, lacks the secret key, or lets others read it.
    """
    client_path, server_path = curve_dir / CLIENT_KEY, curve_dir / SERVER_PUBLIC_KEY
    try:
        public, secret = zmq.auth.load_certificate(client_path)
        server, _ = zmq.auth.load_certificate(server_path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"CURVE keys {client_path}, {server_path} cannot be read: {error}") from error
    if secret is None:
        raise ConfigError(f"{client_path} has no secret key: expected the client's *.key_secret")
    if client_path.stat().st_mode & 0o077:
        raise ConfigError(f"curve_dir: {client_path} can be read by others: chmod 0600 it")
    return CurveKeys(public, secret, server)


def _is_private(path: Path) -> bool:
    try:
        check_private(path)
    except (DaemonError, OSError):
        return False
    return True


def _is_served(path: Path) -> bool:
    """Whether a process listens there: a socket that was left behind refuses connections."""
    if not (path / CONTROL_SOCKET).exists():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(str(path / SESSION_SOCKET))
        except OSError:
            return False
    return True
