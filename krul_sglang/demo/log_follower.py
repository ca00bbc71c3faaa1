"""Shows a server's log while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from krul_sglang.demo.server import ServerProcess

_POLL_INTERVAL_S = 0.3


class LogFollower:
    """Calls ``on_line`` for each line that the server prints, from a thread, until it leaves the context."""

    def __init__(self, server: ServerProcess, on_line: Callable[[str], None]) -> None:
        self._server = server
        self._on_line = on_line
        self._num_lines_seen = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="krul-log-follower", daemon=True)

    def __enter__(self) -> LogFollower:
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(_POLL_INTERVAL_S):
            # The last piece has no newline yet: it may still grow.
            *lines, _ = self._server.log_text().split("\n")
            for line in lines[self._num_lines_seen :]:
                self._on_line(line)
            self._num_lines_seen = max(self._num_lines_seen, len(lines))
