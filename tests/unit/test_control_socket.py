from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

from krul_backend.daemon.server.control_socket import AdminEndpoint, bind_router
from krul_backend.errors import ConfigError, DaemonError


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


def make_keys(path: Path) -> Path:
    (path / "clients").mkdir()
    zmq.auth.create_certificates(path, "server")
    (path / "server.key_secret").chmod(0o600)
    zmq.auth.create_certificates(path, "friend")
    (path / "friend.key").rename(path / "clients" / "friend.key")
    return path


def remove_key(path: Path) -> None:
    (path / "server.key_secret").unlink()


def show_key(path: Path) -> None:
    (path / "server.key_secret").chmod(0o640)


def keep_public_part(path: Path) -> None:
    public = (path / "server.key").read_text()
    (path / "server.key_secret").write_text(public)


def damage_key(path: Path) -> None:
    (path / "server.key_secret").write_text("no key\n")


def remove_clients(path: Path) -> None:
    (path / "clients" / "friend.key").unlink()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (remove_key, "cannot be read"),
        (show_key, "chmod 0600"),
        (keep_public_part, "no secret key"),
        (damage_key, "cannot be read"),
        (remove_clients, "no *.key file"),
    ],
)
def test_a_tcp_endpoint_without_its_keys_is_refused(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], spoil: Callable[[Path], None], said: str
) -> None:
    keys = make_keys(tmp_path)
    spoil(keys)
    with pytest.raises(ConfigError) as caught:
        AdminEndpoint(context, "tcp://127.0.0.1:*", keys)
    assert str(caught.value).startswith("curve_dir: ")
    assert said in str(caught.value)


def test_a_tcp_endpoint_has_curve(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    endpoint = AdminEndpoint(context, "tcp://127.0.0.1:*", make_keys(tmp_path))
    assert endpoint.socket.getsockopt(zmq.MECHANISM) == zmq.CURVE
    endpoint.close()


def test_an_address_in_use_says_so(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    first = AdminEndpoint(context, "tcp://127.0.0.1:*", make_keys(tmp_path))
    address = first.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(DaemonError, match=f"cannot serve on {address}: Address already in use"):
        bind_router(context, address)
    first.close()


def test_a_private_socket_is_bound(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    socket = bind_router(context, f"ipc://{tmp_path / 'control.sock'}")
    assert stat.S_ISSOCK((tmp_path / "control.sock").stat().st_mode)
    socket.close()
