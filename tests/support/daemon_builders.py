"""The daemon's server in a thread of the tests' process, over any store."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import zmq

from krul_backend.daemon.protocol.runtime_dir import RuntimeDir
from krul_backend.daemon.server.server import DaemonServer, SharedArena
from krul_backend.store.interface import KVStore


@contextlib.contextmanager
def serving(store: KVStore, arena: SharedArena) -> Iterator[Path]:
    """Serve a store while inside, and close it then; gives the runtime directory."""
    # Not tmp_path: a socket's path holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="krul-") as path:
        runtime_dir = RuntimeDir(Path(path))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server = DaemonServer(runtime_dir, store, arena, context)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield Path(path)
        finally:
            server.stop()
            thread.join()
            server.disconnect()
            store.close()
            server.close()
            context.term()
            runtime_dir.close()
