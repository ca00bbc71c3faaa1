"""Tells the memory limit of this process and which errors mean lack of memory, and reads and writes sizes."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import resource
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path, PurePosixPath

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_ACCEPTED = "a number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '12.5GiB'"


def parse_bytes(text: str | int) -> int:
    """``"12.5GiB"`` in bytes. KB is 1000 bytes, KiB 1024; no unit means bytes; a part of a byte is cut off.

    Raises:
        ValueError: if it is negative or not a size; the message says what is accepted.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size in bytes cannot be negative, got {text}")
        return text
    if not isinstance(text, str):
        raise ValueError(f"not a size: {text!r}; accepted is {_ACCEPTED}")
    match = _SIZE.fullmatch(text)
    if match is None:
        if text.strip().startswith("-"):
            raise ValueError(f"a size in bytes cannot be negative, got {text!r}")
        raise ValueError(f"not a size: {text!r}; accepted is {_ACCEPTED}")
    number, unit = match[1], match[2].lower()
    if unit not in _UNIT_BYTES:
        raise ValueError(f"unknown unit {match[2]!r} in size {text!r}; accepted is {_ACCEPTED}")
    if unit == "" and "." in number:
        raise ValueError(f"size {text!r} has a fraction but no unit; accepted is {_ACCEPTED}")
    # Exact: a float would round sizes of many digits.
    return int(Fraction(number) * _UNIT_BYTES[unit])


def format_bytes(num_bytes: int) -> str:
    """Format a size with binary units and one decimal: ``"12.5 GiB"``; ``"640 B"`` below 1 KiB."""
    if num_bytes < 0:
        return "-" + format_bytes(-num_bytes)
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value, unit = num_bytes / 1024, "KiB"
    for next_unit in ("MiB", "GiB", "TiB"):
        # 1023.95 would be printed as 1024.0.
        if value < 1023.95:
            break
        value, unit = value / 1024, next_unit
    return f"{value:.1f} {unit}"


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""Texts in errors of torch's allocators, the CUDA runtime and cuBLAS; the last two raise RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was no memory, on a device or on the host."""
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


def create_memory_file(name: str, num_bytes: int) -> int:
    """Descriptor of a new memory file; it lives as long as a descriptor or a mapping does.

    Its size is sealed: if a process could shrink it, an access to the missing part would kill every process
    that maps it.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_shared(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a memory file, in huge pages where the system allows them: locking many pages takes long.

    Raises:
        OSError: the mapping is refused.
    """
    mapping = mmap.mmap(descriptor, num_bytes)
    with contextlib.suppress(OSError):
        # A kernel without them refuses the advice.
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def lock_limit_bytes() -> int | None:
    """Return how many bytes of memory this process may lock; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


_V1_LIMIT = "memory.limit_in_bytes"
_V2_LIMIT = "memory.max"


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The most memory this process could ever have: its lowest cgroup limit, or the machine's memory.

    ``root`` is where ``proc`` and ``sys`` are looked for.
    """
    return min([_physical_bytes(root), *_cgroup_limits(root)])


def _physical_bytes(root: Path) -> int:
    meminfo = _read_text(root / "proc/meminfo") or ""
    match = re.search(r"^MemTotal:\s+([0-9]+) kB$", meminfo, re.MULTILINE)
    if match is not None:
        return int(match[1]) * 1024
    # Systems without /proc.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limits(root: Path) -> Iterator[int]:
    """The limit in bytes of every cgroup with a memory limit that this process is in."""
    for path in _limit_paths(root):
        limit = _read_int(path)
        # Version 2 says "max" for no limit, which is not a number; version 1 has a huge number.
        if limit is not None and limit < 2**60:
            yield limit


def _limit_paths(root: Path) -> Iterator[Path]:
    """Every file that may hold a memory limit for this process, from its own cgroup up to the root.

    A limit holds for all cgroups below it. In a container the path can be the host's, of which only the upper
    part (or nothing but the root, which then is the container's own cgroup) is mounted: so folders that are
    missing are skipped, and the search goes on above them.
    """
    mounts = root / "sys/fs/cgroup"
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        # "4:memory:/path" in version 1, "0::/path" in version 2; the path may contain colons.
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            candidates = [(mounts, _V2_LIMIT), (mounts / "unified", _V2_LIMIT)]
        elif "memory" in controllers.split(","):
            candidates = [(mounts / "memory", _V1_LIMIT), (mounts / controllers, _V1_LIMIT)]
        else:
            continue
        # ".." is how a cgroup outside of the namespace is written: not reachable below the mount.
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for mount, name in dict.fromkeys(candidates):
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth], name)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        # ValueError: not text, or a path with a null byte in it.
        return None


def _read_int(path: Path) -> int | None:
    text = (_read_text(path) or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
