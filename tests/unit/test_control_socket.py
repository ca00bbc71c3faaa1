"""The socket at which a daemon's requests arrive."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from krul_backend.daemon.server.control_socket import bind_router
from krul_backend.errors import DaemonError


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


def test_an_address_in_use_says_so(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    first = bind_router(context, "tcp://127.0.0.1:*")
    address = first.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(DaemonError, match=f"cannot serve on {address}: Address already in use"):
        bind_router(context, address)
    first.close()


def test_a_private_socket_is_bound(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    socket = bind_router(context, f"ipc://{tmp_path / 'control.sock'}")
    assert stat.S_ISSOCK((tmp_path / "control.sock").stat().st_mode)
    socket.close()
