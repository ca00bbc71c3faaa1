"""The similarity worker process: what runs in it, its client's end, and what they say to each other.

``python -m benchmarks.worker_process PIPE_FD`` reads jobs from the pipe, whose descriptor it
inherits, and answers with their statistics. It ends when the pipe does: when the client closes it, or the
client's process is gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import orjson
import torch

from krul_backend.attention.rows import QueryRows, accumulate
from krul_backend.attention.statistics import AttentionStatistics

logger = logging.getLogger(__name__)

_IMPORT_ROOT = Path(__file__).parents[1]
_EXIT_TIMEOUT_S = 5.0
_MAX_HEADER_BYTES = 64 << 10


class WorkerGoneError(Exception):
    """The process cannot be started, has ended, does not answer in time, or answers something unexpected."""


class WorkerProcess:
    """Owns the process and its pipe. Used by one thread.

    A subprocess and not a ``multiprocessing`` one: SGLang's schedulers are daemonic, and those may not have
    children.

    Raises:
        WorkerGoneError: if it cannot be started.
    """

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        paths = [str(_IMPORT_ROOT), os.environ.get("PYTHONPATH")]
        environment = {
            **os.environ,
            # The process must import the same package as this one.
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            # Without a GPU it cannot take memory of it.
            "CUDA_VISIBLE_DEVICES": "",
        }
        try:
            self._process = subprocess.Popen(
                # -P: do not import from the working directory.
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            self._pipe.close()
            raise WorkerGoneError(f"it cannot be started: {error}") from error
        finally:
            theirs.close()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def reduce(self, rows: QueryRows, keys: torch.Tensor, timeout_s: float) -> AttentionStatistics | str:
        """Have the process reduce one job, or say why it cannot. ``keys``: ``[L, T, Hkv, D]``.

        Raises:
            WorkerGoneError: the process is gone; only ``kill`` may be called afterwards.
        """
        # It may hang while it reads the job, too.
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            job = (rows.queries, keys, rows.positions, rows.kv_heads)
            _send(self._pipe, job, scaling=rows.scaling)
            reply, tensors = _receive(self._pipe)
            if not tensors:
                return str(reply["error"])
            squared_distance, ir_mass = tensors
            return AttentionStatistics(squared_distance, ir_mass, rows.num_rows)
        except Exception as error:
            raise WorkerGoneError(
                f"it was too slow, closed its pipe, or answered nonsense: {error!r}"
            ) from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process: by the end of the pipe, and by force if that takes too long."""
        self._pipe.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the similarity worker did not end by itself in %g s", _EXIT_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the process by force; harmless when it has ended. Closes the pipe."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()


def _send(pipe: Connection, tensors: Sequence[torch.Tensor], **about: object) -> None:
    """Send plain values, and tensors on the CPU: these without a copy, and without the GIL."""
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    pipe.send_bytes(orjson.dumps({**about, "tensors": kinds}))
    for tensor in tensors:
        pipe.send_bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _receive(pipe: Connection) -> tuple[dict[str, Any], list[torch.Tensor]]:
    about: dict[str, Any] = orjson.loads(pipe.recv_bytes(_MAX_HEADER_BYTES))
    tensors = [
        torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=getattr(torch, dtype)).view(shape)
        for dtype, shape in about["tensors"]
    ]
    return about, tensors


def serve(client: Connection) -> None:
    """Answer jobs until the client's end of the pipe is closed."""
    while True:
        try:
            job, (queries, keys, positions, kv_heads) = _receive(client)
        except EOFError:
            return
        try:
            found = accumulate(QueryRows(queries, positions, kv_heads, job["scaling"]), keys.__getitem__)
        except Exception as failure:
            # The client reduces the job itself; the next one may well succeed.
            _send(client, (), error=f"{type(failure).__name__}: {failure}")
        else:
            _send(client, (found.squared_distance, found.ir_mass))


def main() -> None:
    # Ctrl-C goes to the whole process group; the client decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The engine's own threads go first: nobody waits for a similarity before the turn ends.
    os.nice(5)
    torch.set_num_threads(1)
    # What a library prints belongs into the log.
    os.dup2(2, 1)
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
