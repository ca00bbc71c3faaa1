"""One daemon, many cases; it must go on answering, and hold nothing for anybody at the end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.client_session import ClientSession
from krul_backend.daemon.protocol.frames import pack
from krul_backend.daemon.protocol.messages import MAX_FRAME_BYTES
from krul_backend.daemon.protocol.runtime_dir import SOCKET_NAME
from tests.fuzz.messages import Message, messages

_MAX_ANSWER_S = 5.0
_MAX_GROWTH_BYTES = 300 << 20
_CASES_PER_PING = 50


class Fuzzer:
    """Sends messages as a client with a session does, and bytes that are none."""

    def __init__(self, runtime_dir: Path, pid: int) -> None:
        self._runtime_dir = runtime_dir
        self._process = psutil.Process(pid)
        self._rss_bytes = self._process.memory_info().rss
        self._session = ClientSession(runtime_dir)
        self._requests = self._connect()
        self._admin = AdminClient(runtime_dir)
        self._num_cases = 0

    def send(self, message: Message) -> None:
        try:
            self._requests.sendall(pack(*message))
        except ConnectionError:
            # The daemon ended it: something came that it cannot answer.
            self._requests.close()
            self._requests = self._connect()
            self._requests.sendall(pack(*message))
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._requests.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        self._count()

    def speak(self, noise: bytes) -> None:
        """Bytes that are no messages, or not whole."""
        with self._connect() as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(noise)
        self._count()

    def send_too_much(self) -> None:
        """More than what is read: the connection ends, the daemon does not."""
        with self._connect() as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little") + bytes(MAX_FRAME_BYTES + 5))
        self._check_alive()

    def end(self) -> None:
        """Leave, and look at what is left.

        Raises:
            AssertionError: the daemon holds something for nobody, or much memory.
        """
        self._requests.close()
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

    @property
    def token(self) -> str:
        return self._session.token

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self._runtime_dir / SOCKET_NAME))
        return connection

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
        strategy: st.SearchStrategy[Message] | st.SearchStrategy[bytes], send: Callable[..., None]
    ) -> None:
        @options
        @given(strategy)
        def run(case: object) -> None:
            send(case)

        run()

    fuzz(messages(fuzzer.token), fuzzer.send)
    options = settings(options, max_examples=max(1, num_cases // 20))
    fuzz(st.binary(max_size=5000), fuzzer.speak)
    fuzzer.send_too_much()
    fuzzer.end()
