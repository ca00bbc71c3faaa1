"""What all tests share: how many threads a process computes with, no deadline for drawn examples, and that no
memory lies in two chunks."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Test files run side by side: how long an example takes says nothing about it.
settings.register_profile("krul", deadline=None)
settings.load_profile("krul")

# Read when torch is loaded, here and in the processes that tests start. A thread that waits for the others
# of its pool spins: test files side by side would take each other's cores, for models that need no second.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is mapped is chance, and a chunk may end in it. Tests of chunks choose where."""
    from krul_backend import page_lock

    monkeypatch.setattr(page_lock, "CHUNK_BYTES", 1 << 60)
