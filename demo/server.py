"""Runs a real SGLang server as a child process, which ends when this process ends; reads krul's counters."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx

from krul_backend.errors import KrulError

CPU_ARGS = (
    *("--device", "cpu"),
    *("--sampling-backend", "pytorch"),
    *("--mem-fraction-static", "0.2"),
    # An idle scheduler would otherwise keep one of few cores busy with polling.
    "--sleep-on-idle",
)
"""What SGLang needs on a machine without a GPU."""

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_STOP_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.25
_POLL_SAVES_S = 0.02
_NUM_QUOTED_LINES = 20
_PORTS = range(20_000, 32_000)

KrulState = dict[str, Any]
"""krul's counters of one data-parallel replica, those of its rank 0."""


class ServerError(KrulError):
    """The server did not start, died, or answered with an error; the message has the end of its log."""


class ServerProcess:
    """Runs ``python -m sglang.launch_server`` with a log file, until its last process has ended.

    ::

        with ServerProcess(model_path, args=["--page-size", "16"]) as server:
            server.post_json("/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 8}})

    The server and everything it starts live in their own session, so that Ctrl-C in a terminal reaches only
    the caller, and under a supervisor (``supervisor.py``) that ends them when the caller ends, in any way.

    Args:
        model_path: a checkpoint directory or a hub name. For a directory the hub is switched off.
        args: further arguments of the server. A flag given here comes after the defaults, so it wins.
        env: variables on top of this process's environment.
        log_path: where stdout and stderr go; None takes a temporary file, deleted by a ``stop`` after a
            start that succeeded, kept after one that failed.
        ready_timeout_s: how long ``start`` may take.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        ready_timeout_s: float = 300.0,
    ) -> None:
        self.port = find_free_port()
        self.command = [
            *(sys.executable, "-m", "sglang.launch_server"),
            *("--model-path", str(model_path)),
            *("--host", "127.0.0.1"),
            *("--port", str(self.port)),
            *default_device_args(),
            *args,
        ]
        self.ready_timeout_s = ready_timeout_s
        self.ready_after_s: float | None = None
        self._launched_at = 0.0
        self._env = {**os.environ, **_offline_env(model_path), **(env or {})}
        self._owns_log = log_path is None
        self._log_path = log_path
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def command_line(self) -> str:
        return shlex.join(self.command)

    @property
    def pid(self) -> int:
        """The root of the process tree: the supervisor, whose child is the server."""
        return self._require_started().pid

    @property
    def log_path(self) -> Path:
        if self._log_path is None:
            raise ServerError("the server was not started: it has no log yet")
        return self._log_path

    def log_text(self) -> str:
        """All that the server has printed; empty before ``start`` and after ``stop`` of a temporary log."""
        if self._log_path is None or not self._log_path.exists():
            return ""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def is_running(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> None:
        """Start the server and wait until it has answered a real request.

        Raises:
            ServerError: it ended, or was not ready within ``ready_timeout_s``. Nothing of it is left then.
        """
        start_servers([self])

    def stop(self) -> None:
        """End the server and every process it started; returns when they are gone. May be called twice."""
        stop_servers([self])

    def get_json(self, path: str, *, timeout_s: float = 60.0) -> Any:
        """GET ``path`` and parse the answer. Raises ServerError for any answer but 200."""
        return self._request("GET", path, None, timeout_s)

    def post_json(self, path: str, payload: Mapping[str, Any], *, timeout_s: float = 600.0) -> Any:
        """POST ``payload`` as JSON and parse the answer. Raises ServerError for any answer but 200."""
        return self._request("POST", path, payload, timeout_s)

    def server_info(self) -> dict[str, Any]:
        """``GET /server_info``: the resolved arguments and, per data-parallel rank, ``internal_states``."""
        info: dict[str, Any] = self.get_json("/server_info")
        return info

    def error(self, problem: str) -> ServerError:
        """An error that says what is wrong and quotes the end of the log."""
        lines = self.log_text().splitlines()[-_NUM_QUOTED_LINES:]
        quoted = "\n".join(f"  | {line}" for line in lines) or "  | (empty)"
        return ServerError(f"{problem}\n  command: {self.command_line}\n  log {self._log_path}:\n{quoted}")

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self) -> None:
        if self._log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="krul-sglang-server-", suffix=".log")
            os.close(descriptor)
            self._log_path = Path(name)
        self._launched_at = time.monotonic()
        with self._log_path.open("ab") as log:
            self._supervisor = self._start_supervisor(log)

    def _start_supervisor(self, log: BinaryIO) -> subprocess.Popen[bytes]:
        """Its standard input is its lifeline; what it and the server print goes to ``log``."""
        return subprocess.Popen(
            [sys.executable, "-P", str(_SUPERVISOR), *self.command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=self._env,
            start_new_session=True,
        )

    def _becomes_ready(self) -> bool:
        """Whether a real request is answered now. Raises ServerError if it ended, or if it takes too long."""
        status = self._require_started().poll()
        if status is not None:
            raise self.error(f"the SGLang server ended with status {status} before it was ready")
        seconds = time.monotonic() - self._launched_at
        if seconds > self.ready_timeout_s:
            raise self.error(f"the SGLang server was not ready after {self.ready_timeout_s:.0f} s")
        with self._client(timeout_s=30.0) as client:
            # SGLang's own warm-up can be switched off: the caller's first request must not pay for it.
            is_ready = _answers_ok(client, "/health_generate") and _answers_ok(
                client, "/generate", _WARM_UP_REQUEST
            )
        if is_ready:
            self.ready_after_s = time.monotonic() - self._launched_at
        return is_ready

    def _let_go(self) -> None:
        """Close the lifeline: the supervisor does the rest."""
        if self._supervisor is not None and self._supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._supervisor.stdin.close()

    def _wait_until_gone(self) -> None:
        if self._supervisor is None:
            return
        try:
            self._supervisor.wait(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _kill_tree(self._supervisor)
        if self._owns_log and self._log_path is not None:
            self._log_path.unlink(missing_ok=True)

    def _request(self, method: str, path: str, payload: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            with self._client(timeout_s) as client:
                response = client.request(method, path, json=payload)
        except httpx.HTTPError as error:
            raise self.error(f"{method} {path} failed: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise self.error(f"{method} {path} answered {response.status_code}: {response.text[:500]}")
        return response.json()

    def _client(self, timeout_s: float) -> httpx.Client:
        # Proxy settings of the environment are not meant for 127.0.0.1. Without ``verify`` the certificates
        # of authorities, which plain HTTP has no use for, are not read: that takes 20 ms.
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False, verify=False)

    def _require_started(self) -> subprocess.Popen[bytes]:
        if self._supervisor is None:
            raise ServerError("the server was not started")
        return self._supervisor


def start_servers(
    servers: Sequence[ServerProcess], on_ready: Callable[[ServerProcess], None] = lambda server: None
) -> None:
    """Start servers side by side; returns when each of them has answered a real request.

    Raises:
        ServerError: one of them ended, or was not ready in time. Nothing of any of them is left then.
    """
    if any(server._supervisor is not None for server in servers):
        raise ServerError("this server was started before; make a new ServerProcess")
    try:
        for server in servers:
            server._launch()
        waiting = list(servers)
        while waiting:
            time.sleep(_POLL_INTERVAL_S)
            for server in [server for server in waiting if server._becomes_ready()]:
                waiting.remove(server)
                on_ready(server)
    except BaseException:
        # BaseException: also after Ctrl-C while waiting. The logs stay for the reader of the error.
        for server in servers:
            server._owns_log = False
        stop_servers(servers)
        raise


def stop_servers(servers: Sequence[ServerProcess]) -> None:
    """End servers side by side, with all that they started; those that were not started are left alone."""
    for server in servers:
        server._let_go()
    for server in servers:
        server._wait_until_gone()


_WARM_UP_REQUEST = {
    "input_ids": [1] * 8,
    "sampling_params": {"max_new_tokens": 4, "temperature": 0},
    # As SGLang's own: of two servers that share a request, this one sends its KV to nobody.
    "bootstrap_host": "2.2.2.2",
    "bootstrap_room": 0,
}


def default_device_args() -> tuple[str, ...]:
    """The arguments for this machine: ``CPU_ARGS`` where krul's CPU platform is the one in use, else none."""
    from krul_sglang.adapter import platforms

    return () if platforms.activate() is None else CPU_ARGS


def find_free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on at this moment.

    Below the range from which the kernel takes ports for connections and for binds to port 0: a server binds
    its port only after a minute of imports, by when one of those may well have been given to somebody else.
    """
    candidates = random.SystemRandom().sample(_PORTS, k=100)
    for port in candidates:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"found no free port among 100 of {_PORTS.start} to {_PORTS.stop - 1}")


def _offline_env(model_path: str | Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1"} if Path(model_path).is_dir() else {}


def _answers_ok(client: httpx.Client, path: str, payload: Mapping[str, Any] | None = None) -> bool:
    try:
        response = client.get(path) if payload is None else client.post(path, json=payload)
    except httpx.HTTPError:
        return False
    return response.status_code == 200


def _kill_tree(root: subprocess.Popen[bytes]) -> None:
    """Kill ``root`` and all its descendants, for when the supervisor itself hangs."""
    import psutil

    processes: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = psutil.Process(root.pid).children(recursive=True)
    root.kill()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    root.wait()
    psutil.wait_procs(processes, timeout=_STOP_TIMEOUT_S)


@dataclass(frozen=True)
class StoredAmounts:
    """The bytes that krul stores on all ranks together, and the number of tokens whose KV they are."""

    num_bytes: int
    num_tokens: int


def krul_states(server_info: Mapping[str, Any]) -> list[KrulState]:
    """krul's counters in SGLang's ``/server_info``: one entry per data-parallel replica."""
    return [state["krul"] for state in server_info["internal_states"] if "krul" in state]


def stored_amounts(states: Sequence[KrulState]) -> StoredAmounts:
    """The amounts that are stored; every other rank of a replica holds as much as its rank 0."""
    return StoredAmounts(
        num_bytes=sum(state["stored_bytes"] * state["tp_size"] for state in states),
        num_tokens=sum(state["stored_tokens"] for state in states),
    )


def wait_for_saves(server: ServerProcess, *, timeout_s: float = 60.0) -> list[KrulState]:
    """Wait until a server with krul has nothing more to do for the requests that it answered.

    Turns are saved on every tier, loads have ended, and no probe runs. Returns the
    counters then.

    Raises:
        ServerError: the server does not answer, or is not done in ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while any(_num_pending(state) for state in krul_states(server.server_info())):
        if time.monotonic() > deadline:
            raise server.error(f"krul was still saving or loading after {timeout_s:.0f} s")
        time.sleep(_POLL_SAVES_S)
    # An idle scheduler probes when everything is saved, and answers when that has ended.
    return krul_states(server.server_info())


def _num_pending(state: KrulState) -> int:
    queued = sum(tier["queued_segments"] for tier in state["tiers"])
    return int(state["offload"]["pending"] + state["load"]["pending"] + queued)
