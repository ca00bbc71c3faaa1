"""Natively stored tails of several segments, written to their slots with one gather and one scatter."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.unit_restore import NativeTail, NativeTails
from krul_backend.codec.units import UnitPlan
from krul_backend.device import Device
from krul_backend.strategy.strategy import Strategy

CPU = Device(torch.device("cpu"))
GROUP = 8

shapes = st.sampled_from(
    [
        LayerShape(2, 8, 8, torch.float32),
        LayerShape(3, 64, 64, torch.bfloat16),
        LayerShape(1, 12, 8, torch.float32),  # rows of two sizes
        LayerShape(1, 3, 5, torch.bfloat16),  # of no multiple of 8 bytes
        LayerShape(3, 5, 5, torch.uint8),  # an fp8 pool's, of an odd number of bytes
    ]
)


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Segments: number of tokens, and the first and the end of those that are wanted."""
    found = []
    for num_tokens in draw(st.lists(st.integers(1, 3 * GROUP + 1), min_size=1, max_size=5)):
        first = draw(st.integers(0, num_tokens - 1))
        found.append((num_tokens, first, draw(st.integers(first + 1, num_tokens))))
    return found


@settings(max_examples=150, deadline=None)
@given(shape=shapes, wanted=parts(), seed=st.integers(1, 99))
def test_every_row_comes_to_its_slot_to_the_bit_and_no_other_slot_changes(
    shape: LayerShape, wanted: list[tuple[int, int, int]], seed: int
) -> None:
    codec = ModelCodecs(shape, 1, None, CodecOptions(group_size=GROUP))
    tails: list[NativeTail] = []
    pieces: list[torch.Tensor] = []
    expected: list[LayerKV] = []
    for number, (num_tokens, first, end) in enumerate(wanted):
        kv = random_rows(shape, num_tokens, seed + number)
        run = TokenRun([kv].__getitem__, 0, num_tokens)
        encoding = codec.native.encode(run, UnitPlan(Strategy.from_pairs(1)))
        ((_, block),) = encoding.blocks
        unit = codec.native.open(encoding.params, start_token=0, num_tokens=num_tokens).native_units[0]
        assert unit is not None
        tail = NativeTail(unit, first, end)
        tails.append(tail)
        pieces.append(block[block.numel() - tail.num_bytes :])
        expected.append(LayerKV(kv.k[first:end], kv.v[first:end]))
    joined = NativeTails(tails, CPU)
    assert joined.num_bytes == sum(piece.numel() for piece in pieces)
    num_rows = sum(len(kv.k) for kv in expected)
    pool = random_rows(shape, 2 * num_rows, seed - 1)
    before = LayerKV(pool.k.clone(), pool.v.clone())
    slots = torch.randperm(2 * num_rows, generator=torch.Generator().manual_seed(seed))[:num_rows]
    joined.restore(CPU.upload_joined([piece.numpy() for piece in pieces]), pool.k, pool.v, slots)
    before.k[slots] = torch.cat([kv.k for kv in expected])
    before.v[slots] = torch.cat([kv.v for kv in expected])
    assert torch.equal(pool.k.view(torch.uint8), before.k.view(torch.uint8))
    assert torch.equal(pool.v.view(torch.uint8), before.v.view(torch.uint8))


def random_rows(shape: LayerShape, num_tokens: int, seed: int) -> LayerKV:
    """Rows of random bytes, NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (
        torch.randint(256, (num_tokens * token_bytes,), dtype=torch.uint8, generator=generator).view(
            shape.dtype
        )
        for token_bytes in (shape.k_token_bytes, shape.v_token_bytes)
    )
    size = (num_tokens, shape.num_kv_heads)
    return LayerKV(k.view(*size, shape.k_head_dim), v.view(*size, shape.v_head_dim))
