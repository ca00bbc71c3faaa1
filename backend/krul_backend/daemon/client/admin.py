"""Asks a daemon on behalf of the command line: what it holds, and whether that is undamaged."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import zmq

from krul_backend.daemon.client.endpoints import CurveKeys, runtime_dir_of
from krul_backend.daemon.client.request_channel import RequestChannels
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
from krul_backend.daemon.protocol.runtime_dir import CONTROL_SOCKET, check_served
from krul_backend.errors import DaemonError
from krul_backend.tiers.common.interface import DamageReport, SegmentDetails, SegmentInfo, StoreStats


class AdminClient:
    """Asks a daemon without a session, over its runtime directory or a TCP endpoint. Maps no memory of it.

    All methods raise DaemonError: DaemonUnreachableError if no answer comes in time (over TCP also if the
    daemon does not know the keys).

    Args:
        endpoint: the runtime directory, ``ipc://<directory>/control.sock`` or ``tcp://<host>:<port>``.
        curve: for TCP, which is refused without.
        timeout_s: how long to wait for each answer; ``verify`` and ``flush`` have their own.

    Raises:
        DaemonUnreachableError: no daemon was ever there.
        DaemonError: an endpoint of another kind, TCP without keys, or a directory that is not this user's
            alone.
    """

    def __init__(
        self, endpoint: str | Path, *, curve: CurveKeys | None = None, timeout_s: float = 5.0
    ) -> None:
        address = str(endpoint)
        if address.startswith("tcp://"):
            if curve is None:
                raise DaemonError(f"{address}: over TCP a daemon answers only to CURVE keys")
        else:
            runtime_dir = runtime_dir_of(endpoint)
            check_served(runtime_dir)
            address, curve = f"ipc://{runtime_dir / CONTROL_SOCKET}", None
        self._timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channels = RequestChannels(self._context, address, curve=curve)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ping(self) -> None:
        """Return when the daemon has answered."""
        self._ask(PingRequest())

    def stats(self) -> tuple[StoreStats, DaemonStats]:
        """The statistics of the store, and of the daemon around it."""
        return self._ask(StatsRequest())

    def list_segments(self) -> list[SegmentInfo]:
        """All segments, ordered by id.

        More than ``MAX_LISTED_SEGMENTS`` come in several replies; the store may have changed between them.
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
        self._context.destroy(linger=0)
