from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.interface import LayerShape
from krul_backend.codec.raw import RawCodec
from krul_backend.errors import CodecError

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern can occur: NaNs with any payload, infinities, denormals, negative zero."""
    generator = torch.Generator().manual_seed(seed)
    *outer, last = shape
    raw = torch.randint(0, 256, (*outer, last * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    num_tokens=st.integers(1, 33),
    num_kv_heads=st.integers(1, 5),
    k_head_dim=st.sampled_from([1, 7, 64, 80, 128]),
    v_head_dim=st.sampled_from([1, 5, 64, 96, 128]),
    seed=st.integers(0, 2**31),
)
def test_round_trip_is_bit_exact(
    dtype: torch.dtype, num_tokens: int, num_kv_heads: int, k_head_dim: int, v_head_dim: int, seed: int
) -> None:
    shape = LayerShape(num_kv_heads, k_head_dim, v_head_dim, dtype)
    k = random_bits((num_tokens, num_kv_heads, k_head_dim), dtype, seed)
    v = random_bits((num_tokens, num_kv_heads, v_head_dim), dtype, seed + 1)
    codec = RawCodec()
    num_bytes = codec.layer_num_bytes(shape, num_tokens)
    assert num_bytes == len(bits(k)) + len(bits(v))
    block = torch.zeros(num_bytes, dtype=torch.uint8)
    k_view, v_view = codec.layer_views(block, shape, num_tokens)
    k_view.copy_(k)
    v_view.copy_(v)
    # The documented layout: other readers of a block depend on it.
    assert bits(block) == bits(k) + bits(v)
    k_again, v_again = codec.layer_views(block.clone(), shape, num_tokens)
    assert (k_again.shape, v_again.shape) == (k.shape, v.shape)
    assert bits(k_again) == bits(k)
    assert bits(v_again) == bits(v)


@pytest.mark.parametrize(
    ("dtype", "patterns"),
    [
        (torch.bfloat16, [0x7FC1, 0xFF81, 0x8000, 0x0001, 0x7F80]),
        (torch.float16, [0x7E01, 0xFC01, 0x8000, 0x0001, 0x7C00]),
        (torch.float32, [0x7FC00001, 0x7FC0BEEF, 0x00000001, 0x7F800000, 0x7F812345]),
    ],
)
def test_nan_payloads_survive(dtype: torch.dtype, patterns: list[int]) -> None:
    shape = LayerShape(1, len(patterns), 1, dtype)
    signed = torch.int32 if dtype.itemsize == 4 else torch.int16
    raw = torch.tensor(patterns, dtype=torch.int64).to(signed)
    codec = RawCodec()
    block = torch.zeros(codec.layer_num_bytes(shape, 1), dtype=torch.uint8)
    k, _ = codec.layer_views(block, shape, 1)
    k.copy_(raw.view(dtype).view(1, 1, -1))
    assert torch.equal(codec.layer_views(block, shape, 1)[0].view(signed).flatten(), raw)


def test_views_share_the_block_and_do_not_overlap() -> None:
    shape = LayerShape(2, 4, 3, torch.float16)
    block = torch.zeros(RawCodec().layer_num_bytes(shape, 5), dtype=torch.uint8)
    k, v = RawCodec().layer_views(block, shape, 5)
    k.fill_(1.0)
    assert not v.any()
    v.fill_(2.0)
    assert bool((k == 1.0).all())
    assert k.data_ptr() == block.data_ptr()
    assert v.data_ptr() == block.data_ptr() + 5 * shape.k_token_bytes


@pytest.mark.parametrize("extra", [-64, -1, 1, 64])
def test_a_block_of_the_wrong_size_is_refused(extra: int) -> None:
    shape = LayerShape(2, 8, 8, torch.bfloat16)
    codec = RawCodec()
    num_bytes = codec.layer_num_bytes(shape, 3)
    block = torch.zeros(num_bytes + extra, dtype=torch.uint8)
    with pytest.raises(CodecError, match=f"has {num_bytes} bytes, got {num_bytes + extra}"):
        codec.layer_views(block, shape, 3)


def test_the_right_block_for_another_dtype_is_refused() -> None:
    half, full = LayerShape(2, 8, 8, torch.float16), LayerShape(2, 8, 8, torch.float32)
    block = torch.zeros(RawCodec().layer_num_bytes(half, 3), dtype=torch.uint8)
    with pytest.raises(CodecError):
        RawCodec().layer_views(block, full, 3)
