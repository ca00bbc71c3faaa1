from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from krul_backend.memory import format_bytes, is_out_of_memory, memory_limit_bytes, parse_bytes

GIB = 2**30


def make_root(tmp_path: Path, cgroup: str | None, files: dict[str, str]) -> Path:
    """A tree with the machine's memory (GiB), ``/proc/self/cgroup`` and files below the cgroup mount."""
    meminfo = f"MemTotal:  {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:  {48 * 2**20} kB\n"
    tree = {"proc/meminfo": meminfo} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if cgroup is not None:
        tree["proc/self/cgroup"] = cgroup
    for name, text in tree.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def limit_gib(root: Path) -> float:
    return memory_limit_bytes(root) / GIB


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    assert limit_gib(make_root(tmp_path, None, {})) == 64


def test_v2_limit_counts(tmp_path: Path) -> None:
    files = {"app/memory.max": f"{16 * GIB}\n"}
    assert limit_gib(make_root(tmp_path, "0::/app\n", files)) == 16


def test_v2_max_means_no_limit(tmp_path: Path) -> None:
    files = {"app/memory.max": "max\n"}
    assert limit_gib(make_root(tmp_path, "0::/app\n", files)) == 64


def test_v2_every_level_above_counts(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{20 * GIB}",
        "pod/box/memory.max": f"{10 * GIB}",
        "pod/box/leaf/memory.max": "max",
    }
    assert limit_gib(make_root(tmp_path, "0::/pod/box/leaf\n", files)) == 10


def test_v1_with_the_hosts_path_in_a_container(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": f"{8 * GIB}\n"}
    cgroup = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"
    assert limit_gib(make_root(tmp_path, cgroup, files)) == 8


def test_v1_without_limit_has_a_huge_number(tmp_path: Path) -> None:
    files = {"memory/a/memory.limit_in_bytes": "9223372036854771712"}
    assert limit_gib(make_root(tmp_path, "4:memory:/a\n", files)) == 64


def test_hybrid_takes_the_tighter_of_both_versions(tmp_path: Path) -> None:
    files = {"memory/a/memory.limit_in_bytes": f"{32 * GIB}", "unified/b/memory.max": f"{30 * GIB}"}
    assert limit_gib(make_root(tmp_path, "4:memory:/a\n0::/b\n", files)) == 30


def test_a_limit_above_the_machine_does_not_count(tmp_path: Path) -> None:
    files = {"memory.max": f"{640 * GIB}"}
    assert limit_gib(make_root(tmp_path, "0::/\n", files)) == 64


@pytest.mark.parametrize(
    "cgroup",
    [
        "",
        "garbage\n",
        "0::\n",
        "0::/../../outside\n",
        "0::/gone/away\n",
        "::::\n",
        "4:memory\n",
        "0::/a\0b\n",
    ],
)
def test_odd_cgroup_files_fall_back_to_the_root_limit_or_the_machine(tmp_path: Path, cgroup: str) -> None:
    files = {"memory.max": "not a number"}
    assert limit_gib(make_root(tmp_path, cgroup, files)) == 64


def test_paths_with_colons_are_followed(tmp_path: Path) -> None:
    files = {"a:b.slice/memory.max": f"{GIB}"}
    assert limit_gib(make_root(tmp_path, "0::/a:b.slice\n", files)) == 1


def test_without_meminfo_the_system_is_asked(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limit_bytes(tmp_path) == physical


def test_this_machine_has_memory() -> None:
    assert memory_limit_bytes() > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        (" 64 B ", 64),
        ("1KB", 1000),
        ("2mb", 2_000_000),
        ("3Gb", 3 * 10**9),
        ("4TB", 4 * 10**12),
        ("1KiB", 1024),
        ("1.5MIB", 3 * 2**19),
        ("12.5GiB", 25 * 2**29),
        ("1 tib", 2**40),
        ("0.1KiB", 102),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes_are_parsed(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (-1, "negative, got -1"),
        ("-5GiB", "negative, got '-5GiB'"),
        ("", "not a size: ''"),
        ("GiB", "not a size"),
        ("1e9", "not a size"),
        ("nan", "not a size"),
        ("1,5GiB", "not a size"),
        ("٣GiB", "not a size"),
        ("5 parsecs", "unknown unit 'parsecs'"),
        ("5G", "unknown unit 'G'"),
        ("1.5", "fraction but no unit"),
        (True, "not a size: True"),
        (1.5, "not a size: 1.5"),
        (None, "not a size: None"),
    ],
)
def test_what_is_not_a_size_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (25 * 2**29, "12.5 GiB"),
        (3 * 2**50, "3072.0 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_sizes_are_printed(num_bytes: int, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


@given(st.integers(0, 2**50))
def test_what_is_printed_can_be_read_again(num_bytes: int) -> None:
    # One decimal of a value of at least 1.0: half a tenth of it may be lost.
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.051 * num_bytes


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_bytes(text) >= 0


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_that_say_there_was_no_memory(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) == is_one
