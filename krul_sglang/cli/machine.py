"""Gathers what ``krul-sglang doctor`` judges: facts about this machine, its packages and its GPU."""

from __future__ import annotations

import importlib
import mmap
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from krul_backend.errors import ConfigError, KrulError
from krul_backend.memory import lock_limit_bytes, memory_limit_bytes
from krul_backend.numa import gpu_nodes, spread_pages
from krul_backend.tiers.ssd import Disk, nearest_existing, open_for_reading
from krul_sglang.adapter.platforms.nvidia import Compiler, Nvidia, find_compiler, find_nvidia
from krul_sglang.config import KrulConfig

_TRIAL_BYTES = 256 << 20
_CHUNK_BYTES = 4 << 20
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class DiskFacts:
    """A disk under ``ssd_dir``. ``error`` says why nothing could be measured; then the rates are 0."""

    path: str
    file_system: str = ""
    free_bytes: int = 0
    read_bytes_s: float = 0.0
    write_bytes_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Facts:
    """What was found. Texts of errors are empty where there was none.

    ``flashinfer`` is its version, or what importing it raised if ``flashinfer_error``; both are empty without
    a GPU. ``has_compiled_kernels``: a package with FlashInfer's kernels is installed. ``lock_limit`` is None
    if it is unlimited. ``huge_pages`` and ``shared_huge_pages`` are the settings of the kernel, for programs'
    memory and for shared memory. ``gpu_nodes`` are the NUMA nodes that GPUs are at, and
    ``spread_error`` says why the host tier cannot be spread over them. ``host_memory`` is what is configured,
    in bytes. ``ports`` are those to serve on, ``taken_ports`` those of them that are in use.
    """

    nvidia: Nvidia = field(default_factory=Nvidia)
    compiler: Compiler | None = None
    missing_tools: tuple[str, ...] = ()
    flashinfer: str = ""
    flashinfer_error: str = ""
    has_compiled_kernels: bool = False
    lock_limit: int | None = None
    huge_pages: str = "madvise"
    shared_huge_pages: str = "never"
    num_nodes: int = 1
    gpu_nodes: tuple[int, ...] = ()
    spread_error: str = ""
    host_memory: int = 0
    host_memory_error: str = ""
    available_bytes: int = 0
    shared_bytes: int = 0
    disks: tuple[DiskFacts, ...] = ()
    ssd_capacity: int | None = None
    ports: tuple[int, ...] = ()
    taken_ports: tuple[int, ...] = ()
    sglang: str = ""
    sglang_error: str = ""
    hooks_error: str = ""
    uses_mooncake: bool = False


def gather(config: KrulConfig, server_port: int) -> Facts:
    """Look at this machine, as a server with ``config`` would find it."""
    nvidia = find_nvidia()
    nodes = gpu_nodes()
    flashinfer, flashinfer_error = _flashinfer() if nvidia.devices else ("", "")
    sglang, sglang_error, hooks_error = _sglang()
    host_memory, host_memory_error = _host_memory(config)
    ports = tuple(port for port in (server_port, config.metrics_port, config.hints_port) if port)
    return Facts(
        nvidia=nvidia,
        compiler=find_compiler(),
        missing_tools=tuple(tool for tool in ("c++", "ninja") if shutil.which(tool) is None),
        flashinfer=flashinfer,
        flashinfer_error=flashinfer_error,
        has_compiled_kernels=find_spec("flashinfer_jit_cache") is not None,
        lock_limit=lock_limit_bytes(),
        huge_pages=chosen_setting(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        shared_huge_pages=chosen_setting(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
        num_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        gpu_nodes=nodes,
        spread_error=spread_error(nodes) if nodes else "",
        host_memory=host_memory,
        host_memory_error=host_memory_error,
        available_bytes=available_bytes(),
        shared_bytes=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0,
        disks=tuple(map(measure_disk, config.ssd_dirs)),
        ssd_capacity=config.ssd_capacity,
        ports=ports,
        taken_ports=taken_ports(ports),
        sglang=sglang,
        sglang_error=sglang_error,
        hooks_error=hooks_error,
        uses_mooncake=bool(config.mooncake),
    )


def chosen_setting(path: Path) -> str:
    """The bracketed word of a file such as ``always [madvise] never``; empty if there is no such file."""
    try:
        chosen = re.search(r"\[(\S+)\]", path.read_text())
    except OSError:
        return ""
    return "" if chosen is None else chosen[1]


def spread_error(nodes: Iterable[int]) -> str:
    """Why the system does not spread shared memory over these NUMA nodes; empty if it does."""
    try:
        spread_pages(np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.uint8), nodes)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def measure_disk(folder: Path, num_bytes: int = _TRIAL_BYTES) -> DiskFacts:
    """Write a file of ``num_bytes`` below ``folder``, read it past the page cache, and remove it.

    If the folder does not exist yet, the nearest one above it is taken, on whose disk it would be made.
    """
    place = nearest_existing(folder)
    facts = DiskFacts(str(folder), _file_system(place))
    try:
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < 2 * num_bytes:
            return DiskFacts(facts.path, facts.file_system, free_bytes, error="the disk is full")
        with tempfile.NamedTemporaryFile(dir=place, prefix="krul-doctor-") as file:
            chunk = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
            chunk[:] = os.urandom(_CHUNK_BYTES)
            began_s = time.perf_counter()
            for _ in range(num_bytes // _CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.perf_counter() - began_s
            disk = Disk()
            disk.drop_cache(file.fileno(), 0, 0)
            reading = open_for_reading(disk, Path(file.name))
            try:
                began_s = time.perf_counter()
                for offset in range(0, num_bytes, _CHUNK_BYTES):
                    disk.preadv(reading, [chunk], offset)
                read_s = time.perf_counter() - began_s
            finally:
                disk.close(reading)
    except OSError as error:
        return DiskFacts(facts.path, facts.file_system, error=str(error))
    return DiskFacts(facts.path, facts.file_system, free_bytes, num_bytes / read_s, num_bytes / write_s)


def taken_ports(ports: Iterable[int]) -> tuple[int, ...]:
    """Those of ``ports`` of 127.0.0.1 that cannot be bound."""
    taken = []
    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                taken.append(port)
    return tuple(taken)


def _file_system(place: Path) -> str:
    """The kind of file system that ``place`` lies on."""
    kind, longest, path = "", -1, str(place.resolve())
    for line in Path("/proc/mounts").read_text().splitlines():
        mounted, found = line.split()[1:3]
        if (path + "/").startswith(mounted.rstrip("/") + "/") and len(mounted) >= longest:
            kind, longest = found, len(mounted)
    return kind


def _flashinfer() -> tuple[str, str]:
    try:
        return str(importlib.import_module("flashinfer").__version__), ""
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"


def _sglang() -> tuple[str, str, str]:
    """Its version, what is wrong with that, and with what krul hooks."""
    from krul_sglang.adapter import hook_targets

    try:
        version = str(importlib.import_module("sglang").__version__)
        hook_targets.check_version()
    except Exception as error:
        return "", str(error), "not looked at: SGLang is not the right one"
    try:
        with warnings.catch_warnings(action="ignore"):
            hook_targets.check_signatures()
    except KrulError as error:
        return version, "", str(error)
    except Exception as error:
        return version, "", f"SGLang cannot be imported here: {type(error).__name__}: {error}"
    return version, "", ""


def _host_memory(config: KrulConfig) -> tuple[int, str]:
    try:
        return config.host_memory_bytes(num_ranks=1), ""
    except ConfigError as error:
        return config.host_memory or 0, str(error)


def available_bytes() -> int:
    """Memory that programs can still take, never more than the limit of this machine or cgroup."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    limit = memory_limit_bytes()
    return limit if found is None else min(limit, int(found[1]) * 1024)
