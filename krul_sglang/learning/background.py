"""Learns bases in a process of its own while a server runs: what runs in it, and the server's end.

``python -m krul_sglang.learning.background JSON`` learns the bases of the checkpoint that the JSON object
names, and says on its standard output, line by line, how far it is. If they are to be learned again, the
token ids of recent turns come first on its standard input: so they lie in no file. It ends when its standard
input does: when the server closes it, or is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import orjson
import psutil

import krul_backend
import krul_sglang
from krul_backend.errors import KrulError
from krul_backend.memory import format_bytes, memory_limit_bytes
from krul_sglang.models.checkpoint import Checkpoint


class BackgroundLearningError(KrulError):
    """The process ended without bases; the text says why."""


@dataclass(frozen=True)
class RecentTurns:
    """What bases are learned again from, and ``max_damage``: see ``relearn_bases``."""

    pieces: Sequence[Sequence[int]]
    max_damage: float


class LearningProcess:
    """Learns the bases of all ranks of a server; again, if there are ``recent`` turns to learn from. See
    ``ensure_bases`` and ``relearn_bases`` for what it does.

    A subprocess and not a ``multiprocessing`` one: SGLang's schedulers are daemonic, and those may not have
    children.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, checkpoint: Checkpoint, cache_dir: Path, tp_size: int, recent: RecentTurns | None = None
    ) -> None:
        # Not among the arguments, which everybody on the machine can read.
        private = b"" if recent is None else orjson.dumps(asdict(recent))
        given = {
            "checkpoint": asdict(checkpoint),
            "cache_dir": str(cache_dir),
            "tp_size": tp_size,
            "num_private_bytes": len(private),
        }
        packages = (krul_sglang, krul_backend)
        paths = [*(str(Path(package.__file__ or "").parents[1]) for package in packages)]
        self._process = subprocess.Popen(
            # -P: do not import from the working directory.
            [sys.executable, "-P", "-m", "krul_sglang.learning.background", orjson.dumps(given).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                # The process must import the same packages as this one.
                "PYTHONPATH": os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")])),
                # Without a GPU it cannot take memory of it.
                "CUDA_VISIBLE_DEVICES": "",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            },
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # If it has ended already, its last line says why.
            self._process.stdin.write(private)
            self._process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """What it says, until it has ended well.

        Raises:
            BackgroundLearningError: it has failed, or was ended.
        """
        assert self._process.stdout is not None
        line = "it said nothing"
        for said in self._process.stdout:
            line = said.decode(errors="replace").strip()
            yield line
        status = self._process.wait()
        if status < 0:
            raise BackgroundLearningError(f"ended by {signal.Signals(-status).name} ({line})")
        if status > 0:
            raise BackgroundLearningError(line)

    def close(self) -> None:
        """End it by force; harmless when it has ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def check_memory(needed: int) -> None:
    """Refuse to learn where it could take memory that the server needs. ``needed``: bytes that it takes.

    Raises:
        BackgroundLearningError: it may take more than is free, or than half of what this process may have.
    """
    allowed = min(psutil.virtual_memory().available, memory_limit_bytes() // 2)
    if needed > allowed:
        raise BackgroundLearningError(
            f"learning takes about {format_bytes(needed)} of memory, and beside a server here it may take "
            f"{format_bytes(allowed)}; run `krul-sglang learn` before the start"
        )


def main() -> None:
    given = orjson.loads(sys.argv[1])
    # Ctrl-C goes to the whole process group; the server decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    private = _read(given["num_private_bytes"])
    threading.Thread(target=_end_with_server, daemon=True).start()
    os.nice(19)
    with contextlib.suppress(OSError):
        # If memory runs out, this process is the one to go.
        Path("/proc/self/oom_score_adj").write_text("1000")
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    # What a library prints belongs into the server's log.
    os.dup2(2, 1)
    progress = logging.StreamHandler(lines)
    logging.getLogger("krul_sglang.learning").addHandler(progress)
    logging.getLogger("krul_sglang.learning").setLevel(logging.INFO)
    try:
        import torch

        from krul_sglang.learning.command import ensure_bases, memory_of_learning, relearn_bases

        checkpoint = Checkpoint(**given["checkpoint"])
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        learn: Callable[..., object] = ensure_bases
        if private:
            recent = RecentTurns(**orjson.loads(private))
            learn = partial(relearn_bases, recent=recent.pieces, max_damage=recent.max_damage)
        learn(
            checkpoint,
            Path(given["cache_dir"]),
            tell=lambda line: print(line, file=lines),
            tp_size=given["tp_size"],
            before_loading=lambda: check_memory(memory_of_learning(checkpoint, given["tp_size"])),
        )
    except Exception as error:
        if not isinstance(error, KrulError):
            traceback.print_exc()
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=lines)
        sys.exit(1)


def _read(num_bytes: int) -> bytes:
    """The first bytes of the standard input; fewer if the server is gone."""
    content = bytearray()
    while len(content) < num_bytes and (part := os.read(0, num_bytes - len(content))):
        content += part
    return bytes(content)


def _end_with_server() -> None:
    # Not through the file object: its lock would be held when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
