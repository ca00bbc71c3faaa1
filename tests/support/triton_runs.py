"""Compiles Triton kernels for GPUs that are not there, and runs tests of them in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def compiled_ptx(kernel: Any, arguments: dict[str, Any], compute_capability: int) -> str:
    """What triton compiles for these arguments and an NVIDIA GPU, which need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        torch.uint8: "*u8",
        torch.int16: "*i16",
        torch.int32: "*i32",
        torch.int64: "*i64",
        torch.float16: "*fp16",
        torch.bfloat16: "*bf16",
        torch.float32: "*fp32",
    }
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(place,)] = value
            continue
        is_tensor = isinstance(value, torch.Tensor)
        number = "fp32" if isinstance(value, float) else "i32"
        signature[parameter.name] = pointers[value.dtype] if is_tensor else number
        # As triton's launcher says it: pointers are aligned, and what is a multiple of 16 is known to be one.
        is_specialized = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if is_specialized and (is_tensor or (isinstance(value, int) and value % 16 == 0)):
            attributes[(place,)] = [["tt.divisibility", 16]]
    ptx: str = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", compute_capability, 32),
        options={"num_warps": arguments["num_warps"]},
    ).asm["ptx"]
    return ptx


def run_interpreted(cases: str, **environment: str) -> None:
    """Run a file of tests in a process of its own, in which triton interprets; all must pass."""
    result = run_python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", cases), TRITON_INTERPRET="1", **environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
