"""The client's end of a session: the connection that keeps it open, views of the arena, and requests."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from operator import add
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from krul_backend.daemon.client.request_channel import RequestChannels, SessionEndedError, connect_to_daemon
from krul_backend.daemon.protocol.frames import Inbox, decode_reply, encode, pack
from krul_backend.daemon.protocol.messages import (
    EXCEPTIONS,
    MAX_MODELS,
    ErrorReply,
    HelloRequest,
    OpenRequest,
    R,
    Request,
    SessionGreeting,
)
from krul_backend.daemon.protocol.runtime_dir import check_served, check_socket_path
from krul_backend.errors import DaemonUnreachableError, ProtocolError
from krul_backend.memory import map_shared
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, TokenIds
from krul_backend.tiers.common.interface import DRAM_TIER, Block, LayerStatus, SegmentSlice, Span
from krul_backend.tiers.common.page_filter import PageFilter

ArenaBytes = npt.NDArray[np.uint8]


def view_in(arena: ArenaBytes, span: Span) -> Block:
    """The bytes of a span, uint8 ``[num_bytes]``, writable, without a copy; it keeps the mapping alive.

    Raises:
        ProtocolError: there are no such bytes in the arena.
    """
    if not 0 <= span.offset <= span.offset + span.num_bytes <= arena.nbytes:
        raise ProtocolError(f"{span} is not within an arena of {arena.nbytes} bytes")
    return arena[span.offset : span.offset + span.num_bytes]


class ArenaBlocks(Sequence[Block]):
    """The blocks of a slice, uint8 ``[num_bytes]`` each, as views that are made when they are asked for.

    A lookup names hundreds of blocks, and its holder may use none of them.

    Args:
        arena: its views are as writable as it is.
        spans: within the arena.
    """

    __slots__ = ("_arena", "_spans")

    def __init__(self, arena: ArenaBytes, spans: tuple[Span, ...]) -> None:
        self._arena = arena
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, index: int | slice) -> Block | tuple[Block, ...]:
        if isinstance(index, slice):
            return tuple(self._arena[offset : offset + size] for offset, size in self._spans[index])
        offset, num_bytes = self._spans[index]
        return self._arena[offset : offset + num_bytes]


def with_views(slices: Sequence[SegmentSlice], arena: ArenaBytes) -> tuple[SegmentSlice, ...]:
    """The slices of a reply with read-only views of their blocks, and of the status of layers still to land.

    Raises:
        ProtocolError: the parts of a slice contradict each other, or lie outside the arena.
    """
    read_only = arena.view()
    read_only.flags.writeable = False
    return tuple(_with_views(part, read_only) for part in slices)


def _with_views(part: SegmentSlice, arena: ArenaBytes) -> SegmentSlice:
    num_layers = len(part.header.layer_num_bytes)
    if len(part.checksums) != num_layers or not 0 <= part.first_page < part.end_page:
        raise ProtocolError(
            f"segment {part.segment_id}: {len(part.checksums)} checksums for {num_layers} layers, "
            f"pages {part.first_page} to {part.end_page}"
        )
    if part.spans or part.tier == DRAM_TIER:
        offsets, sizes = zip(*part.spans, strict=True) if part.spans else ((), ())
        if sizes != part.header.layer_num_bytes:
            raise ProtocolError(
                f"segment {part.segment_id}: {part.spans} for {part.header.layer_num_bytes} bytes"
            )
        ends = map(add, offsets, sizes)
        if sizes and not (min(offsets) >= 0 and min(sizes) >= 0 and max(ends) <= arena.nbytes):
            raise ProtocolError(
                f"segment {part.segment_id}: {part.spans} are not all within an arena of {arena.nbytes} bytes"
            )
    status = None
    if part.status_span is not None:
        if part.status_span.num_bytes != num_layers:
            raise ProtocolError(
                f"segment {part.segment_id}: {part.status_span} for {num_layers} layers' status"
            )
        status = LayerStatus(view_in(arena, part.status_span))
    return part.with_views(ArenaBlocks(arena, part.spans), status)


_DESCRIPTOR, _DESCRIPTORS = struct.Struct("i"), struct.Struct("2i")


class ClientSession:
    """A session with a daemon. It lasts until ``close`` or until the daemon is gone.

    ``arena`` is the daemon's memory, uint8 ``[capacity_bytes]``, mapped shared and writable. It stays mapped
    as long as it, or a view of it, is referenced, so that a copy under way can finish even if the session or
    the daemon ends. ``page_filter`` has what the daemon may have; None if it does not say.
    ``channels`` send its requests, over connections of their own; they are closed when it ends.

    Args:
        runtime_dir: where the daemon serves.
        timeout_s: for connecting and for the daemon's greeting.
        on_end: called once, in a thread of the session, when the daemon is gone; not after ``close``.

    Raises:
        DaemonUnreachableError: nothing answers there.
        DaemonError: a process of another user answers there, or could: see ``check_served``; or the path is
            too long for a socket.
        ProtocolError: what answers is not a daemon of this protocol.
    """

    def __init__(
        self,
        runtime_dir: Path,
        *,
        timeout_s: float = 5.0,
        on_end: Callable[[ClientSession], None] | None = None,
    ) -> None:
        check_socket_path(runtime_dir)
        path = check_served(runtime_dir)
        self._on_end = on_end
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        try:
            self._socket = connect_to_daemon(path, timeout_s)
        except OSError as error:
            raise DaemonUnreachableError(f"no krul daemon answers at {path}: {error}") from error
        try:
            self.greeting, descriptors = _open(self._socket, path)
            try:
                self.arena = _map_arena(descriptors[0], self.greeting.capacity_bytes)
                self.page_filter = PageFilter(descriptors[1]) if descriptors[1:] else None
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._socket.settimeout(None)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise DaemonUnreachableError(f"no krul daemon answers at {path}: {error}") from error
        except BaseException:
            self._socket.close()
            raise
        self.channels = RequestChannels(path, self.token)
        self._watcher = threading.Thread(target=self._watch, name="krul-session", daemon=True)
        self._watcher.start()

    @property
    def token(self) -> str:
        """Names the session in every request."""
        return self.greeting.token

    @property
    def is_alive(self) -> bool:
        """Whether the connection lasts. A daemon that hangs still keeps it open."""
        return not self._is_over.is_set()

    def close(self) -> None:
        """End the session: the daemon takes back all that it granted. May be called again."""
        with self._lock:
            self._on_end = None
        self._is_over.set()
        # This wakes the watcher, which then closes the descriptor. If it were closed here, the watcher might
        # read from another file of the same number. The kernel refuses if the daemon's end is closed already.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.channels.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()

    def _watch(self) -> None:
        # Nothing is asked here after the greeting: only the connection's end matters.
        with self._socket, contextlib.suppress(OSError):
            while self._socket.recv(4096):
                pass
        self._is_over.set()
        self.channels.close()
        with self._lock:
            on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)


class DaemonConnection:
    """One session with a daemon: its arena, its requests, and the models that it said hello with."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}

    @property
    def arena(self) -> ArenaBytes:
        return self.session.arena

    def ask(self, request: Request[R], timeout_s: float, token_ids: TokenIds | None = None) -> R:
        """Send a request and wait for its reply. Raises as ``RequestChannels.ask``."""
        return self.session.channels.ask(request, timeout_s, token_ids)

    def post(self, request: Request[Any]) -> None:
        """Send a request that gives something back, after all that this thread sent before. Never waits."""
        # When a session ends, the daemon takes back all that it granted.
        with contextlib.suppress(SessionEndedError):
            self.session.channels.post(request)

    def say_hello(self, model: ModelIdentity, timeout_s: float) -> None:
        """Introduce a model to the daemon, unless it knows it. Raises as ``RequestChannels.ask``."""
        if model.fingerprint in self._known:
            return
        hello = HelloRequest(format=FORMAT_VERSION, model=model, fingerprint=model.fingerprint)
        self.session.channels.ask(hello, timeout_s)
        with self._lock:
            self._known[model.fingerprint] = None
            if len(self._known) > MAX_MODELS // 2:
                del self._known[next(iter(self._known))]

    def close(self) -> None:
        self.session.close()


def _open(connection: socket.socket, path: Path) -> tuple[SessionGreeting, list[int]]:
    """Open a session: the daemon's greeting, and the descriptors with it, which the caller then owns."""
    request = OpenRequest()
    descriptors: list[int] = []
    inbox = Inbox()
    try:
        connection.sendall(pack(encode(request)))
        while (message := inbox.next()) is None:
            # Not socket.recv_fds, which cannot say CLOEXEC: a child process would keep the arena.
            data, ancillary, _, _ = connection.recvmsg(
                4096, socket.CMSG_LEN(_DESCRIPTORS.size), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += (number for (number,) in _DESCRIPTOR.iter_unpack(payload))
            if not data:
                raise DaemonUnreachableError(
                    f"the krul daemon at {path} closed the connection: it is ending, or full"
                )
            inbox.add(data)
        reply = decode_reply(message[0], request)
        if isinstance(reply, ErrorReply):
            raise EXCEPTIONS[reply.code](reply.message)
        if reply is None or len(descriptors) not in (1, 2):
            raise ProtocolError(f"the daemon at {path} sent {len(descriptors)} descriptors, not one or two")
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return reply.result, descriptors


def _map_arena(descriptor: int, capacity_bytes: int) -> ArenaBytes:
    num_bytes = os.fstat(descriptor).st_size
    if num_bytes != capacity_bytes:
        # Reading beyond the file's end would kill this process with SIGBUS.
        raise ProtocolError(
            f"the daemon announced an arena of {capacity_bytes} bytes and sent one of {num_bytes}"
        )
    return np.frombuffer(map_shared(descriptor, capacity_bytes), dtype=np.uint8)
