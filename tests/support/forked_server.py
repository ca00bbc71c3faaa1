"""Starts SGLang's server in a fraction of the time: its processes are forks of one that has imported SGLang.

SGLang itself starts its scheduler and its detokenizer as new interpreters, and each of the three imports
SGLang for ten seconds. Here a zygote does so once per test process, for all servers. Variables that SGLang
reads when it is imported are those of the test process. Tests about the start of a server use
``ServerProcess``, which changes nothing. Forks also wait less, and measure fewer prompts when they start.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from demo.server import ServerProcess, default_device_args
from tests.support.tiny_model import date_back

_ZYGOTE = Path(__file__).with_name("server_zygote.py")
_PROGRAM = Path(__file__).with_name("program_with_forked_servers.py")
SOCKET = "TESTS_SERVER_ZYGOTE"
"""Environment variable: the socket of a zygote, for programs that tests run."""


class ForkedServer(ServerProcess):
    """``ServerProcess``, forked from a zygote. With a GPU it is the same: CUDA does not survive a fork."""

    def _start_supervisor(self, log: BinaryIO) -> Any:
        if not default_device_args():
            num_ranks = int(self.command[self.command.index("--tp") + 1]) if "--tp" in self.command else 1
            if num_ranks > torch.accelerator.device_count():
                pytest.skip(f"{num_ranks} ranks need as many GPUs")
            return super()._start_supervisor(log)
        date_back(Path(self.command[self.command.index("--model-path") + 1]))
        return _ForkedSupervisor(self.command[self.command.index("-m") + 1 :], self._env, log)


class _ForkedSupervisor:
    """A supervisor that the zygote forked, with what ``ServerProcess`` uses of ``subprocess.Popen``.

    ``command``: a module that ``python -m`` would run, and its arguments.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: BinaryIO) -> None:
        module, *arguments = command
        request = {"module": module, "arguments": arguments, "env": dict(env), "cwd": os.getcwd()}
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(zygote_socket())
        socket.send_fds(self._connection, [json.dumps(request).encode()], [log.fileno()])
        self.pid = int(self._connection.recv(64))
        self.returncode: int | None = None
        self.stdin = self

    def close(self) -> None:
        """Break its lifeline."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
            # It says its status at its end, unless it is killed.
            self.returncode = int(self._connection.recv(64) or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class _Zygote:
    """The process that forks servers; it ends with this one."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="krul-test-", dir="/tmp")
        self.path = str(Path(self._directory.name) / "zygote")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_ZYGOTE), self.path],
            stdin=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        while not Path(self.path).exists():
            if self._process.poll() is not None:
                raise RuntimeError(f"the zygote ended with status {self._process.returncode}")
            time.sleep(0.1)


@cache
def _own_zygote() -> _Zygote:
    return _Zygote()


def with_forked_servers(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module as ``python -m`` does, with a ``ForkedServer`` for each server."""
    if not default_device_args():
        return [sys.executable, "-m", module, *arguments]
    return [sys.executable, str(_PROGRAM), zygote_socket(), module, *arguments]


def said_by_a_fork(*command: str, timeout_s: float = 300.0) -> str:
    """Run a module that imports SGLang, as ``python -m`` with these arguments would: returns what it prints.
    It must end well."""
    if not default_device_args():
        run = [sys.executable, "-m", *command]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=timeout_s).stdout
    with tempfile.TemporaryFile() as log:
        running = _ForkedSupervisor(command, os.environ, log)
        try:
            status = running.wait(timeout_s)
        finally:
            running.close()
        log.seek(0)
        said = log.read().decode()
        assert status == 0, said
        return said


def zygote_socket() -> str:
    """The path of a zygote's socket; of this process's own, unless the environment names one."""
    return os.environ.get(SOCKET) or _own_zygote().path
