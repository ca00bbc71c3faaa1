"""Looks at the NVIDIA GPUs of a machine, whether or not torch can use them, and at the compiler for them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from krul_backend.errors import KrulError

Version = tuple[int, int]

_OLDEST_DRIVERS = {11: "450", 12: "525", 13: "580"}
"""NVIDIA's table of minor version compatibility: the first driver for each major release of CUDA."""
_ANSWER_TIMEOUT_S = 20.0
_DEFAULT_TOOLKIT = Path("/usr/local/cuda")


class UnusableGpuError(KrulError):
    """There is a GPU, torch cannot use it, and nobody has asked for the CPU."""


@dataclass(frozen=True)
class Reason:
    """Why GPUs cannot be used, and what to change."""

    why: str
    remedy: str


@dataclass(frozen=True)
class Nvidia:
    """What there is of NVIDIA GPUs, their driver, and torch's view of both.

    ``devices`` are names, or device files where ``nvidia-smi`` is missing. ``driver`` is its version,
    ``driver_cuda`` the newest CUDA that it runs, ``torch_cuda`` the one that torch was built for; None if
    there is none. ``visible`` is CUDA_VISIBLE_DEVICES. ``refused_files`` are device files that this user may
    not open. ``error`` is what torch says when it is asked to begin.
    """

    devices: tuple[str, ...] = ()
    driver: str | None = None
    driver_cuda: Version | None = None
    torch: str = ""
    torch_cuda: Version | None = None
    num_usable: int = 0
    visible: str | None = None
    refused_files: tuple[str, ...] = ()
    error: str = ""

    def why_unusable(self) -> Reason | None:
        """None if torch can use a GPU, or if there is none."""
        if not self.devices or self.num_usable:
            return None
        if self.torch_cuda is None:
            return Reason(f"torch {self.torch} was built without CUDA", "install a build of torch with CUDA")
        if self.visible is not None and self.visible.strip() in ("", "-1"):
            return Reason(f"CUDA_VISIBLE_DEVICES={self.visible!r} hides it", "unset CUDA_VISIBLE_DEVICES")
        if self.driver_cuda is None:
            return Reason(
                "libcuda.so.1, which comes with the driver, cannot be loaded",
                "install the NVIDIA driver; start a container with --gpus all",
            )
        if self.driver_cuda[0] < self.torch_cuda[0]:
            oldest = _OLDEST_DRIVERS.get(self.torch_cuda[0], "of that CUDA")
            return Reason(
                f"driver {self.driver} runs CUDA up to {_dotted(self.driver_cuda)}, and torch {self.torch} "
                f"was built for {_dotted(self.torch_cuda)}",
                f"install driver {oldest} or later, or torch for CUDA {self.driver_cuda[0]}",
            )
        if self.refused_files:
            files = ", ".join(self.refused_files)
            return Reason(
                f"this user may not open {files}", f"give this user read and write access to {files}"
            )
        return Reason(f"CUDA does not begin: {self.error or 'torch does not say why'}", "look at `dmesg`")


def find_nvidia(root: Path = Path("/")) -> Nvidia:
    """Look at this machine. ``root`` is where ``dev`` and ``proc`` are looked for."""
    import torch

    files = sorted(path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdigit())
    release = root / "proc/driver/nvidia/version"
    driver = re.search(r"\s(\d+\.\d+[\d.]*)\s", release.read_text()) if release.exists() else None
    devices = _listed_devices() or [str(path) for path in files]
    is_usable = torch.cuda.is_available()
    error = ""
    if devices and not is_usable:
        try:
            torch.zeros(1, device="cuda")
        except Exception as failure:
            error = str(failure).splitlines()[0]
    return Nvidia(
        devices=tuple(devices),
        driver=None if driver is None else driver[1],
        driver_cuda=_newest_cuda(),
        torch=torch.__version__,
        torch_cuda=_version(torch.version.cuda or ""),
        num_usable=torch.cuda.device_count() if is_usable else 0,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        refused_files=tuple(str(path) for path in files if not os.access(path, os.R_OK | os.W_OK)),
        error=error,
    )


def refuse_cpu_beside_gpu(device: str | None, found: Nvidia | None = None) -> None:
    """Stop a server that would fall back to the CPU beside a GPU. ``device`` is ``--device``, None if absent.

    ``found`` replaces this machine in tests.

    Raises:
        UnusableGpuError: one line that says why, and how to serve on the CPU all the same.
    """
    from krul_sglang.adapter import platforms

    if device is not None or platforms.activate() is None:
        return
    found = find_nvidia() if found is None else found
    reason = found.why_unusable()
    if reason is not None:
        raise UnusableGpuError(
            f"this machine has a GPU ({found.devices[0]}) that torch cannot use: {reason.why}. "
            f"{reason.remedy}; or give --device cpu to serve on the CPU (krul-sglang doctor checks the rest)"
        )


@dataclass(frozen=True)
class Compiler:
    """Where nvcc is: ``folder`` is what CUDA_HOME would be, ``source`` says how it was found.

    ``version`` is None if it does not run, ``headers`` if the folder has none of CUDA's runtime. ``links`` is
    true if programs can be linked with the folder's runtime library, as FlashInfer does it.
    """

    folder: Path
    source: str
    version: Version | None
    headers: Version | None
    links: bool


def find_compiler(env: Mapping[str, str] = os.environ, default: Path = _DEFAULT_TOOLKIT) -> Compiler | None:
    """The nvcc that FlashInfer and SGLang would take, or one that a wheel has brought; None without any."""
    configured = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=env.get("PATH"))
    wheel = _wheel_folder()
    if configured:
        folder, source = Path(configured), "CUDA_HOME"
    elif on_path is not None:
        folder, source = Path(on_path).parents[1], "PATH"
    elif (default / "bin" / "nvcc").exists():
        folder, source = default, str(default)
    elif wheel is not None:
        # Its libraries are linked where they are needed: see ``provide_toolkit``.
        return Compiler(wheel, "a wheel", _nvcc_version(wheel), _headers_version(wheel), True)
    else:
        return None
    # Some distributions keep libraries elsewhere, where the linker looks by itself.
    links = source == "PATH" or (folder / "lib64" / "libcudart.so").exists()
    return Compiler(folder, source, _nvcc_version(folder), _headers_version(folder), links)


def provide_toolkit(cache_dir: Path) -> None:
    """Set CUDA_HOME if only a wheel has brought nvcc, so that FlashInfer finds it.

    A wheel's folder is no toolkit: programs are linked with ``lib64/libcudart.so`` and ``libcuda.so``, and it
    has neither. So one is made of links in ``cache_dir``.
    """
    import torch

    found = find_compiler() if torch.cuda.is_available() else None
    if found is not None and found.source == "a wheel":
        os.environ["CUDA_HOME"] = str(make_toolkit(found.folder, cache_dir, _driver_library()))


def make_toolkit(wheel: Path, cache_dir: Path, driver_library: Path | None) -> Path:
    """Make a folder that compilers take for a CUDA toolkit, of links to a wheel's parts, and return it."""
    name = hashlib.sha256(f"{wheel} {driver_library}".encode()).hexdigest()[:16]
    folder = cache_dir / "cuda-toolkit" / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    for part in ("bin", "include", "nvvm"):
        (made / part).symlink_to(wheel / part)
    (made / "lib64" / "stubs").mkdir(parents=True)
    for library in (wheel / "lib").iterdir():
        (made / "lib64" / library.name).symlink_to(library)
    runtime = next((wheel / "lib").glob("libcudart.so.*"), None)
    if runtime is not None:
        (made / "lib64" / "libcudart.so").symlink_to(runtime)
    if driver_library is not None:
        (made / "lib64" / "stubs" / "libcuda.so").symlink_to(driver_library)
    try:
        made.rename(folder)
    except OSError:
        # Another rank was sooner.
        shutil.rmtree(made)
    return folder


def _wheel_folder() -> Path | None:
    found = find_spec("nvidia")
    places = () if found is None else found.submodule_search_locations or ()
    return next((nvcc.parents[1] for each in places for nvcc in Path(each).glob("cu*/bin/nvcc")), None)


def _nvcc_version(folder: Path) -> Version | None:
    release = re.search(r"release (\d+\.\d+)", _answer(str(folder / "bin" / "nvcc"), "--version"))
    return None if release is None else _version(release[1])


def _headers_version(folder: Path) -> Version | None:
    try:
        text = (folder / "include" / "cuda_runtime_api.h").read_text(errors="replace")
    except OSError:
        return None
    number = re.search(r"#define CUDART_VERSION\s+(\d+)", text)
    return None if number is None else (int(number[1]) // 1000, int(number[1]) % 1000 // 10)


def _listed_devices() -> list[str]:
    return re.findall(r"^GPU \d+: (.+?) \(", _answer("nvidia-smi", "-L"), re.MULTILINE)


def _answer(*command: str) -> str:
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout


def _newest_cuda() -> Version | None:
    """The newest CUDA that the driver's library runs; None if it cannot be loaded."""
    number = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return (number.value // 1000, number.value % 1000 // 10) if status == 0 else None


def _driver_library() -> Path | None:
    """The file of the driver's library, which this process has loaded."""
    _newest_cuda()
    loaded = re.search(r"(/\S*/libcuda\.so\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return None if loaded is None else Path(loaded[1])


def _version(text: str) -> Version | None:
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return None if numbers is None else (int(numbers[1]), int(numbers[2]))


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
