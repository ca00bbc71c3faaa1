"""The Mooncake tier with a real master on this machine; where that is not installed, a row that says so."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tiers.configuration import Configuration
from benchmarks.tiers.disk import TierOperations
from benchmarks.tiers.timing import byte_row, interleaved
from krul_backend.errors import KrulError

_START_S = 15.0


def mooncake_rows(configuration: Configuration, folder: Path) -> list[dict[str, Any]]:
    """Puts and gets of whole segments; or the reason why there are none."""
    master = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    if master is None or importlib.util.find_spec("mooncake") is None:
        return [_left_out("the extra krul-sglang[mooncake] is not installed")]
    rows: list[dict[str, Any]] = []
    for block_bytes in configuration.block_bytes:
        num_blocks = configuration.num_blocks(block_bytes)
        try:
            with _master(master, folder) as address:
                rows += _rows(configuration, address, block_bytes, num_blocks)
        except (KrulError, OSError) as error:
            return [*rows, _left_out(str(error))]
    return rows


def _rows(
    configuration: Configuration, address: str, block_bytes: int, num_blocks: int
) -> list[dict[str, Any]]:
    from krul_backend.tiers.mooncake.mooncake_client import MooncakeOptions
    from krul_backend.tiers.mooncake.tier import MooncakeTier

    segment_bytes = block_bytes * num_blocks * (configuration.disk_repeats + 3) + (256 << 20)
    options = MooncakeOptions(address, segment_bytes=segment_bytes, lookup_timeout_s=5.0)
    tier = MooncakeTier(options, None)
    try:
        bench = TierOperations(tier, block_bytes, num_blocks, before_read=lambda: None)
        writes = interleaved({"tier": bench.write, "memcpy": bench.memcpy}, configuration.disk_repeats)
        reads = interleaved({"tier": bench.read, "memcpy": bench.memcpy}, configuration.disk_repeats)
    finally:
        tier.close()
    return [
        byte_row(op, taken["tier"], block_bytes=block_bytes, num_blocks=num_blocks, memcpy_s=taken["memcpy"])
        for op, taken in (("mooncake-put", writes), ("mooncake-get", reads))
    ]


def _left_out(reason: str) -> dict[str, Any]:
    return {"op": "mooncake", "left_out": reason}


@contextlib.contextmanager
def _master(program: str, folder: Path) -> Iterator[str]:
    """A ``mooncake_master`` on ports of its own; its address."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    with open(folder / "mooncake.log", "ab") as log:
        process = subprocess.Popen(
            [program, f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"], stdout=log, stderr=log
        )
    try:
        _wait_for(ports[0])
        yield f"127.0.0.1:{ports[0]}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.05)
        else:
            return
