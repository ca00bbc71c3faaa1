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
import zmq

from krul_backend.daemon.protocol.frames import decode_greeting, decode_reply, encode, encode_token_ids
from krul_backend.daemon.protocol.messages import (
    CommitRequest,
    ErrorReply,
    HelloRequest,
    LeaseRequest,
    ManifestFields,
    PingRequest,
    R,
    Reply,
    Request,
    ReserveRequest,
)
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, TokenIds
from krul_backend.tiers.common.interface import SegmentSlice, Span, block_checksums
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


class RawClient:
    """A session and one DEALER, every message in plain sight."""

    def __init__(self, runtime_dir: Path) -> None:
        self.session = socket.socket(socket.AF_UNIX)
        self.session.settimeout(TIMEOUT_S)
        self.session.connect(str(runtime_dir / "session.sock"))
        line, descriptors, _, _ = socket.recv_fds(self.session, 4096, 1)
        self.greeting = decode_greeting(line)
        self.arena = np.frombuffer(mmap.mmap(descriptors[0], self.greeting.capacity_bytes), dtype=np.uint8)
        os.close(descriptors[0])
        self.dealer = zmq.Context.instance().socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
        self.dealer.connect(f"ipc://{runtime_dir / 'control.sock'}")
        self._ids = itertools.count(1)
        self._sent: dict[int, Request] = {}

    def send(self, kind: type[Request], token_ids: TokenIds | None = None, **fields: Any) -> int:
        """Send one request; returns its number."""
        request = kind(**{"token": self.greeting.token, "id": next(self._ids), **fields})
        self._sent[request.id] = request
        frames = [encode(request)] + ([encode_token_ids(token_ids)] if token_ids is not None else [])
        self.dealer.send_multipart(frames)
        return request.id

    def receive(self) -> Reply | ErrorReply:
        """The next reply; to a frame that was no request of this client it can only be an error."""
        frame = self.dealer.recv()
        number = json.loads(frame)["id"]
        reply = decode_reply(frame, self._sent.get(number, PingRequest(id=number)))
        assert reply is not None
        return reply

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
        self.dealer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def store(client: RawClient, conversation: str, first: int, end: int, number: int = 1, seed: int = 0) -> int:
    """Reserve, write through the mapping, commit; returns the segment's id."""
    fingerprint = client.say_hello(MODEL)
    spans = client.ask(ReserveRequest, reservation_id=number, layer_num_bytes=SIZES, tenant="")
    assert spans is not None
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
