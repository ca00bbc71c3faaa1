from __future__ import annotations

import re

import pytest
import torch

from krul_backend.codec.layout import LayerShape, PoolRows
from krul_backend.codec.pairs.shared_pair import SharedPair
from krul_backend.codec.unit_restore import restore_layer
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision
from tests.support.restore_oracle import RestoreCase, check_restored, encode_case
from tests.support.triton_runs import compiled_ptx, run_interpreted, run_python

SHAPE = LayerShape(2, 32, 16, torch.bfloat16)


def pool(shape: LayerShape, num_slots: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    heads, dtype = shape.num_kv_heads, shape.dtype
    return (
        torch.zeros(num_slots, heads, shape.k_head_dim, dtype=dtype),
        torch.zeros(num_slots, heads, shape.v_head_dim, dtype=dtype),
    )


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("precision", [Precision.NATIVE, Precision.INT4])
def test_on_the_cpu_rows_are_decoded_and_copied(precision: Precision, is_pair: bool) -> None:
    case = RestoreCase(
        SHAPE, precision, is_pair, rotary_dim=32, first_token=20, end_token=33, has_tail_only=True
    )
    check_restored(case, restore_layer)


@pytest.mark.parametrize(
    ("slots", "shape", "message"),
    [
        (torch.arange(36), SHAPE, "37 tokens need as many int64 slots"),
        (torch.arange(37, dtype=torch.int32), SHAPE, "int64 slots, got torch.int32"),
        (torch.arange(37), LayerShape(2, 16, 16, torch.bfloat16), "k_buffer is"),
        (torch.arange(37), LayerShape(2, 32, 32, torch.bfloat16), "v_buffer is"),
        (torch.arange(37), LayerShape(2, 32, 16, torch.float16), "k_buffer is torch.float16"),
    ],
)
def test_slots_and_buffers_that_do_not_fit_are_refused(
    slots: torch.Tensor, shape: LayerShape, message: str
) -> None:
    blocks, decoder = encode_case(RestoreCase(SHAPE, Precision.INT8, is_pair=False, rotary_dim=32), "cpu")
    k_buffer, v_buffer = pool(shape)
    with pytest.raises(CodecError, match=re.escape(message)):
        restore_layer(decoder, 0, blocks, range(37), PoolRows(k_buffer, v_buffer, slots))
    assert not bool(k_buffer.any())


def test_the_block_of_the_partner_must_be_there() -> None:
    blocks, decoder = encode_case(RestoreCase(SHAPE, Precision.INT8, is_pair=True, rotary_dim=32), "cpu")
    with pytest.raises(CodecError, match=r"needs the blocks of layers \(0, 1\), not given: \[0\]"):
        restore_layer(decoder, 1, {1: blocks[1]}, range(37), PoolRows(*pool(SHAPE), torch.arange(37)))


@pytest.mark.parametrize(
    ("shape", "rotary_dim", "compute_capability"),
    [
        (LayerShape(8, 128, 128, torch.bfloat16), 128, 100),
        (LayerShape(8, 128, 128, torch.bfloat16), 128, 90),
        (LayerShape(2, 96, 96, torch.float16), 48, 80),
    ],
)
def test_the_kernels_compile_to_whole_stores(
    shape: LayerShape, rotary_dim: int, compute_capability: int
) -> None:
    """No GPU is needed to see that every lane writes 16 bytes at a time: half the traffic is the pool's."""
    from krul_backend.codec.pairs.triton_kernels import restore_groups, restore_retained
    from krul_backend.codec.pairs.triton_restore import group_launch, retained_launch

    case = RestoreCase(
        shape, Precision.INT4, is_pair=True, rotary_dim=rotary_dim, num_tokens=100, group_size=64
    )
    blocks, decoder = encode_case(case, "cpu")
    found = decoder.unit_blocks(1, blocks, 0, 100)
    assert isinstance(found.codec, SharedPair)
    target = (range(100), PoolRows(*pool(shape, 100), torch.arange(100)))
    for kernel, (_, arguments) in (
        (restore_groups, group_launch(found.codec, found.index, found.blocks, *target)),
        (restore_retained, retained_launch(found.codec, found.index, found.blocks, *target)),
    ):
        stores = re.findall(r"st\.global[.\w]*", compiled_ptx(kernel, arguments, compute_capability))
        assert set(stores) == {"st.global.v4.b32"}


def test_views_that_begin_anywhere_take_the_same_compilation() -> None:
    """With pages of one token, views of slots lie at any multiple of 8 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from krul_backend.codec.pairs.triton_kernels import restore_groups, restore_retained
    from krul_backend.codec.subspace.triton_group_kernels import restore_group_layer
    from krul_backend.triton_rows import copy_rows

    backend = make_backend(GPUTarget("cuda", 90, 32))
    whole = torch.arange(8)
    assert whole.data_ptr() % 16 == 0
    for kernel, name in (
        (restore_groups, "slots"),
        (restore_retained, "slots"),
        (restore_group_layer, "first_tokens"),
        (restore_group_layer, "slots"),
        (copy_rows, "slots"),
    ):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        kinds = []
        for each in (whole, whole[1:]):
            arguments = {**{parameter.name: 1 for parameter in kernel.params}, name: each}
            kinds.append(bind(**arguments)[1])
        assert kinds[0] == kinds[1]


def test_the_kernels_are_not_imported_on_the_cpu() -> None:
    code = """
import sys, torch
from krul_backend.codec.layout import LayerShape, PoolRows
from krul_backend.codec.unit_restore import restore_layer
from krul_backend.strategy.strategy import Precision
from tests.support.restore_oracle import RestoreCase, encode_case

shape = LayerShape(2, 32, 32, torch.float32)
blocks, decoder = encode_case(RestoreCase(shape, Precision.INT4, is_pair=False, rotary_dim=32), "cpu")
k_buffer = v_buffer = torch.zeros(37, 2, 32)
restore_layer(decoder, 0, blocks, range(37), PoolRows(k_buffer, v_buffer, torch.arange(37)))
ours = "krul_backend.codec.pairs.triton", "krul_backend.codec.subspace.triton", "krul_backend.triton"
print([name for name in sys.modules if name.startswith((*ours, "triton."))])
"""
    result = run_python("-c", code)
    assert result.stdout.split() == ["[]"], result.stderr


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted("tests/support/interpreted_restore_cases.py")
