from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.client_session import ClientSession
from krul_backend.daemon.protocol import runtime_dir
from krul_backend.daemon.protocol.runtime_dir import (
    MAX_SOCKET_PATH_BYTES,
    RuntimeDir,
    check_private,
    check_socket_path,
)
from krul_backend.errors import DaemonError, DaemonUnreachableError


def test_it_is_made_private_and_lets_go_when_closed(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    held = RuntimeDir(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    held.socket_path.touch()
    held.close()
    assert [entry.name for entry in path.iterdir()] == ["daemon.lock"]
    RuntimeDir(path).close()


def test_two_daemons_never_share_one(tmp_path: Path) -> None:
    path = tmp_path / "run"
    held = RuntimeDir(path)
    held.socket_path.touch()
    with pytest.raises(DaemonError, match=rf"in use by another daemon \(process {os.getpid()}\)"):
        RuntimeDir(path)
    assert held.socket_path.exists(), "the loser must not remove the winner's socket"
    held.close()


def test_sockets_that_were_left_behind_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path / "daemon.sock"))
    (path / "other").touch()
    held = RuntimeDir(path)
    assert not held.socket_path.exists()
    assert (path / "other").exists()
    held.close()


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o777])
def test_one_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(DaemonError, match=f"mode {mode:04o}"):
        RuntimeDir(path)


def test_a_link_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    with pytest.raises(DaemonError, match="a link or no directory"):
        RuntimeDir(tmp_path / "link")
    with pytest.raises(DaemonError, match="cannot be a runtime directory"):
        RuntimeDir(tmp_path / "file")


def test_one_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    check_private(path)
    other = os.geteuid() + 1
    monkeypatch.setattr(runtime_dir.os, "geteuid", lambda: other)
    with pytest.raises(DaemonError, match=f"this is user {other}"):
        check_private(path)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Path]:
    """A runtime directory in which somebody listens."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "daemon.sock"))
        listener.listen()
        yield path


CONNECT = {"engine": lambda path: ClientSession(path, timeout_s=0.05), "command line": AdminClient}


@pytest.mark.parametrize("connect", CONNECT.values(), ids=CONNECT)
def test_a_client_connects_to_no_directory_that_others_may_enter(
    served: Path, connect: Callable[[Path], object]
) -> None:
    served.chmod(0o710)
    with pytest.raises(DaemonError, match="mode 0710, so others may enter it"):
        connect(served)


@pytest.mark.parametrize("connect", CONNECT.values(), ids=CONNECT)
def test_a_client_follows_no_link(served: Path, connect: Callable[[Path], object]) -> None:
    link = served.parent / "link"
    link.symlink_to(served)
    with pytest.raises(DaemonError, match="a link or no directory"):
        connect(link)


@pytest.mark.parametrize("connect", CONNECT.values(), ids=CONNECT)
def test_a_client_asks_no_socket_of_another_user(
    served: Path, connect: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    lstat = os.lstat

    def of_another(path: Path) -> os.stat_result:
        status = lstat(path)
        if Path(path).name != "daemon.sock":
            return status
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:]))

    monkeypatch.setattr(runtime_dir.os, "lstat", of_another)
    with pytest.raises(DaemonError, match=rf"daemon\.sock belongs to user {os.geteuid() + 1}"):
        connect(served)


@pytest.mark.parametrize("connect", CONNECT.values(), ids=CONNECT)
def test_a_client_opens_nothing_but_sockets(served: Path, connect: Callable[[Path], object]) -> None:
    (served / "daemon.sock").unlink()
    with pytest.raises(DaemonUnreachableError, match="no krul daemon serves"):
        connect(served)
    (served / "daemon.sock").touch()
    with pytest.raises(DaemonError, match="is no socket"):
        connect(served)


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Following it would truncate a file of somebody's choice."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (path / "daemon.lock").symlink_to(victim)
    with pytest.raises(DaemonError, match="cannot be a runtime directory"):
        RuntimeDir(path)
    assert victim.read_text() == "precious"


def test_a_path_too_long_for_a_socket_says_so() -> None:
    room = MAX_SOCKET_PATH_BYTES - len("/") - len("daemon.sock")
    check_socket_path(Path("/" + "d" * (room - 1)))
    with pytest.raises(DaemonError, match=r"108 bytes.*choose a shorter runtime directory"):
        check_socket_path(Path("/" + "d" * room))
    with pytest.raises(DaemonError, match="choose a shorter"):
        check_socket_path(Path("/" + "é" * (room // 2 + 1)))


def test_the_longest_path_can_be_bound(tmp_path: Path) -> None:
    room = MAX_SOCKET_PATH_BYTES - len("/daemon.sock") - len(str(tmp_path)) - 1
    held = RuntimeDir(tmp_path / ("d" * room))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(held.socket_path))
        assert held.socket_path.is_socket()
    held.close()
