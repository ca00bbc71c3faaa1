"""The keys with which an operator's command line asks a daemon over TCP."""

from __future__ import annotations

from pathlib import Path

from krul_backend.daemon.client.request_channel import CurveKeys
from krul_backend.errors import ConfigError

CLIENT_KEY = "client.key_secret"
SERVER_PUBLIC_KEY = "server.key"


def load_client_keys(curve_dir: Path) -> CurveKeys:
    """The client's own pair and the server's public key, from the directory that ``--curve-dir`` names.

    Raises:
        ConfigError: a file is missing, is no certificate, lacks the secret key, or lets others read it.
    """
    secret = curve_dir / CLIENT_KEY
    keys = CurveKeys.read(secret, curve_dir / SERVER_PUBLIC_KEY)
    if secret.stat().st_mode & 0o077:
        raise ConfigError(f"curve_dir: {secret} can be read by others: chmod 0600 it")
    return keys
