"""Starts SGLang's server in half the time: its processes are forks of one that has imported SGLang.

SGLang itself starts its scheduler and its detokenizer as new interpreters, each of which imports SGLang for
ten seconds. Tests about the start of a server use ``ServerProcess``, which changes nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import runpy
from typing import Any

from krul_sglang.demo.server import ServerProcess, default_device_args


class ForkedServer(ServerProcess):
    """``ServerProcess``, run through this file. With a GPU it is the same: CUDA does not survive a fork."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if default_device_args():
            module = self.command.index("-m")
            self.command[module : module + 2] = [__file__]


def main() -> None:
    """Import what the children need, then be ``python -m sglang.launch_server`` with these arguments."""
    # What is imported stays: looking for garbage in it would take a fifth of the time.
    gc.disable()
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    gc.enable()
    multiprocessing.set_start_method("fork")
    # SGLang asks for "spawn" when it starts.
    multiprocessing.set_start_method = lambda *args, **options: None
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
