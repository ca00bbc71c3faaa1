"""The GPU kernels in triton's interpreter, on the CPU.

Not collected by itself: ``test_restore`` runs it in a process of its own, because triton decides when it is
imported whether it interprets.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.layout import LayerShape, PoolRows
from krul_backend.codec.pairs.triton_restore import restore_fused
from krul_backend.codec.pairs.units import FusedUnit
from krul_backend.codec.units import UnitDecoder
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision
from tests.support.restore_oracle import RestoreCase, check_restored, encode_case

FP32 = LayerShape(2, 32, 16, torch.float32)
FUSED = [*product(Precision, (False, True))][1:]
"""All but native layers that are stored alone, which are copied without a kernel."""


def restore(
    decoder: UnitDecoder, layer: int, blocks: Mapping[int, torch.Tensor], tokens: range, target: PoolRows
) -> None:
    found = decoder.unit_blocks(layer, blocks, tokens.start, tokens.stop)
    assert isinstance(found.codec, FusedUnit)
    restore_fused(found.codec, found.index, found.blocks, tokens, target)


@pytest.mark.parametrize(("precision", "is_pair"), FUSED)
def test_every_precision(precision: Precision, is_pair: bool) -> None:
    check_restored(RestoreCase(FP32, precision, is_pair, rotary_dim=32), restore)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("precision", "is_pair"), [(Precision.NATIVE, True), (Precision.INT4, False)])
def test_every_dtype(dtype: torch.dtype, precision: Precision, is_pair: bool) -> None:
    check_restored(RestoreCase(LayerShape(2, 32, 16, dtype), precision, is_pair, rotary_dim=32), restore)


@pytest.mark.parametrize("precision", [Precision.INT2, Precision.INT8])
def test_rows_that_are_stored_apart_are_exact(precision: Precision) -> None:
    case = RestoreCase(
        LayerShape(3, 32, 24, torch.float16),
        precision,
        is_pair=True,
        rotary_dim=32,
        retained_share=1,
        first_token=5,
        end_token=30,
    )
    check_restored(case, restore)


@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_large_heads(head_dim: int) -> None:
    shape = LayerShape(1, head_dim, head_dim, torch.float32)
    check_restored(
        RestoreCase(shape, Precision.INT4, is_pair=True, rotary_dim=head_dim, num_tokens=9), restore
    )


@pytest.mark.parametrize("is_neox", [True, False])
def test_odd_heads_partly_rotated_from_the_tail_of_a_block(is_neox: bool) -> None:
    case = RestoreCase(
        LayerShape(1, 33, 31, torch.float32),
        Precision.INT4,
        is_pair=True,
        rotary_dim=20,
        is_neox=is_neox,
        num_tokens=29,
        group_size=8,
        first_token=18,
        has_tail_only=True,
    )
    check_restored(case, restore)


@settings(max_examples=6, deadline=None, database=None, derandomize=True)
@given(data=st.data())
def test_any_shape_and_any_range(data: st.DataObject) -> None:
    k_head_dim = data.draw(st.integers(1, 40), "k_head_dim")
    shape = LayerShape(
        data.draw(st.integers(1, 3), "heads"), k_head_dim, data.draw(st.integers(1, 40), "v"), torch.float32
    )
    num_tokens = data.draw(st.integers(1, 24), "tokens")
    first_token = data.draw(st.integers(0, num_tokens - 1), "first")
    precision, is_pair = data.draw(st.sampled_from(FUSED), "precision and whether it is a pair")
    case = RestoreCase(
        shape,
        precision,
        is_pair=is_pair,
        rotary_dim=2 * data.draw(st.integers(0, k_head_dim // 2), "rotary pairs"),
        is_neox=data.draw(st.booleans(), "neox"),
        num_tokens=num_tokens,
        group_size=data.draw(st.integers(4, 24), "group"),
        first_token=first_token,
        end_token=data.draw(st.integers(first_token + 1, num_tokens), "end"),
        has_tail_only=data.draw(st.booleans(), "tail only"),
        retained_share=data.draw(st.sampled_from([0, 0.2]), "retained"),
    )
    check_restored(case, restore)


def test_a_block_of_a_wrong_size_is_refused() -> None:
    blocks, decoder = encode_case(RestoreCase(FP32, Precision.INT4, is_pair=True, rotary_dim=32), "cpu")
    blocks[1] = blocks[1][:-16]
    k_buffer, v_buffer = torch.zeros(40, 2, 32), torch.zeros(40, 2, 16)
    with pytest.raises(CodecError, match="a block of 37 tokens"):
        restore(decoder, 1, blocks, range(37), PoolRows(k_buffer, v_buffer, torch.arange(37)))
    assert not bool(k_buffer.any())
