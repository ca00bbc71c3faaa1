"""An SGLang server in which nothing is fetched for a request that waits.

``python -m benchmarks.serving.without_prefetch`` takes the arguments of ``sglang.launch_server``. No request
is looked up before its turn, so none waits for what lies below host memory: its load reads that.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch


def switch_off() -> None:
    """Take the prefetch out of this process."""
    from krul_sglang.adapter.look_ahead import LookAhead

    def look_up(self: LookAhead, queue: Iterable[Any]) -> None:
        pass

    patch.object(LookAhead, "look_up", look_up).start()


# SGLang's processes are spawned: each imports the module that the first one was started with.
if __name__ in ("__main__", "__mp_main__"):
    switch_off()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
