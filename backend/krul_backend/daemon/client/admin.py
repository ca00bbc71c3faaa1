"""Finds the daemon that a command means, and asks it: what it holds, and whether that is undamaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from krul_backend.daemon.client.request_channel import RequestChannels, connect_to_daemon
from krul_backend.daemon.protocol.messages import (
    DaemonStats,
    FlushRequest,
    InspectRequest,
    ListRequest,
    PingRequest,
    R,
    Request,
    ShutdownRequest,
    StatsRequest,
    VerifyRequest,
)
from krul_backend.daemon.protocol.runtime_dir import check_served, runtime_dir_of
from krul_backend.errors import DaemonError
from krul_backend.tiers.common.interface import DamageReport, SegmentDetails, SegmentInfo, StoreStats

DIRECTORY_PATTERN = "krul-*"
_CONNECT_TIMEOUT_S = 1.0


class AdminClient:
    """Asks a daemon without a session, over its runtime directory. Maps no memory of it.

    All methods raise DaemonError: DaemonUnreachableError if no answer comes in time.

    Args:
        endpoint: the runtime directory, or ``ipc://<directory>/daemon.sock``.
        timeout_s: how long to wait for each answer; ``verify`` and ``flush`` have their own.

    Raises:
        DaemonUnreachableError: no daemon was ever there.
        DaemonError: an endpoint of another kind, or a directory that is not this user's alone.
    """

    def __init__(self, endpoint: str | Path, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._channels = RequestChannels(check_served(runtime_dir_of(endpoint)))

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ping(self) -> None:
        """Return when the daemon has answered."""
        self._ask(PingRequest())

    def stats(self) -> tuple[StoreStats, DaemonStats]:
        """The statistics of the store, and of the daemon around it."""
        return self._ask(StatsRequest())

    def list_segments(self) -> list[SegmentInfo]:
        """All segments, ordered by id.

        More than ``MAX_LISTED_SEGMENTS`` come in several replies: parts of one list, if nobody else lists.
        """
        segments: list[SegmentInfo] = []
        while True:
            more, num_segments = self._ask(ListRequest(offset=len(segments)))
            segments += more
            if not more or len(segments) >= num_segments:
                return segments

    def inspect(self, segment_id: int) -> SegmentDetails | None:
        """One segment, or None if there is none of this id."""
        return self._ask(InspectRequest(segment_id=segment_id))

    def verify(self, timeout_s: float = 3600.0) -> DamageReport:
        """Have the daemon read every block of its local tiers. A ping before shows that it does not hang."""
        self.ping()
        return self._channels.ask(VerifyRequest(), timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything committed before is durable; False if it takes longer than ``timeout_s``."""
        self.ping()
        return self._channels.ask(FlushRequest(timeout_s=timeout_s), timeout_s + self._timeout_s)

    def shutdown(self) -> None:
        """Have the daemon flush and end; it may still be flushing when this returns."""
        self._ask(ShutdownRequest())

    def _ask(self, request: Request[R]) -> R:
        return self._channels.ask(request, self._timeout_s)

    def close(self) -> None:
        self._channels.close()


def default_parents() -> tuple[Path, ...]:
    """Where runtime directories are looked for: the user's own place, if there is one, and ``/tmp``."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(given), Path("/tmp")) if given else (Path("/tmp"),)


def find_runtime_dirs(parents: Sequence[Path] | None = None) -> list[Path]:
    """Runtime directories of this user in which a daemon listens, sorted.

    Left out are links, directories of others or that others may enter, and those that a daemon left behind.
    """
    parents = default_parents() if parents is None else parents
    found = {path.absolute() for parent in parents for path in parent.glob(DIRECTORY_PATTERN)}
    return sorted(path for path in found if _is_served(path))


def resolve_endpoint(endpoint: str | None, parents: Sequence[Path] | None = None) -> str:
    """``endpoint`` as it was given, or the directory of the only daemon that runs.

    Raises:
        DaemonError: no endpoint was given, and no daemon runs, or several do (the message names them).
    """
    if endpoint is not None:
        return endpoint
    parents = default_parents() if parents is None else parents
    found = find_runtime_dirs(parents)
    if len(found) == 1:
        return str(found[0])
    if not found:
        places = " or ".join(str(parent / DIRECTORY_PATTERN) for parent in parents)
        raise DaemonError(
            f"no krul daemon of this user listens in {places}; give --endpoint with its runtime directory"
        )
    raise DaemonError(
        f"{len(found)} krul daemons run: choose one with --endpoint, out of "
        + ", ".join(str(path) for path in found)
    )


def _is_served(path: Path) -> bool:
    """Return whether a daemon of this user listens there (a socket left behind refuses connections)."""
    try:
        connect_to_daemon(check_served(path), _CONNECT_TIMEOUT_S).close()
    except (DaemonError, OSError):
        return False
    return True
