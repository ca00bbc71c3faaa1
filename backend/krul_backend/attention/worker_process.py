"""The similarity worker process: what runs in it, and its client's end, which starts it and sends it jobs.

``python -m krul_backend.attention.worker_process MEMORY_FD PIPE_FD CAPACITY_BYTES THREADS`` reads jobs from
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
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import torch

from krul_backend.attention.rows import accumulate
from krul_backend.attention.shared_job import JobLayout

logger = logging.getLogger(__name__)

_IMPORT_ROOT = Path(__file__).parents[2]
_EXIT_TIMEOUT_S = 5.0
_MAX_MESSAGE_BYTES = 64 << 10


class WorkerGoneError(Exception):
    """The process cannot be started, has ended, does not answer in time, or answers something unexpected."""


class WorkerProcess:
    """Owns the process and its pipe. Used by one thread.

    A subprocess and not a ``multiprocessing`` one: SGLang's schedulers are daemonic, and those may not have
    children.

    Args:
        memory_fd: file of ``capacity_bytes`` that both map; it stays the caller's.
        num_threads: of the process.

    Raises:
        WorkerGoneError: if it cannot be started.
    """

    def __init__(self, memory_fd: int, capacity_bytes: int, num_threads: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = [str(number) for number in (memory_fd, theirs.fileno(), capacity_bytes, num_threads)]
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
            self._pipe.send_bytes(orjson.dumps({"job_id": job_id, "job": layout.to_json()}))
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
            views = JobLayout.from_json(request["job"]).views(memory)
            views.write_result(accumulate(views.rows(), views.read_keys))
        except Exception as failure:
            # The client reduces the job itself; the next one may well succeed.
            error = f"{type(failure).__name__}: {failure}"
        client.send_bytes(orjson.dumps({"job_id": request["job_id"], "error": error}))


def main() -> None:
    memory_fd, pipe_fd, capacity_bytes, num_threads = map(int, sys.argv[1:])
    # Ctrl-C goes to the whole process group; the client decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The engine's own threads go first: nobody waits for a similarity before the turn ends.
    os.nice(5)
    torch.set_num_threads(num_threads)
    # What a library prints belongs into the log.
    os.dup2(2, 1)
    memory = torch.frombuffer(mmap.mmap(memory_fd, capacity_bytes), dtype=torch.uint8)
    serve(memory, Connection(pipe_fd))


if __name__ == "__main__":
    main()
