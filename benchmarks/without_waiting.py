"""An SGLang server in which no request waits until it is in DRAM: each is admitted as soon as there is room.

``python -m benchmarks.without_waiting`` takes the arguments of ``sglang.launch_server``.
"""

from __future__ import annotations

import runpy
from unittest.mock import patch


def switch_off() -> None:
    """Take the waiting out of this process."""
    from krul_sglang.adapter.look_ahead import LookAhead

    patch.object(LookAhead, "hold_back", lambda self, queue, num_running: []).start()


# SGLang's processes are spawned: each imports the module that the first one was started with.
if __name__ in ("__main__", "__mp_main__"):
    switch_off()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
