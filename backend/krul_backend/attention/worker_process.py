"""Starts the similarity worker process, sends it jobs and ends it."""

from __future__ import annotations

import itertools
import logging
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from krul_backend.attention.shared_job import JobLayout, pack_message, read_message

logger = logging.getLogger(__name__)

_IMPORT_ROOT = Path(__file__).parents[2]
_EXIT_TIMEOUT_S = 5.0


class WorkerGoneError(Exception):
    """The process cannot be started, has ended, does not answer in time, or answers something unexpected."""


class WorkerProcess:
    """Owns the process and its pipes. Used by one thread.

    A subprocess and not a ``multiprocessing`` one: SGLang's schedulers are daemonic, and those may not have
    children.

    Args:
        memory_fd: file of ``capacity_bytes`` that both map; it stays the caller's.
        num_threads: of the process.

    Raises:
        WorkerGoneError: if it cannot be started.
    """

    def __init__(self, memory_fd: int, capacity_bytes: int, num_threads: int) -> None:
        arguments = [str(number) for number in (memory_fd, capacity_bytes, num_threads)]
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
                [sys.executable, "-P", "-m", "krul_backend.attention.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=environment,
                pass_fds=(memory_fd,),
            )
        except OSError as error:
            raise WorkerGoneError(f"it cannot be started: {error}") from error
        self._job_ids = itertools.count()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def reduce(self, layout: JobLayout, timeout_s: float) -> str | None:
        """Have the process reduce one job. Returns its error; None if the result is in the shared memory.

        Raises:
            WorkerGoneError: the process is gone; only ``kill`` may be called afterwards.
        """
        assert self._process.stdin is not None
        job_id = next(self._job_ids)
        deadline = time.monotonic() + timeout_s
        try:
            self._process.stdin.write(pack_message({"job_id": job_id, "job": layout.to_json()}))
            reply = read_message(lambda num_bytes: self._read(num_bytes, deadline))
        except (OSError, ValueError) as error:
            raise WorkerGoneError(str(error)) from error
        if reply is None:
            raise WorkerGoneError("it closed its output")
        if reply.get("job_id") != job_id:
            raise WorkerGoneError(f"it answered {reply} to job {job_id}")
        error_text = reply.get("error")
        return None if error_text is None else str(error_text)

    def close(self) -> None:
        """End the process: by end of input, and by force if that takes too long."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the similarity worker did not end by itself in %g s", _EXIT_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the process by force; harmless when it has ended. Closes the pipes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError("it did not answer in time")
        return os.read(descriptor, num_bytes)
