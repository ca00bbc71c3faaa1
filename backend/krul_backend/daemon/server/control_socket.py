"""The socket at which requests arrive."""

from __future__ import annotations

import zmq

from krul_backend.daemon.protocol.messages import MAX_FRAME_BYTES
from krul_backend.errors import DaemonError

_MAX_WAITING_REQUESTS = 128
_MAX_WAITING_REPLIES = 1024


def bind_router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """Bind a ROUTER with bounded queues and frames.

    Raises:
        DaemonError: it cannot be bound.
    """
    socket = context.socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, _MAX_WAITING_REQUESTS)
        socket.setsockopt(zmq.SNDHWM, _MAX_WAITING_REPLIES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise DaemonError(f"cannot serve on {endpoint}: {error}") from error
    return socket
