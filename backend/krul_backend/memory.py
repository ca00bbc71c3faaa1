"""How much memory this process may use, and how sizes are written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    """For people, with binary units and one decimal: ``"12.5 GiB"``; ``"640 B"`` below 1 KiB."""
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


@dataclass(frozen=True)
class _CgroupFiles:
    """Names of one cgroup version's memory files, and the key of reclaimable page cache in its statistics."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """The most memory this process could ever have: its lowest cgroup limit, or the machine's memory.

    ``root`` is where ``proc`` and ``sys`` are looked for.
    """
    limits = [limit for limit, _ in _cgroup_limits(root)]
    return min([_physical_bytes(root, "MemTotal", "SC_PHYS_PAGES"), *limits])


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory this process could take now, in bytes: the least that the machine or a cgroup above it has left.

    A cgroup has left its limit minus its usage. Inactive page cache does not count as usage (as in the
    kernel's ``MemAvailable``): reading a checkpoint fills a container up to its limit with it.
    """
    left = [max(0, limit - usage) for limit, usage in _cgroup_limits(root)]
    return min([_physical_bytes(root, "MemAvailable", "SC_AVPHYS_PAGES"), *left])


def _physical_bytes(root: Path, field: str, sysconf_pages: str) -> int:
    meminfo = _read_text(root / "proc/meminfo") or ""
    match = re.search(rf"^{field}:\s+([0-9]+) kB$", meminfo, re.MULTILINE)
    if match is not None:
        return int(match[1]) * 1024
    # Systems without /proc, and kernels older than MemAvailable.
    return os.sysconf(sysconf_pages) * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """``(limit, usage)`` in bytes of every cgroup with a memory limit that this process is in."""
    for folder, files in _cgroup_folders(root):
        limit = _read_int(folder / files.limit)
        # Version 2 says "max" for no limit, which is not a number; version 1 has a huge number.
        if limit is None or limit >= 2**60:
            continue
        usage = _read_int(folder / files.usage)
        stat = _read_text(folder / "memory.stat") or ""
        cache = re.search(rf"^{files.reclaimable} ([0-9]+)$", stat, re.MULTILINE)
        yield limit, max(0, (usage or 0) - (int(cache[1]) if cache is not None else 0))


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Every folder that may hold a memory limit for this process, from its own cgroup up to the root.

    A limit holds for all cgroups below it. In a container the path can be the host's, of which only the upper
    part (or nothing but the root, which then is the container's own cgroup) is mounted: missing folders are
    passed over, not the end of the search.
    """
    mounts = root / "sys/fs/cgroup"
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        # "4:memory:/path" in version 1, "0::/path" in version 2; the path may contain colons.
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            candidates = [(mounts, _V2), (mounts / "unified", _V2)]
        elif "memory" in controllers.split(","):
            candidates = [(mounts / "memory", _V1), (mounts / controllers, _V1)]
        else:
            continue
        # ".." is how a cgroup outside of the namespace is written: not reachable below the mount.
        parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
        for mount, files in dict.fromkeys(candidates):
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth]), files


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, ValueError):
        # ValueError: not text, or a path with a null byte in it.
        return None


def _read_int(path: Path) -> int | None:
    text = (_read_text(path) or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
