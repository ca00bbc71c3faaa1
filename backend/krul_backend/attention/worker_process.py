"""The similarity worker process: its jobs in shared memory, what runs in it, and its client's end.

``python -m krul_backend.attention.worker_process MEMORY_FD PIPE_FD CAPACITY_BYTES`` reads jobs from
the pipe, writes their statistics into the shared memory, and answers on the pipe. Both descriptors are
inherited. It ends when the pipe does: when the client closes it, or the client's process is gone.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import torch

from krul_backend.attention.rows import QueryRows, accumulate
from krul_backend.attention.statistics import AttentionStatistics

logger = logging.getLogger(__name__)

_IMPORT_ROOT = Path(__file__).parents[2]
_EXIT_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 64 << 10
_ALIGNMENT_BYTES = 64
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class JobLayout:
    """The shapes of a job's tensors, which lie one after the other from ``offset`` on, 64-byte aligned.

    ::

        | queries [L, R, H, D] | keys [L, T, Hkv, D] | positions [R] | kv_heads [H] |
        | squared_distance [H, L, L] | ir_mass [L] |

    The client writes the first four, the worker the last two. Keys are those of ``T`` tokens, enough for the
    last row.

    Raises:
        ValueError: if a size is negative or the dtype is not one that KV pools have.
    """

    offset: int
    num_layers: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    queries_dtype: str
    keys_dtype: str
    scaling: float

    def __post_init__(self) -> None:
        for name in ("queries_dtype", "keys_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is unknown (accepted: {', '.join(_DTYPES)})"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("queries_dtype", "keys_dtype", "scaling") and (
                type(value) is not int or value < 0
            ):
                raise ValueError(f"{field.name} is a count, got {value!r}")

    @classmethod
    def of(cls, rows: QueryRows, keys: torch.Tensor, num_tokens: int, offset: int = 0) -> JobLayout:
        """Layout of ``rows``; ``keys [T', Hkv, D]`` are one layer's, of which ``num_tokens`` are stored."""
        return cls(
            offset=offset,
            num_layers=rows.num_layers,
            num_rows=rows.num_rows,
            num_heads=rows.num_heads,
            num_kv_heads=keys.shape[1],
            head_dim=keys.shape[2],
            num_tokens=num_tokens,
            queries_dtype=str(rows.queries.dtype).removeprefix("torch."),
            keys_dtype=str(keys.dtype).removeprefix("torch."),
            scaling=float(rows.scaling),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes from ``offset`` to the end of the job, a multiple of 64."""
        return sum(_aligned_num_bytes(shape, dtype) for shape, dtype in self._tensors())

    def views(self, memory: torch.Tensor) -> JobViews:
        """The job's tensors in ``memory``, uint8 ``[capacity]``, without a copy.

        Raises:
            ValueError: if the job does not lie inside of the memory.
        """
        if self.offset + self.num_bytes > len(memory):
            raise ValueError(f"{self} ends behind the {len(memory)} bytes of shared memory")
        views = []
        offset = self.offset
        for shape, dtype in self._tensors():
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            views.append(memory[offset : offset + num_bytes].view(dtype).view(shape))
            offset += _aligned_num_bytes(shape, dtype)
        queries, keys, positions, kv_heads, squared_distance, ir_mass = views
        rows = QueryRows(queries, positions, kv_heads, self.scaling)
        return JobViews(rows, keys, squared_distance, ir_mass)

    def _tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        layers, heads = self.num_layers, self.num_heads
        return (
            ((layers, self.num_rows, heads, self.head_dim), _DTYPES[self.queries_dtype]),
            ((layers, self.num_tokens, self.num_kv_heads, self.head_dim), _DTYPES[self.keys_dtype]),
            ((self.num_rows,), torch.int64),
            ((heads,), torch.int64),
            ((heads, layers, layers), torch.float64),
            ((layers,), torch.float64),
        )


@dataclass(frozen=True, eq=False)
class JobViews:
    """The tensors of a job, as views of the shared memory."""

    rows: QueryRows
    keys: torch.Tensor
    squared_distance: torch.Tensor
    ir_mass: torch.Tensor

    def read_keys(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def write_result(self, statistics: AttentionStatistics) -> None:
        self.squared_distance.copy_(statistics.squared_distance)
        self.ir_mass.copy_(statistics.ir_mass)

    def result(self) -> AttentionStatistics:
        """What ``write_result`` wrote, copied out of the shared memory."""
        return AttentionStatistics(self.squared_distance.clone(), self.ir_mass.clone(), self.rows.num_rows)


def _aligned_num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class WorkerGoneError(Exception):
    """The process cannot be started, has ended, does not answer in time, or answers something unexpected."""


class WorkerProcess:
    """Owns the process and its pipe. Used by one thread.

    A subprocess and not a ``multiprocessing`` one: SGLang's schedulers are daemonic, and those may not have
    children.

    Args:
        memory_fd: file of ``capacity_bytes`` that both map; it stays the caller's.

    Raises:
        WorkerGoneError: if it cannot be started.
    """

    def __init__(self, memory_fd: int, capacity_bytes: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = [str(number) for number in (memory_fd, theirs.fileno(), capacity_bytes)]
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
                [sys.executable, "-P", "-m", "krul_backend.attention.worker_process", *arguments],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=(memory_fd, theirs.fileno()),
            )
        except OSError as error:
            self._pipe.close()
            raise WorkerGoneError(f"it cannot be started: {error}") from error
        finally:
            theirs.close()
        self._job_ids = itertools.count()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def reduce(self, layout: JobLayout, timeout_s: float) -> str | None:
        """Have the process reduce one job. Returns its error; None if the result is in the shared memory.

        Raises:
            WorkerGoneError: the process is gone; only ``kill`` may be called afterwards.
        """
        job_id = next(self._job_ids)
        try:
            self._pipe.send_bytes(orjson.dumps({"job_id": job_id, "job": asdict(layout)}))
            if not self._pipe.poll(timeout_s):
                raise WorkerGoneError("it did not answer in time")
            reply = orjson.loads(self._pipe.recv_bytes(_MAX_MESSAGE_BYTES))
        except (OSError, EOFError, ValueError) as error:
            raise WorkerGoneError(f"it closed its pipe, or answered nonsense ({error!r})") from error
        if not isinstance(reply, dict) or reply.get("job_id") != job_id:
            raise WorkerGoneError(f"it answered {reply} to job {job_id}")
        error_text = reply.get("error")
        return None if error_text is None else str(error_text)

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


def serve(memory: torch.Tensor, client: Connection) -> None:
    """Answer jobs until the client's end of the pipe is closed. ``memory``: uint8 ``[capacity]``, shared."""
    while True:
        try:
            request = orjson.loads(client.recv_bytes(_MAX_MESSAGE_BYTES))
        except EOFError:
            return
        error = None
        try:
            views = JobLayout(**request["job"]).views(memory)
            views.write_result(accumulate(views.rows, views.read_keys))
        except Exception as failure:
            # The client reduces the job itself; the next one may well succeed.
            error = f"{type(failure).__name__}: {failure}"
        client.send_bytes(orjson.dumps({"job_id": request["job_id"], "error": error}))


def main() -> None:
    memory_fd, pipe_fd, capacity_bytes = map(int, sys.argv[1:])
    # Ctrl-C goes to the whole process group; the client decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The engine's own threads go first: nobody waits for a similarity before the turn ends.
    os.nice(5)
    torch.set_num_threads(1)
    # What a library prints belongs into the log.
    os.dup2(2, 1)
    memory = torch.frombuffer(mmap.mmap(memory_fd, capacity_bytes), dtype=torch.uint8)
    serve(memory, Connection(pipe_fd))


if __name__ == "__main__":
    main()
