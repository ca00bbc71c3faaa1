"""``krul-sglang doctor``: every row can fail, and says what to change."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from krul_sglang.adapter.platforms.nvidia import Compiler, Nvidia
from krul_sglang.cli import app as cli
from krul_sglang.cli import doctor, machine
from krul_sglang.cli.machine import DiskFacts, Facts
from krul_sglang.cli.server_client import CannotRunError

GPU = Nvidia(
    devices=("NVIDIA H100 80GB HBM3",),
    driver="580.65.06",
    driver_cuda=(13, 0),
    torch="2.14.1+cu130",
    torch_cuda=(13, 0),
    num_usable=1,
)
TOOLKIT = Compiler(Path("/usr/local/cuda"), "PATH", (13, 0), (13, 0), True)
FAST = DiskFacts("/kv", "ext4", 1 << 40, 6e9, 3e9)
RIGHT = Facts(
    nvidia=GPU,
    compiler=TOOLKIT,
    flashinfer="0.7.2",
    huge_pages="madvise",
    shared_huge_pages="within_size",
    host_memory=64 << 30,
    available_bytes=256 << 30,
    shared_bytes=64 << 30,
    disks=(FAST,),
    ports=(30000,),
    sglang="0.5.23",
)

WRONG: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "old driver": (
        *("driver", "problem"),
        {"nvidia": replace(GPU, driver="535.1", driver_cuda=(12, 2), num_usable=0)},
        "install driver 580 or later, or torch for CUDA 12",
    ),
    "no GPU": ("devices", "warning", {"nvidia": Nvidia()}, "use a machine with one"),
    "unusable": ("devices", "problem", {"nvidia": replace(GPU, num_usable=0)}, "--device cpu"),
    "hidden": (
        *("devices", "warning"),
        {"nvidia": replace(GPU, devices=("a", "b"), visible="0")},
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "no nvcc": ("nvcc", "problem", {"compiler": None}, "nvidia-cuda-nvcc"),
    "broken nvcc": ("nvcc", "problem", {"compiler": replace(TOOLKIT, version=None)}, "correct or unset PATH"),
    "half a toolkit": ("nvcc", "problem", {"compiler": replace(TOOLKIT, links=False)}, "unset CUDA_HOME"),
    "no ninja": ("nvcc", "problem", {"missing_tools": ("ninja",)}, "install ninja"),
    "other nvcc": (
        *("nvcc", "warning"),
        {"compiler": replace(TOOLKIT, version=(12, 8), headers=(12, 8))},
        "nvcc of CUDA 13",
    ),
    "newer nvcc": (
        *("nvcc", "problem"),
        {"compiler": replace(TOOLKIT, version=(13, 5))},
        "pip install 'nvidia-cuda-nvcc==13.0.*'",
    ),
    "no FlashInfer": (
        *("FlashInfer", "warning"),
        {"flashinfer": "", "flashinfer_error": "ModuleNotFoundError"},
        "flashinfer-python",
    ),
    "locked memory": ("pinning", "warning", {"lock_limit": 8 << 20}, "ulimit -l unlimited"),
    "no huge pages": ("huge pages", "warning", {"huge_pages": "never"}, "echo madvise"),
    "small shared pages": ("huge pages", "warning", {"shared_huge_pages": "never"}, "echo advise"),
    "far node": (
        *("NUMA", "warning"),
        {"num_nodes": 2, "gpu_nodes": (1,), "spread_error": "not permitted"},
        "--membind=1",
    ),
    "many nodes": (
        *("NUMA", "warning"),
        {"num_nodes": 2, "gpu_nodes": (0, 1), "spread_error": "not permitted"},
        "one server per node",
    ),
    "over the machine": ("host memory", "problem", {"host_memory_error": "too large"}, "a smaller"),
    "no memory": ("host memory", "problem", {"available_bytes": 32 << 30}, "end other programs"),
    "little memory": ("host memory", "warning", {"available_bytes": 65 << 30}, "leave a tenth"),
    "small /dev/shm": ("/dev/shm", "warning", {"shared_bytes": 64 << 20}, "--shm-size"),
    "no disk": ("ssd_dir", "problem", {"disks": (FAST, DiskFacts("/kv", error="No"))}, "may write"),
    "small disk": ("ssd_dir", "problem", {"ssd_capacity": 2 << 40}, "a smaller ssd_capacity"),
    "no disk but memory": ("ssd_dir", "warning", {"disks": (replace(FAST, file_system="tmpfs"),)}, "a disk"),
    "network": ("ssd_dir", "warning", {"disks": (replace(FAST, file_system="fuse.s3"),)}, "a local disk"),
    "slow disk": ("ssd_dir", "warning", {"disks": (FAST, replace(FAST, read_bytes_s=2e8))}, "NVMe"),
    "port": ("ports", "problem", {"taken_ports": (30000,)}, "--port"),
    "other SGLang": ("SGLang", "problem", {"sglang_error": "SGLang 9 is installed"}, "the release"),
    "renamed target": ("hook targets", "problem", {"hooks_error": "x does not exist"}, "SGLang again"),
}


def row_of(facts: Facts, check: str) -> doctor.Row:
    return next(row for row in doctor.check_machine(facts) if row.check == check)


def test_a_right_machine_has_nothing_to_change() -> None:
    rows = doctor.check_machine(RIGHT)
    assert {row.check: row.state for row in rows} == dict.fromkeys(doctor.CHECKS, "ok")
    assert not any(row.remedy for row in rows)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_row_with_a_remedy(case: str) -> None:
    check, state, changes, remedy = WRONG[case]
    row = row_of(replace(RIGHT, **changes), check)
    assert row.state == state
    assert remedy in row.remedy
    assert row.found


def test_every_row_is_made_to_fail_here() -> None:
    assert {check for check, *_ in WRONG.values()} == set(doctor.CHECKS)


def test_a_cpu_needs_nothing_of_a_gpu() -> None:
    facts = replace(RIGHT, nvidia=Nvidia(), compiler=None, lock_limit=8 << 20, shared_huge_pages="never")
    rows = {row.check: row.state for row in doctor.check_machine(facts)}
    assert rows.pop("devices") == "warning"
    assert set(rows.values()) == {"ok"}


def test_compiled_kernels_need_no_compiler() -> None:
    assert row_of(replace(RIGHT, compiler=None, has_compiled_kernels=True), "nvcc").state == "ok"


def test_memory_and_ports_are_not_judged_beside_a_server_that_has_them() -> None:
    facts = replace(RIGHT, taken_ports=(30000,), available_bytes=0)
    assert not doctor.has_problem(doctor.check_machine(facts, is_serving=True))


KRUL: dict[str, Any] = {
    "restore": {
        "mode": {"planner": "local-search", "why": "as configured"},
        "kernels": {"heads": "flashinfer", "coder": "triton", "scatter": "torch"},
        "forward": {"rescued_requests": 0},
    },
    "weights": {"is_settled": True},
    "daemon": {"is_connected": True, "endpoint": "/run/krul"},
    "offload": {"dropped_turns": {"evicted": 0}},
}


def answering(monkeypatch: pytest.MonkeyPatch, krul: Any, device: str = "cuda") -> list[doctor.Row]:
    info = {"radix_cache_backend": "krul", "device": device, "internal_states": [{"krul": krul}]}
    monkeypatch.setattr("krul_sglang.cli.server_client.request", lambda *args: info)
    return doctor.check_server("http://127.0.0.1:1")


def test_a_server_that_does_all_it_can_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = answering(monkeypatch, KRUL)
    names = ["planner", "kernels", "weights", "daemon", "loads", "turns"]
    assert [(row.check, row.state) for row in rows] == [(f"server: {name}", "ok") for name in names]


@pytest.mark.parametrize(
    ("check", "state", "changes"),
    [
        ("planner", "warning", {"restore": {"mode": {"planner": "full-load", "why": "no heads"}}}),
        ("kernels", "warning", {"restore": {"kernels": {"heads": "torch", "coder": "triton"}}}),
        ("weights", "problem", {"weights": {"is_settled": False}}),
        ("daemon", "problem", {"daemon": {"is_connected": False}}),
        ("loads", "warning", {"restore": {"forward": {"rescued_requests": 3}}}),
        ("turns", "warning", {"offload": {"dropped_turns": {"no room": 2}}}),
    ],
)
def test_what_a_server_does_without_is_said(
    monkeypatch: pytest.MonkeyPatch, check: str, state: str, changes: dict[str, dict[str, Any]]
) -> None:
    krul = {**KRUL, **{part: {**KRUL[part], **of_part} for part, of_part in changes.items()}}
    rows = {row.check: row for row in answering(monkeypatch, krul)}
    assert rows[f"server: {check}"].state == state
    assert rows[f"server: {check}"].remedy
    assert [row.state for row in rows.values()].count("ok") == 5


def test_torch_is_what_a_cpu_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = dict.fromkeys(("heads", "coder", "scatter"), "torch")
    krul = {**KRUL, "restore": {**KRUL["restore"], "kernels": kernels}}
    assert {row.state for row in answering(monkeypatch, krul, device="cpu")} == {"ok"}


def test_another_version_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotRunError, match="another version of krul-sglang"):
        answering(monkeypatch, {"restore": None})


def run(monkeypatch: pytest.MonkeyPatch, facts: Facts, *args: object) -> Result:
    monkeypatch.setattr("krul_sglang.cli.machine.gather", lambda config, port: facts)
    return CliRunner().invoke(cli.app, ["doctor", *map(str, args)])


def test_the_status_is_1_if_there_is_a_problem_and_the_rows_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(monkeypatch, RIGHT).exit_code == 0
    result = run(monkeypatch, replace(RIGHT, taken_ports=(30000,)), "--json", tmp_path / "rows.json")
    assert result.exit_code == 1
    assert "in use: 30000" in result.stdout
    assert "problems: 1, warnings: 0" in result.stdout
    written = json.loads((tmp_path / "rows.json").read_text())
    assert not written["passed"]
    assert [row["check"] for row in written["rows"] if row["state"] != "ok"] == ["ports"]


def test_a_wrong_option_and_a_silent_server_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for args in (["--option", "strategie=krul"], ["--url", "127.0.0.1:1"], ["--url", "http://127.0.0.1:1"]):
        result = run(monkeypatch, RIGHT, *args)
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1


def test_the_example_of_the_help_is_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    example = "doctor --option host_memory=64GiB --option ssd_dir=/mnt/kv"
    shown = " ".join(CliRunner().invoke(cli.app, ["doctor", "--help"]).stdout.split())
    assert f"krul-sglang {example}" in shown
    assert run(monkeypatch, RIGHT, *example.split()[1:]).exit_code == 0


def test_a_disk_is_written_and_read_and_left_clean(tmp_path: Path) -> None:
    facts = machine.measure_disk(tmp_path / "not" / "yet", num_bytes=8 << 20)
    assert facts.error == ""
    assert facts.read_bytes_s > 0
    assert facts.write_bytes_s > 0
    assert facts.free_bytes > 8 << 20
    assert facts.file_system
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said() -> None:
    assert machine.measure_disk(Path("/proc/krul")).error


def test_stored_kv_that_can_be_spread_over_nodes_needs_nothing() -> None:
    row = row_of(replace(RIGHT, num_nodes=2, gpu_nodes=(0, 1)), "NUMA")
    assert (row.state, row.remedy) == ("ok", "")
    assert "spread" in row.found
    assert machine.spread_error((777,))


def test_ports_that_listen_are_taken() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert machine.taken_ports((port,)) == (port,)
    assert machine.taken_ports((port,)) == ()


def test_settings_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert machine.chosen_setting(tmp_path / "enabled") == "madvise"
    assert machine.chosen_setting(tmp_path / "missing") == ""
