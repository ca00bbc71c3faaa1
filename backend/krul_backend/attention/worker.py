"""The similarity worker process: ``python -m krul_backend.attention.worker FD CAPACITY_BYTES THREADS``.

``FD`` is the shared memory's file, inherited. Started by ``SimilarityWorker``. Reads jobs from standard
input, writes their statistics into the shared memory and answers on standard output. Ends when its input
ends: when the client closes it, or the client's process is gone.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from functools import partial

import torch

from krul_backend.attention.rows import accumulate
from krul_backend.attention.shared_job import JobLayout, pack_message, read_message


def serve(memory: torch.Tensor, requests: int, replies: int) -> None:
    """Answer jobs until the file descriptor ``requests`` ends. ``memory``: uint8 ``[capacity]``, shared."""
    while (request := read_message(partial(os.read, requests))) is not None:
        error = None
        try:
            views = JobLayout.from_json(request["job"]).views(memory)
            views.write_result(accumulate(views.rows(), views.read_keys))
        except Exception as failure:
            # The client reduces the job itself; the next one may well succeed.
            error = f"{type(failure).__name__}: {failure}"
        os.write(replies, pack_message({"job_id": request["job_id"], "error": error}))


def main() -> None:
    memory_fd, capacity_bytes, num_threads = map(int, sys.argv[1:])
    # Ctrl-C goes to the whole process group; the client decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The engine's own threads go first: nobody waits for a similarity before the turn ends.
    os.nice(5)
    torch.set_num_threads(num_threads)
    # A stray print must not end up between the replies.
    replies = os.dup(1)
    os.dup2(2, 1)
    memory = torch.frombuffer(mmap.mmap(memory_fd, capacity_bytes), dtype=torch.uint8)
    serve(memory, 0, replies)


if __name__ == "__main__":
    main()
