"""Runs a module as ``python -m`` does, with a ``ForkedServer`` for each ``ServerProcess`` that it starts.

``python program_with_forked_servers.py SOCKET MODULE ARGUMENTS...``: the socket of the zygote of a test.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    from demo import server
    from tests.support.forked_server import SOCKET, ForkedServer

    os.environ[SOCKET] = sys.argv[1]
    # Before any module takes it by its name.
    server.ServerProcess = ForkedServer  # type: ignore[misc]
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
