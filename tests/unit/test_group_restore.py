"""Groups of layers from blocks into the pool: on a CPU, in triton's interpreter, compiled for GPUs."""

from __future__ import annotations

import re

import pytest
import torch

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.restore import GroupTarget, begin_groups, can_fuse_groups
from krul_backend.device import Device
from krul_backend.errors import CodecError
from tests.support.group_restore_cases import TOLERANCE, GroupCase, check_group, encode_case
from tests.support.triton_runs import compiled_ptx, run_interpreted, run_python

CPU = Device(torch.device("cpu"))
SHAPE = LayerShape(2, 16, 8, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_on_the_cpu_rows_are_decoded_and_copied(dtype: torch.dtype) -> None:
    shape = LayerShape(2, 16, 8, dtype)
    case = GroupCase(shape, rotary_dim=16, num_tokens=200, first_token=70, end_token=190, head_tokens=20)
    check_group(case, begin_groups, CPU)
    check_group(GroupCase(shape, num_first_tokens=3), begin_groups, CPU)


def test_a_cpu_runs_no_kernels() -> None:
    assert not can_fuse_groups(SHAPE, CPU)


def test_a_tail_is_made_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading numbers that lie on a device waits for all that was queued there before."""
    decoder, block, _ = encode_case(GroupCase(SHAPE), CPU)

    def refuse(tensor: torch.Tensor, *_: object) -> None:
        raise AssertionError("waits for the device")

    for name in ("cpu", "to", "item", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    assert decoder.tail(0, block, 0, 90).num_used > 0


@pytest.mark.parametrize(
    ("slots", "k_shape", "dtype", "message"),
    [
        (torch.arange(89), (99, 2, 16), torch.float32, "90 tokens need as many int64 slots"),
        (torch.arange(90, dtype=torch.int32), (99, 2, 16), torch.float32, "int64 slots, got torch.int32"),
        (torch.arange(90), (99, 2, 8), torch.float32, "k_buffer is"),
        (torch.arange(90), (99, 2, 16), torch.float16, "k_buffer is torch.float16"),
    ],
)
def test_slots_and_buffers_that_do_not_fit_are_refused(
    slots: torch.Tensor, k_shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    decoder, block, _ = encode_case(GroupCase(SHAPE), CPU)
    tail = decoder.tail(0, block, 0, 90)
    good = torch.zeros(99, 2, 16), torch.zeros(99, 2, 8)
    wrong = torch.zeros(k_shape, dtype=dtype), torch.zeros(99, 2, 8)
    with pytest.raises(CodecError, match=re.escape(message)):
        begin_groups([[GroupTarget(tail, [0, 0], slots)]], CPU)[0].write([good, wrong])
    assert not bool(good[0].any())


@pytest.mark.parametrize(
    ("shape", "rotary_dim", "is_neox", "compute_capability"),
    [
        (LayerShape(8, 128, 128, torch.bfloat16), 128, True, 100),
        (LayerShape(8, 128, 128, torch.bfloat16), 128, True, 90),
        (LayerShape(3, 64, 64, torch.float16), 32, False, 80),
        (LayerShape(1, 64, 512, torch.bfloat16), 64, False, 90),
    ],
)
def test_the_kernels_compile_to_whole_stores(
    shape: LayerShape, rotary_dim: int, is_neox: bool, compute_capability: int
) -> None:
    """No GPU is needed to see that lanes write 16 bytes at a time, and what kinds of products they use."""
    from krul_backend.codec.subspace.triton_group_kernels import decode_rans, restore_group_layer
    from krul_backend.codec.subspace.triton_group_restore import TailsOnDevice, decode_launch, layer_launch

    case = GroupCase(shape, 80, decay=0.97, rotary_dim=rotary_dim, is_neox=is_neox, num_tokens=100)
    decoder, block, _ = encode_case(case, CPU)
    tail = decoder.tail(0, block, 0, 100)
    on_device = TailsOnDevice([[GroupTarget(tail, [0, 0], torch.arange(100))]], CPU)
    assert min(len(on_device.exact), len(on_device.rest)) > 0
    _, arguments = decode_launch(on_device)
    assert "st.global" in compiled_ptx(decode_rans, arguments, compute_capability)
    heads, dtype = shape.num_kv_heads, shape.dtype
    buffers = (
        torch.zeros(100, heads, shape.k_head_dim, dtype=dtype),
        torch.zeros(100, heads, shape.v_head_dim, dtype=dtype),
    )
    _, arguments = layer_launch(on_device, 1, buffers, on_device.groups[0].slots)
    ptx = compiled_ptx(restore_group_layer, arguments, compute_capability)
    assert set(re.findall(r"st\.global[.\w]*", ptx)) == {"st.global.v4.b32"}
    # The first coefficients in parts of tf32, all others in bf16.
    products = {80: ("tf32.tf32.f32", "bf16.bf16.f32"), 90: ("f32.tf32.tf32", "f32.bf16.bf16")}
    kinds = products.get(compute_capability, ("kind::tf32", "kind::f16"))
    assert all(re.search(rf"(mma|tcgen05)\S*{kind}", ptx) for kind in kinds)


def test_products_of_a_pool_of_fp32_use_no_tf32() -> None:
    from krul_backend.codec.subspace.triton_group_kernels import restore_group_layer
    from krul_backend.codec.subspace.triton_group_restore import TailsOnDevice, layer_launch

    decoder, block, _ = encode_case(GroupCase(SHAPE, rotary_dim=16), CPU)
    tail = decoder.tail(0, block, 0, 90)
    on_device = TailsOnDevice([[GroupTarget(tail, [0, 0], torch.arange(90))]], CPU)
    assert len(on_device.exact) > len(on_device.rest) == 0
    buffers = torch.zeros(90, 2, 16), torch.zeros(90, 2, 8)
    _, arguments = layer_launch(on_device, 0, buffers, on_device.groups[0].slots)
    assert "tf32" not in compiled_ptx(restore_group_layer, arguments, 90)


def test_the_kernels_are_not_imported_on_the_cpu() -> None:
    code = """
import sys, torch
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.restore import begin_groups
from krul_backend.device import Device
from tests.support.group_restore_cases import GroupCase, check_group

check_group(GroupCase(LayerShape(1, 8, 8, torch.float32), 4), begin_groups, Device(torch.device("cpu")))
ours = "krul_backend.codec.pairs.triton", "krul_backend.codec.subspace.triton"
print([name for name in sys.modules if name.startswith((*ours, "triton."))])
"""
    result = run_python("-c", code)
    assert result.stdout.split() == ["[]"], result.stderr


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted("tests/support/interpreted_group_cases.py")


@pytest.mark.long
def test_the_kernels_in_the_interpreter_with_more_damage() -> None:
    run_interpreted("tests/support/interpreted_group_cases.py", DAMAGED_EXAMPLES="50")
