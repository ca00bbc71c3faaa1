"""One daemon, many cases; it must go on answering, and hold nothing for anybody at the end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.client_session import ClientSession
from krul_backend.daemon.protocol.messages import MAX_FRAME_BYTES
from krul_backend.daemon.protocol.runtime_dir import CONTROL_SOCKET, SESSION_SOCKET
from tests.fuzz.messages import Frames, frames

_MAX_ANSWER_S = 5.0
_MAX_GROWTH_BYTES = 300 << 20
_CASES_PER_PING = 50


class Fuzzer:
    """Sends on a control socket as a client with a session, and on session sockets."""

    def __init__(self, runtime_dir: Path, pid: int) -> None:
        self._runtime_dir = runtime_dir
        self._process = psutil.Process(pid)
        self._rss_bytes = self._process.memory_info().rss
        self._context = zmq.Context()
        self._session = ClientSession(runtime_dir)
        self._dealer = self._connect()
        self._admin = AdminClient(runtime_dir)
        self._num_cases = 0

    def send(self, message: Frames) -> None:
        self._dealer.send_multipart(message)
        with contextlib.suppress(zmq.Again):
            while True:
                self._dealer.recv_multipart(zmq.NOBLOCK)
        self._count()

    def greet(self, noise: bytes) -> None:
        """Talk to the session socket, which nobody is to do."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(str(self._runtime_dir / SESSION_SOCKET))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(noise)
        self._count()

    def send_too_much(self) -> None:
        """One frame beyond what is read: the connection may end, the daemon not."""
        self._dealer.send_multipart([bytes(MAX_FRAME_BYTES + 1)])
        self._check_alive()
        self._dealer.close(linger=0)
        self._dealer = self._connect()

    def end(self) -> None:
        """Leave, and look at what is left.

        Raises:
            AssertionError: the daemon holds something for nobody, or much memory.
        """
        self._dealer.close(linger=0)
        self._session.close()
        deadline_s = time.monotonic() + _MAX_ANSWER_S
        while True:
            stats, _ = self._admin.stats()
            if not stats.num_leases and not stats.num_reservations:
                break
            assert time.monotonic() < deadline_s, f"held for nobody: {stats}"
            time.sleep(0.1)
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
        grown = self._process.memory_info().rss - self._rss_bytes
        # The arena's own pages are counted once they are written.
        assert grown < _MAX_GROWTH_BYTES + stats.capacity_bytes, f"{grown} bytes more than before"
        self._admin.close()
        self._context.term()

    @property
    def token(self) -> str:
        return self._session.token

    def _connect(self) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.connect(f"ipc://{self._runtime_dir / CONTROL_SOCKET}")
        return dealer

    def _count(self) -> None:
        self._num_cases += 1
        if self._num_cases % _CASES_PER_PING == 0:
            self._check_alive()

    def _check_alive(self) -> None:
        start_s = time.monotonic()
        self._admin.ping()
        assert time.monotonic() - start_s < _MAX_ANSWER_S


def run_cases(runtime_dir: Path, pid: int, num_cases: int) -> None:
    """Raises AssertionError, or an error of the connection, if the daemon did not stand it."""
    fuzzer = Fuzzer(runtime_dir, pid)
    options = settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def fuzz(
        strategy: st.SearchStrategy[Frames] | st.SearchStrategy[bytes], send: Callable[..., None]
    ) -> None:
        @options
        @given(strategy)
        def run(case: object) -> None:
            send(case)

        run()

    fuzz(frames(fuzzer.token), fuzzer.send)
    options = settings(options, max_examples=max(1, num_cases // 20))
    fuzz(st.binary(max_size=5000), fuzzer.greet)
    fuzzer.send_too_much()
    fuzzer.end()
