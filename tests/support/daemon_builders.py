"""The daemon's server in a thread of the tests' process, over any store, and a client to test with."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.protocol.runtime_dir import RuntimeDir
from krul_backend.daemon.server.server import DaemonServer
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import SegmentInfo


class WatchedStore(DaemonStore):
    """A store behind a daemon of which a test also asks what operators ask."""

    def __init__(self, runtime_dir: Path, **options: Any) -> None:
        super().__init__(runtime_dir, **options)
        self.admin = AdminClient(runtime_dir, timeout_s=10.0)

    def list_segments(self) -> list[SegmentInfo]:
        return self.admin.list_segments()

    def close(self) -> None:
        super().close()
        self.admin.close()


@contextlib.contextmanager
def serving(store: TieredStore) -> Iterator[Path]:
    """Serve a store while inside, and close it then; gives the runtime directory."""
    # Not tmp_path: a socket's path holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="krul-") as path:
        runtime_dir = RuntimeDir(Path(path))
        server = DaemonServer(runtime_dir, store)
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
            runtime_dir.close()
