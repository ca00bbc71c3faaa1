"""GPUs that torch cannot use: no silent fall-back to the CPU. And a toolkit made of a wheel's parts."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from krul_sglang.adapter.platforms import nvidia
from krul_sglang.adapter.platforms.nvidia import Nvidia, UnusableGpuError, refuse_cpu_beside_gpu
from krul_sglang.adapter.plugin import check_launch
from tests.support.present import present

UNUSABLE = Nvidia(
    devices=("NVIDIA H100 80GB HBM3",),
    driver="580.65.06",
    driver_cuda=(13, 0),
    torch="2.14.1+cu130",
    torch_cuda=(13, 0),
)


@pytest.mark.parametrize(
    ("found", "why", "remedy"),
    [
        (replace(UNUSABLE, torch_cuda=None), "built without CUDA", "install a build of torch"),
        (replace(UNUSABLE, visible=""), "CUDA_VISIBLE_DEVICES='' hides it", "unset CUDA_VISIBLE_DEVICES"),
        (replace(UNUSABLE, driver_cuda=None), "libcuda.so.1", "--gpus all"),
        (
            replace(UNUSABLE, driver_cuda=(12, 4)),
            "up to 12.4, and torch 2.14.1+cu130 was built for 13.0",
            "580",
        ),
        (replace(UNUSABLE, refused_files=("/dev/nvidia0",)), "may not open /dev/nvidia0", "access"),
        (replace(UNUSABLE, error="CUDA error: 802"), "CUDA error: 802", "dmesg"),
    ],
)
def test_a_server_does_not_start_on_the_cpu_beside_a_gpu(found: Nvidia, why: str, remedy: str) -> None:
    with pytest.raises(UnusableGpuError) as refused:
        refuse_cpu_beside_gpu(None, found)
    line = str(refused.value)
    assert line.startswith("this machine has a GPU (NVIDIA H100 80GB HBM3) that torch cannot use: ")
    assert "\n" not in line
    for part in (why, remedy, "give --device cpu"):
        assert part in line


def test_it_does_where_the_cpu_is_asked_for_or_there_is_no_gpu() -> None:
    refuse_cpu_beside_gpu("cpu", UNUSABLE)
    refuse_cpu_beside_gpu(None, Nvidia())


def test_a_launch_ends_with_the_line_also_without_krul(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "find_nvidia", lambda: UNUSABLE)
    with pytest.raises(SystemExit, match="krul-sglang: this machine has a GPU"):
        check_launch(SimpleNamespace(device=None, radix_cache_backend=None))
    assert check_launch(SimpleNamespace(device="cpu", radix_cache_backend=None)) is None


def test_device_files_are_found_without_the_drivers_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    release = tmp_path / "proc" / "driver" / "nvidia" / "version"
    release.parent.mkdir(parents=True)
    release.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15\n")
    found = nvidia.find_nvidia(tmp_path)
    assert [Path(device).name for device in found.devices] == ["nvidia0", "nvidia1"]
    assert found.driver == "535.183.01"
    assert found.why_unusable() is not None


def fake_nvcc(folder: Path, release: str = "13.0") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
    (folder / "bin" / "nvcc").chmod(0o755)
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13020\n")
    return folder


def test_the_compiler_is_the_one_that_flashinfer_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = fake_nvcc(tmp_path / "wheel")
    monkeypatch.setattr(nvidia, "_wheel_folder", lambda: wheel)
    home, on_path = fake_nvcc(tmp_path / "home", "12.8"), fake_nvcc(tmp_path / "path")
    path = {"PATH": str(on_path / "bin")}
    found = nvidia.find_compiler({**path, "CUDA_HOME": str(home)}, tmp_path)
    assert found == nvidia.Compiler(home, "CUDA_HOME", (12, 8), (13, 2), False)
    found = present(nvidia.find_compiler({"CUDA_HOME": str(tmp_path / "nothing")}, tmp_path))
    assert (found.version, found.headers) == (None, None)
    assert nvidia.find_compiler(path, tmp_path) == nvidia.Compiler(on_path, "PATH", (13, 0), (13, 2), True)
    found = nvidia.find_compiler({"PATH": ""}, tmp_path)
    assert found == nvidia.Compiler(wheel, "a wheel", (13, 0), (13, 2), True)
    monkeypatch.setattr(nvidia, "_wheel_folder", lambda: None)
    assert nvidia.find_compiler({"PATH": ""}, tmp_path) is None


def test_only_a_wheels_compiler_sets_cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUDA_HOME", "before")
    wheel = fake_nvcc(tmp_path / "wheel")
    (wheel / "lib").mkdir()
    for source, expected in (("PATH", "before"), ("a wheel", str(tmp_path / "cache"))):
        found = nvidia.Compiler(wheel, source, (13, 0), (13, 0), True)
        monkeypatch.setattr(nvidia, "find_compiler", lambda found=found: found)
        nvidia.provide_toolkit(tmp_path / "cache")
        assert nvidia.os.environ["CUDA_HOME"].startswith(expected)


@pytest.mark.skipif(nvidia._wheel_folder() is None, reason="no wheel has brought nvcc")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_a_program_is_compiled_and_linked_by_a_wheels_parts(tmp_path: Path) -> None:
    """As FlashInfer does it, whose link fails in the wheel's own folder."""
    wheel = present(nvidia._wheel_folder())
    driver = tmp_path / "libcuda.so.1"
    (tmp_path / "driver.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    (tmp_path / "kernel.cu").write_text(
        "#include <cuda_runtime.h>\n__global__ void one(float *x) { x[0] = 1; }\n"
        'extern "C" int run() { one<<<1, 1>>>(0); return cudaDeviceSynchronize(); }\n'
    )
    build(tmp_path, "g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver, "driver.c")
    toolkit = nvidia.make_toolkit(wheel, tmp_path / "cache", driver)
    assert nvidia.make_toolkit(wheel, tmp_path / "cache", driver) == toolkit
    assert len(list(toolkit.parent.iterdir())) == 1
    build(tmp_path, toolkit / "bin" / "nvcc", "--compiler-options=-fPIC", "-c", "kernel.cu", "-o", "kernel.o")
    libraries = [f"-L{toolkit}/lib64", f"-L{toolkit}/lib64/stubs", "-lcudart", "-lcuda", "-Wl,--no-undefined"]
    build(tmp_path, "g++", "-shared", "kernel.o", *libraries, "-o", "kernel.so")
    assert (tmp_path / "kernel.so").exists()


def build(folder: Path, *command: object) -> None:
    finished = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
