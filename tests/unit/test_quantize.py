from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.pairs.vector_format import (
    dequantize,
    fp16_at_least,
    fp16_at_most,
    pack,
    packed_width,
    quantize,
    scale_and_offset,
    unpack,
)

finite_floats = st.floats(-65504, 65504, width=32, allow_subnormal=True)


@settings(max_examples=300)
@given(finite_floats)
def test_directed_rounding_is_the_nearest_fp16_on_its_side(number: float) -> None:
    x = torch.tensor([number])
    below, above = fp16_at_most(x), fp16_at_least(x)
    assert below.float() <= x <= above.float()
    # Nothing of fp16 lies between: either the number itself, or two neighbours.
    if bool(below.float() == x):
        assert bool(above.float() == x)
    else:
        assert torch.equal(torch.nextafter(below.double().half(), torch.tensor([torch.inf]).half()), above)


def test_directed_rounding_at_zero_and_beyond_the_range() -> None:
    x = torch.tensor([0.0, -0.0, 1e-10, -1e-10, 7e4, -7e4])
    smallest = 2.0**-24
    assert fp16_at_most(x).tolist() == [0, 0, 0, -smallest, 65504, -65504]
    assert fp16_at_least(x).tolist() == [0, 0, smallest, 0, 65504, -65504]


@settings(max_examples=150)
@given(
    bits=st.sampled_from([8, 4, 2]),
    dim=st.sampled_from([1, 3]),
    magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 100.0]),
    shift=st.sampled_from([0.0, 1.0, -37.0, 900.0]),
    seed=st.integers(0, 10_000),
)
def test_error_is_at_most_half_a_scale(
    bits: int, dim: int, magnitude: float, shift: float, seed: int
) -> None:
    x = torch.randn(3, 7, 2, 16, generator=torch.Generator().manual_seed(seed)) * magnitude + shift
    scale, offset = scale_and_offset(x, bits, dim)
    assert scale.shape == offset.shape == x.amax(dim, keepdim=True).shape
    codes = quantize(x, scale, offset, bits)
    assert codes.dtype is torch.uint8
    assert int(codes.max()) < 2**bits
    error = (dequantize(codes, scale, offset).double() - x.double()).abs()
    rounding = 4 * torch.finfo(torch.float32).eps * x.abs().max().double()
    assert bool((error <= scale.double() / 2 + rounding).all())
    # The range is not wasted: a scale from exact minimum and maximum would be hardly smaller.
    exact = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)).double() / (2**bits - 1)
    offset_step = (fp16_at_least(x.abs().amax()) * 2**-10).double() + 2.0**-24
    assert bool((scale.double() <= exact * (1 + 2**-10) + offset_step / (2**bits - 1) + 2.0**-24).all())


def test_the_formula_on_numbers_worked_by_hand() -> None:
    x = torch.tensor([[-1.0, 0.5, 0.9, 2.0]])
    scale, offset = scale_and_offset(x, 2, dim=1)
    assert (scale.item(), offset.item()) == (1.0, -1.0)
    codes = quantize(x, scale, offset, 2)
    # 0.5 lies in the middle of codes 1 and 2: the even one.
    assert codes.tolist() == [[0, 2, 2, 3]]
    assert dequantize(codes, scale, offset).tolist() == [[-1.0, 1.0, 1.0, 2.0]]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_equal_numbers_are_kept_to_fp16(bits: int) -> None:
    x = torch.full((1, 5), 0.1)
    scale, offset = scale_and_offset(x, bits, dim=1)
    decoded = dequantize(quantize(x, scale, offset, bits), scale, offset)
    assert bool(((decoded - x).abs() <= 0.1 * 2**-11).all())
    zero = torch.zeros(1, 5)
    scale, offset = scale_and_offset(zero, bits, dim=1)
    assert torch.equal(dequantize(quantize(zero, scale, offset, bits), scale, offset), zero)


@settings(max_examples=100)
@given(bits=st.sampled_from([8, 4, 2]), num_codes=st.integers(1, 70), seed=st.integers(0, 1000))
def test_packing_is_exact_and_dense(bits: int, num_codes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (3, 2, num_codes), dtype=torch.uint8, generator=generator)
    before = codes.clone()
    packed = pack(codes, bits)
    assert packed.shape == (3, 2, packed_width(num_codes, bits))
    assert packed.shape[-1] == -(-num_codes * bits // 8)
    assert torch.equal(unpack(packed, bits, num_codes), codes)
    assert torch.equal(codes, before)


def test_planes_of_a_byte() -> None:
    codes = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0], dtype=torch.uint8)
    assert pack(codes, 2).tolist() == [0 | 2 << 2 | 3 << 4 | 1 << 6, 1 | 3 << 2 | 2 << 4]
    assert pack(codes, 4).tolist() == [0 | 3 << 4, 1 | 2 << 4, 2 | 1 << 4, 3]
