"""A raw client of the daemon, for tests: nothing but sockets and the messages themselves."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from krul_backend.daemon.protocol.frames import Inbox, decode_reply, encode, encode_token_ids, pack
from krul_backend.daemon.protocol.messages import (
    CommitRequest,
    ErrorReply,
    HelloRequest,
    LeaseRequest,
    ManifestFields,
    OpenRequest,
    PingRequest,
    R,
    Reply,
    Request,
    ReserveRequest,
    SessionGreeting,
)
from krul_backend.daemon.protocol.runtime_dir import SOCKET_NAME
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, TokenIds
from krul_backend.tiers.common.interface import SegmentSlice, Span, block_checksums
from tests.support.present import present
from tests.support.store_builders import make_manifest, make_model, page_keys, tokens_of

TIMEOUT_S = 20.0
MODEL = make_model()
SIZES = (100, 60)
"""Bytes of the two layers of the segments that ``store`` stores."""


class DaemonProcess:
    """``krul-backend serve`` in a process of its own, ended with the block."""

    def __init__(
        self,
        runtime_dir: Path,
        *arguments: str,
        host_memory: str = "4MiB",
        program: tuple[str, ...] = ("-m", "krul_backend.daemon"),
    ) -> None:
        self.runtime_dir = runtime_dir
        self.process = subprocess.Popen(
            [
                *(sys.executable, *program, "serve"),
                *("--runtime-dir", str(runtime_dir), "--host-memory", host_memory, *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> dict[str, Any]:
        """What it says when it serves."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the daemon ended: {self.process.communicate()[1]}"
        return dict(json.loads(line))

    def end(self, timeout_s: float = TIMEOUT_S) -> tuple[int, str]:
        """Wait for its end; exit status and log."""
        _, log = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, log

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)


def connect_raw(runtime_dir: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(runtime_dir / SOCKET_NAME))
    return connection


def open_raw(connection: socket.socket) -> tuple[SessionGreeting, list[int]]:
    """Open a session on a connection: the greeting, and the descriptors that came with it."""
    connection.sendall(pack(encode(OpenRequest(id=1))))
    received, descriptors, _, _ = socket.recv_fds(connection, 4096, 2)
    inbox = Inbox()
    inbox.add(received)
    message = present(inbox.next())
    reply = decode_reply(message[0], OpenRequest(id=1))
    assert isinstance(reply, Reply), reply
    return reply.result, descriptors


class RawClient:
    """A session and one more connection for requests, every message in plain sight."""

    def __init__(self, runtime_dir: Path) -> None:
        self.session = connect_raw(runtime_dir)
        self.greeting, descriptors = open_raw(self.session)
        self.arena = np.frombuffer(mmap.mmap(descriptors[0], self.greeting.capacity_bytes), dtype=np.uint8)
        for descriptor in descriptors:
            os.close(descriptor)
        self.requests = connect_raw(runtime_dir)
        self._inbox = Inbox()
        self._ids = itertools.count(1)
        self._sent: dict[int, Request] = {}

    def send(self, kind: type[Request], token_ids: TokenIds | None = None, **fields: Any) -> int:
        """Send one request; returns its number."""
        request = kind(**{"token": self.greeting.token, "id": next(self._ids), **fields})
        self._sent[request.id] = request
        ids = b"" if token_ids is None else encode_token_ids(token_ids)
        self.requests.sendall(pack(encode(request), ids))
        return request.id

    def receive(self) -> Reply | ErrorReply:
        """The next reply; to a frame that was no request of this client it can only be an error."""
        while (message := self._inbox.next()) is None:
            received = self.requests.recv(1 << 16)
            assert received, "the daemon closed the connection"
            self._inbox.add(received)
        frame, token_ids = message
        assert token_ids == b""
        number = json.loads(frame)["id"]
        return present(decode_reply(frame, self._sent.get(number, PingRequest(id=number))))

    def ask(self, kind: type[Request[R]], token_ids: TokenIds | None = None, **fields: Any) -> R:
        """One round trip; returns the result."""
        request_id = self.send(kind, token_ids, **fields)
        answer = self.receive()
        assert isinstance(answer, Reply), answer
        assert answer.id == request_id
        return answer.result

    def refusal(self, kind: type[Request], token_ids: TokenIds | None = None, **fields: Any) -> ErrorReply:
        """One round trip whose answer must be an error."""
        request_id = self.send(kind, token_ids, **fields)
        answer = self.receive()
        assert isinstance(answer, ErrorReply), answer
        assert answer.id == request_id
        return answer

    def ask_wrongly(self, kind: type[Request], token_ids: TokenIds | None = None, **fields: Any) -> str:
        """One round trip whose answer must be an error: its code."""
        return self.refusal(kind, token_ids, **fields).code

    def say_hello(self, model: ModelIdentity) -> str:
        """Name a model; returns its fingerprint."""
        self.ask(HelloRequest, format=FORMAT_VERSION, model=model, fingerprint=model.fingerprint)
        return model.fingerprint

    def blocks(self, spans: Sequence[Span]) -> list[npt.NDArray[np.uint8]]:
        return [self.arena[span.offset : span.offset + span.num_bytes] for span in spans]

    def close(self) -> None:
        self.session.close()
        self.requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def store(client: RawClient, conversation: str, first: int, end: int, number: int = 1, seed: int = 0) -> int:
    """Reserve, write through the mapping, commit; returns the segment's id."""
    fingerprint = client.say_hello(MODEL)
    spans = present(client.ask(ReserveRequest, reservation_id=number, layer_num_bytes=SIZES, tenant=""))
    rng = np.random.default_rng(seed)
    for block in client.blocks(spans):
        block[:] = rng.integers(0, 256, block.nbytes, dtype=np.uint8)
    manifest = make_manifest(conversation, first, end, SIZES, MODEL)
    return client.ask(
        CommitRequest,
        manifest.token_ids,
        reservation_id=number,
        fingerprint=fingerprint,
        manifest=ManifestFields.of(manifest),
        checksums=block_checksums(client.blocks(spans)),
    )


def lease(client: RawClient, conversation: str, end: int, number: int = 1) -> tuple[SegmentSlice, ...]:
    keys = page_keys(conversation, 0, end)
    return client.ask(
        LeaseRequest, tokens_of(keys), lease_id=number, fingerprint=MODEL.fingerprint, page_keys=keys
    )


def num_pages(slices: Sequence[SegmentSlice]) -> int:
    """How many pages a lease of these slices has."""
    return sum(part.end_page - part.first_page for part in slices)
