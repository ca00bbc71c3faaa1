"""The sockets at which requests arrive: a private one, and one over TCP for clients with a key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from krul_backend.daemon.protocol.messages import MAX_FRAME_BYTES
from krul_backend.errors import ConfigError, DaemonError

SERVER_KEY = "server.key_secret"
CLIENT_KEYS = "clients"
"""In the directory of CURVE keys: the server's own pair; the public keys of the clients that are allowed."""

_MAX_WAITING_REQUESTS = 128
_MAX_WAITING_REPLIES = 1024


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    configure: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
) -> zmq.Socket[bytes]:
    """Bind a ROUTER with bounded queues and frames; ``configure`` is called before.

    Raises:
        DaemonError: it cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, _MAX_WAITING_REQUESTS)
        socket.setsockopt(zmq.SNDHWM, _MAX_WAITING_REPLIES)
        socket.setsockopt(zmq.LINGER, 0)
        configure(socket)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise DaemonError(f"cannot serve on {endpoint}: {error}") from error
    return socket


class AdminEndpoint:
    """A ROUTER over TCP that answers only peers with an allowed CURVE key.

    Args:
        curve_dir: has ``server.key_secret``, and ``clients/`` with a ``*.key`` file per allowed client, as
            ``zmq.auth.create_certificates`` writes them. It is read once.

    Raises:
        ConfigError: a key is missing, cannot be read, or others can read the secret one.
        DaemonError: the endpoint cannot be bound.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve_dir: Path) -> None:
        public, secret = _server_keys(curve_dir / SERVER_KEY)
        clients = curve_dir / CLIENT_KEYS
        if not any(clients.glob("*.key")):
            raise ConfigError(f"curve_dir: got {str(curve_dir)!r}, in which {CLIENT_KEYS}/ has no *.key file")
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()

        def require_key(socket: zmq.Socket[bytes]) -> None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

        try:
            self._authenticator.configure_curve(domain="*", location=clients)
            self.socket = bind_router(context, endpoint, require_key)
        except BaseException:
            self._authenticator.stop()
            raise

    def close(self) -> None:
        self.socket.close()
        self._authenticator.stop()


def _server_keys(path: Path) -> tuple[bytes, bytes]:
    try:
        if os.stat(path).st_mode & 0o077:
            raise ConfigError(f"curve_dir: {path} can be read by others: chmod 0600 it")
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"curve_dir: the server's key {path} cannot be read: {error}") from error
    if secret is None:
        raise ConfigError(f"curve_dir: {path} has no secret key: zmq.auth.create_certificates writes one")
    return public, secret
