"""Describes the machine, the versions and the revision with which a result was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python, krul and the packages that influence a result."""
    found = {name: metadata.version(name) for name in packages}
    from krul_sglang import __version__

    return {"python": platform.python_version(), **found, "krul_sglang": __version__}


def machine() -> dict[str, str | int | None]:
    """CPU, cores, memory in bytes, device, system and load of this machine."""
    from krul_backend.device import Device

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": Device.of_machine().name,
        "system": platform.platform(),
        "load_average_1min": round(os.getloadavg()[0]),
    }


def without_cwd(text: str) -> str:
    """``text`` with shorter paths, so that results can be shared.

    Those below the working directory become relative to it, others below the home directory begin with ``~``.
    """
    return text.replace(f"{Path.cwd()}{os.sep}", "").replace(f"{Path.home()}{os.sep}", f"~{os.sep}")


def git_revision() -> str | None:
    """The revision of the checkout that this package runs from; None for an installed one."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
