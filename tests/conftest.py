"""What all tests share: how many threads a process computes with."""

from __future__ import annotations

import os

# Read when torch is loaded, here and in the processes that tests start. A thread that waits for the others
# of its pool spins: test files side by side would take each other's cores, for models that need no second.
os.environ.setdefault("OMP_NUM_THREADS", "1")
