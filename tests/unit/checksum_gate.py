"""Stops a store in the middle of hashing, so that a test can do something else meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest


class ChecksumGate:
    """Stands in for the checksum: the first call waits until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.checksum = 0

    def __call__(self, block: object) -> int:
        if not self.entered.is_set():
            self.entered.set()
            assert self.go_on.wait(10)
        return self.checksum


def install_gate(monkeypatch: pytest.MonkeyPatch) -> ChecksumGate:
    gate = ChecksumGate()
    replace_hashing(monkeypatch, gate)
    for module in ("stored_segment", "trimming"):
        monkeypatch.setattr(f"krul_backend.store.{module}.block_checksum", gate)
    return gate


def replace_hashing(patch: pytest.MonkeyPatch, checksum: Callable[[Any], int]) -> None:
    """Let checksums be taken by ``checksum``, behind a commit and by who cannot wait for that."""
    for name in ("block_checksum", "yielding_checksum"):
        patch.setattr(f"krul_backend.store.hashing.{name}", checksum)


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
