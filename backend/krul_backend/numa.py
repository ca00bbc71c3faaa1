"""Places shared memory on the NUMA nodes that GPUs are at."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

_CALLS = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""The numbers of the system calls mbind and get_mempolicy, by machine: libc has no functions for them."""
_DEFAULT, _INTERLEAVE = 0, 3
"""Policies of memory, as linux/mempolicy.h numbers them."""
_MASK_BITS = 1024
"""Of a set of nodes: as many as a kernel can have."""


def gpu_nodes(devices: Path = Path("/sys/bus/pci/devices")) -> tuple[int, ...]:
    """The NUMA nodes of NVIDIA's display and 3D controllers among PCI ``devices``."""
    nodes = set()
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):
                nodes.add(int((device / "numa_node").read_text()))
        except (OSError, ValueError):
            continue
    return tuple(sorted(node for node in nodes if node >= 0))


def spread_pages(buffer: npt.NDArray[np.uint8], nodes: Iterable[int]) -> bool:
    """Have the system take a mapping's pages from ``nodes`` in turn, whichever process touches them first.

    Only for shared memory that nobody has touched. Where a node is full, the system takes another one. A
    process with a memory policy of its own (``numactl``) keeps that: then this returns False.

    Raises:
        OSError: the system refuses, as containers without the right SYS_NICE do.
    """
    mask = (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    for node in nodes:
        word, bit = divmod(node, 8 * ctypes.sizeof(ctypes.c_ulong))
        mask[word] |= 1 << bit
    policy = ctypes.c_int()
    _call(1, ctypes.byref(policy), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    if policy.value != _DEFAULT:
        return False
    where = (ctypes.c_void_p(buffer.ctypes.data), ctypes.c_ulong(buffer.nbytes))
    _call(0, *where, _INTERLEAVE, mask, ctypes.c_ulong(_MASK_BITS + 1), 0)
    return True


def _call(which: int, *arguments: object) -> None:
    """Make one of ``_CALLS``. Raises OSError, also where their numbers are not known."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"NUMA policies are not known on {platform.machine()}")
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(numbers[which], *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
