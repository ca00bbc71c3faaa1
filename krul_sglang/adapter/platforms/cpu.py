"""Lets the real SGLang server run on a machine with a CPU only.

A module of its own: SGLang imports it by name when its own platform modules are loaded, after ``activate``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

_SPIN_COUNT = "1000"
"""How often a thread of torch's (OpenMP's) looks for its next piece of work before it sleeps. By default it
looks for milliseconds. If somebody else wants the core, such as a thread that encodes, each operator of a
forward then takes 40 times as long."""


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Runs SGLang with plain PyTorch operators on the CPU; needs no ``sgl_kernel`` and no other package.

    Meant for trying the plugin and for tests: the control flow (scheduler, radix cache, chunked prefill,
    overlap order, tensor parallelism over gloo) is the one of a GPU server; the speed is not.

    The attention backend is krul's own unless ``--attention-backend`` names another: see ``cpu_attention``.
    """

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Take krul's attention backend where SGLang would take ``intel_amx``, which needs ``sgl_kernel``;
        workers, which are started after this, share their cores with other threads."""
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = self.get_default_attention_backend()

    def get_default_attention_backend(self) -> str:
        return "krul_cpu"

    def init_backend(self) -> None:
        """Register the default attention backend and recurrent layers, let adapters be loaded, and ranks
        gather the tokens of each other (DP attention).

        SGLang calls this in each worker, before it makes one.
        """
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.lora import layers
        from sglang.srt.lora.backend import torch_backend
        from sglang.srt.model_executor import forward_batch_info

        from krul_sglang.adapter.platforms import cpu_attention, cpu_convolution, cpu_delta_rule, cpu_mamba2

        cpu_attention.register()
        cpu_convolution.install()
        cpu_delta_rule.install()
        cpu_mamba2.install()
        for module in (layers, torch_backend, forward_batch_info):
            module.__dict__["torch"] = _PageableTorch()
        # What it takes otherwise are a kernel of Triton, and operators that are registered for GPUs alone.
        dp_attention.memcpy_func = dp_attention.memcpy_cpu
        parallel_state._is_cpu = True
        # They would raise: there is no driver.
        torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[assignment,return-value]
        torch.cuda.current_device = torch.cpu.current_device  # type: ignore[assignment]
        torch.cuda.synchronize = lambda device=None: None

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        from krul_sglang.adapter.platforms import cpu_speculation

        return algorithm in cpu_speculation.ALGORITHMS

    def get_speculative_worker_cls(self, algorithm: str) -> None:
        """Make ready for speculation, by SGLang's own worker. It asks before it makes one."""
        if self.supports_speculative_algorithm(algorithm):
            from krul_sglang.adapter.platforms import cpu_speculation

            cpu_speculation.install()

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Tell SGLang that it may copy the states of recurrent layers while a request is computed."""
        return True

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False


class _PageableTorch:
    """torch for modules that pin what they make, which needs the driver of a device."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty", "arange"):
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)
