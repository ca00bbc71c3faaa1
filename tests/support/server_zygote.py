"""A process that has imported SGLang, and forks one server for each connection to its socket.

Run as a script by ``forked_server.py``: ``python -P server_zygote.py SOCKET``. Its standard input is a
lifeline: it ends when the process that started it ends. Each child is the supervisor of one server, whose
own child is that server. A client connects, and sends one packet: the request, and the log's descriptor.
The supervisor answers with its process id, and at its end with its exit status. The connection is its
lifeline.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
from sglang.srt.plugins import hook_registry
from torch._dynamo.utils import dump_compile_times

from demo import supervisor
from krul_backend.tiers.common import range_hashes

MAX_REQUEST_BYTES = 1 << 17

_WHAT_SERVERS_IMPORT = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    # Every architecture that SGLang knows.
    "sglang.srt.models.registry",
    "krul_sglang.adapter.attach",
    "krul_sglang.adapter.linker",
    "krul_sglang.adapter.radix_cache",
)


def main(path: str) -> None:
    """Import what servers import, then fork one per connection to the socket at ``path``."""
    # What is imported stays: looking for garbage in it would take a fifth of the time.
    gc.disable()
    for module in _WHAT_SERVERS_IMPORT:
        importlib.import_module(module)
    _end_soon()
    _be_ready_soon()
    _measure_few_prompts()
    _do_once()
    gc.freeze()
    gc.enable()
    multiprocessing.set_start_method("fork")
    # SGLang asks for "spawn" when it starts.
    multiprocessing.set_start_method = lambda *args, **options: None
    signal.signal(signal.SIGCHLD, _reap)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{path}.new")
        listener.listen()
        # Whoever waits for the path connects as soon as it is there.
        os.rename(f"{path}.new", path)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _in_this_process(partial(_supervise, connection))


def _end_soon() -> None:
    """Let servers notice within a tenth of a second that they shall end: SGLang looks every five seconds."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    end = TokenizerManager.sigterm_watchdog

    async def watch(manager: Any) -> None:
        while not manager.gracefully_exit:
            await asyncio.sleep(0.1)
        await end(manager)

    TokenizerManager.sigterm_watchdog = watch


class _Hasty:
    """A module whose ``sleep`` takes a quarter of a second at most."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def sleep(self, seconds: float) -> Any:
        return self._module.sleep(min(seconds, 0.25))


def _be_ready_soon() -> None:
    """Let servers say within half a second that they are ready: SGLang sleeps a second before its first
    request to itself, and one for each time that it is asked."""
    from sglang.srt.entrypoints import http_server

    http_server.time, http_server.asyncio = _Hasty(time), _Hasty(asyncio)


def _measure_few_prompts() -> None:
    """Let the first server of a model measure what restores cost for a second, and not for eight."""
    from krul_sglang.adapter import cost_calibration

    cost_calibration._LENGTHS = (32, 128, 512)  # type: ignore[assignment]


def _do_once() -> None:
    """Do here what takes each server half of the time that it needs to start and to end."""
    range_hashes.compile_hashes()
    range_hashes.compile_hashes = lambda: None
    atexit.unregister(dump_compile_times)
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        # Of libraries, whose operators end with the process.
        each.atexit = False
    hook_registry._propagate_patch = _NamedObjects().replace


class _NamedObjects:
    """Knows by which names modules have their objects. SGLang looks through all of them for each hook."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._places: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        self._find_new()

    def replace(self, original: object, other: object, source_module: object) -> int:
        """Do what ``_propagate_patch`` does, which see."""
        self._find_new()
        num_replaced = 0
        for module, name in self._places.pop(id(original), ()):
            if module is not source_module and vars(module).get(name) is original:
                setattr(module, name, other)
                num_replaced += 1
        return num_replaced

    def _find_new(self) -> None:
        for path, module in list(sys.modules.items()):
            if self._modules.get(path) is not module and isinstance(module, ModuleType):
                self._modules[path] = module
                for name, value in list(vars(module).items()):
                    self._places[id(value)].append((module, name))


def _supervise(connection: socket.socket) -> int:
    """Be the supervisor of one server: returns its exit status, and sends it through ``connection``."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    message, [log], _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 1)
    request = json.loads(message)
    connection.send(str(os.getpid()).encode())
    # The supervisor's lifeline is its standard input.
    for source, target in ((connection.fileno(), 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)

    def start_server(command: list[str], *, preexec_fn: Callable[[], None], **_: Any) -> _Server:
        pid = os.fork()
        if pid == 0:
            preexec_fn()
            connection.close()
            _in_this_process(partial(_serve, request | {"arguments": command}))
        return _Server(pid)

    supervisor.subprocess = SimpleNamespace(Popen=start_server, DEVNULL=subprocess.DEVNULL)  # type: ignore
    status = supervisor.run(request["arguments"])
    status = status if status >= 0 else 128 - status
    # Whoever broke the lifeline by dying does not read it.
    with contextlib.suppress(OSError):
        connection.send(str(status).encode())
    return status


class _Server:
    """A forked child, with what the supervisor needs of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self._end_daemon()
        return self.returncode

    def _end_daemon(self) -> None:
        """Ask the daemon of the server's own to end, as it does when it has had no client for two seconds."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "krul_backend.daemon" in process.cmdline():
                    process.terminate()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def _serve(request: dict[str, Any]) -> int:
    """Be ``python -m`` with the module and the arguments of a request."""
    env = request["env"]
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(request["cwd"])
    # Torch makes its threads anew in a fork. Threads that load weights would all do that at once.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    if num_threads := env.get("OMP_NUM_THREADS"):
        # It was read when torch was loaded.
        torch.set_num_threads(int(num_threads))
    more_paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.path[:0] = more_paths
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    return 0


def _in_this_process(run: Callable[[], int]) -> None:
    """End this forked process with the status that ``run`` returns, or exits with, as an interpreter does."""
    status: Any = 1
    try:
        status = run()
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Among them is that of ``multiprocessing``, which ends the processes of the server.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    main(sys.argv[1])
