"""An out-of-tree SGLang platform for machines without an accelerator."""

from __future__ import annotations

import os


def activate() -> str | None:
    """Entry point of group ``sglang.srt.platforms``.

    Returns the dotted class name of the platform when this machine has no accelerator that SGLang
    supports by itself, else None, so that a GPU server never sees this platform. SGLang's own CPU engine
    (``SGLANG_USE_CPU_ENGINE=1``) is an explicit choice of the user and is left alone.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1" or _has_accelerator():
        return None
    return "krul_sglang.adapter.platforms.cpu.CpuPlatform"


def _has_accelerator() -> bool:
    import torch

    if torch.backends.mps.is_available():
        return True
    modules = (getattr(torch, name, None) for name in ("cuda", "npu", "xpu", "musa"))
    return any(module is not None and module.is_available() for module in modules)
