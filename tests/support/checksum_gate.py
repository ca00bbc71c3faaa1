"""Stops a check while it reads blocks, so that a test can do something else meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from krul_backend.tiers.common.interface import Block, block_checksum


class ChecksumGate:
    """Stands in for the checksum: the first call waits until the test lets it go on.

    Gives the right checksum, or ``checksum`` if the test sets one.
    """

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.checksum: bytes | None = None

    def __call__(self, block: Block, range_bytes: int) -> bytes:
        if not self.entered.is_set():
            self.entered.set()
            assert self.go_on.wait(10)
        return block_checksum(block, range_bytes) if self.checksum is None else self.checksum


def install_gate(monkeypatch: pytest.MonkeyPatch) -> ChecksumGate:
    gate = ChecksumGate()
    monkeypatch.setattr("krul_backend.tiers.dram.stored_segment.block_checksum", gate)
    return gate


def run_until_gate(gate: ChecksumGate, call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run ``call`` in a thread up to its first checksum. The list gets its result, or what it raises."""
    results: list[object] = []

    def record() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    gate.go_on.clear()
    gate.entered.clear()
    thread = threading.Thread(target=record)
    thread.start()
    assert gate.entered.wait(10)
    return thread, results


def let_go(gate: ChecksumGate, thread: threading.Thread) -> None:
    """Let the thread go on, and wait for its end."""
    gate.go_on.set()
    thread.join(10)
    assert not thread.is_alive()
