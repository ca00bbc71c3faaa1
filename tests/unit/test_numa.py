"""Memory is placed on nodes through the running kernel, which is asked where it lies."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from krul_backend import numa
from krul_backend.daemon.server import build_store
from krul_backend.daemon.server.config import DaemonConfig
from krul_backend.memory import create_memory_file, map_shared
from krul_backend.numa import gpu_nodes, spread_pages

NUM_BYTES = 4 << 20
INTERLEAVE, OF_ADDRESS = 3, 2


def new_memory(descriptor: int) -> np.ndarray:
    return np.frombuffer(map_shared(descriptor, NUM_BYTES), dtype=np.uint8)


def policy_of(buffer: np.ndarray) -> tuple[int, int]:
    """The policy of a mapping's first page, and its nodes as bits."""
    policy, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    address = ctypes.c_void_p(buffer.ctypes.data)
    numa._call(1, ctypes.byref(policy), nodes, ctypes.c_ulong(1025), address, ctypes.c_ulong(OF_ADDRESS))
    return policy.value, nodes[0]


@pytest.fixture
def descriptor() -> int:
    memory = create_memory_file("krul-test", NUM_BYTES)
    try:
        policy_of(new_memory(memory))
    except OSError as error:
        pytest.skip(f"this system does not tell policies of memory: {error}")
    return memory


def test_pages_are_spread_for_whoever_maps_the_file(descriptor: int) -> None:
    buffer, elsewhere = new_memory(descriptor), new_memory(descriptor)
    assert policy_of(elsewhere) == (0, 0)
    assert spread_pages(buffer, [0])
    assert policy_of(elsewhere) == policy_of(buffer) == (INTERLEAVE, 1)
    elsewhere[:] = 7
    assert buffer.min() == 7


def test_nodes_that_are_not_there_are_refused(descriptor: int) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        spread_pages(new_memory(descriptor), [777])


def test_a_machine_whose_calls_are_not_known_is_refused(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        spread_pages(new_memory(descriptor), [0])


def test_a_policy_that_the_process_was_started_with_stays(descriptor: int) -> None:
    program = (
        "import ctypes, sys, numpy as np\n"
        "from krul_backend.memory import map_shared\n"
        "from krul_backend.numa import spread_pages\n"
        "number = {'x86_64': 238, 'aarch64': 237}[__import__('platform').machine()]\n"
        "mask = ctypes.byref(ctypes.c_ulong(1))\n"
        "assert ctypes.CDLL(None).syscall(number, 2, mask, ctypes.c_ulong(65)) == 0\n"
        f"buffer = np.frombuffer(map_shared(int(sys.argv[1]), {NUM_BYTES}), dtype=np.uint8)\n"
        "print(spread_pages(buffer, [0]))\n"
    )
    command = [sys.executable, "-c", program, str(descriptor)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, pass_fds=[descriptor])
    assert (done.stdout.strip(), done.stderr) == ("False", "")
    assert policy_of(new_memory(descriptor)) == (0, 0)


@pytest.mark.parametrize("nodes", [(), (0,)])
def test_the_host_tier_lies_on_the_nodes_of_the_gpus(
    nodes: tuple[int, ...], descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_store, "gpu_nodes", lambda: nodes)
    store = build_store.build_store(DaemonConfig(runtime_dir=tmp_path, arena_bytes=NUM_BYTES))
    try:
        assert policy_of(store.host.buffer) == ((INTERLEAVE, 1) if nodes else (0, 0))
    finally:
        store.close()


def test_a_refusal_is_said_and_the_store_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_store, "gpu_nodes", lambda: (777,))
    build_store.build_store(DaemonConfig(runtime_dir=tmp_path, arena_bytes=NUM_BYTES)).close()
    assert "may lie on another NUMA node" in caplog.text


def test_nodes_of_gpus_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for name, vendor, kind, node in (
        ("a", "0x10de", "0x030200", "1"),
        ("b", "0x10de", "0x040300", "0"),
        ("c", "0x8086", "0x030000", "0"),
        ("d", "0x10de", "0x030200", "-1"),
    ):
        (tmp_path / name).mkdir()
        for file, content in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            (tmp_path / name / file).write_text(content + "\n")
    assert gpu_nodes(tmp_path) == (1,)
