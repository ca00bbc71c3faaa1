"""The keys with which an operator's command line asks a daemon over TCP."""

from __future__ import annotations

from pathlib import Path

import zmq.auth

from krul_backend.daemon.request_channel import CurveKeys
from krul_backend.errors import ConfigError

CLIENT_KEY = "client.key_secret"
SERVER_PUBLIC_KEY = "server.key"


def load_client_keys(curve_dir: Path) -> CurveKeys:
    """The client's own pair and the server's public key, as ``zmq.auth.create_certificates`` writes them.

    Raises:
        ConfigError: a file is missing, is no certificate, lacks the secret key, or lets others read it.
    """
    path = curve_dir / CLIENT_KEY
    public, secret = _load(path)
    if secret is None:
        raise ConfigError(f"curve_dir: {path} has no secret key: zmq.auth.create_certificates writes one")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"curve_dir: {path} can be read by others: chmod 0600 it")
    server, _ = _load(curve_dir / SERVER_PUBLIC_KEY)
    return CurveKeys(public=public, secret=secret, server=server)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"curve_dir: the key {path} cannot be read: {error}") from error
