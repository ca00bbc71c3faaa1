"""Natively stored tails of several segments, written to their slots together, and rows read from slots: by
torch, and in triton's interpreter by a kernel."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from unittest.mock import PropertyMock, patch

import pytest
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
from tests.support.triton_runs import compiled_ptx, run_interpreted

CPU = Device(torch.device("cpu"))
GROUP = 8
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=IS_INTERPRETED)
def by_kernel() -> Iterator[None]:
    with patch.object(Device, "runs_triton", PropertyMock(return_value=True)):
        yield


shapes = st.sampled_from(
    [
        LayerShape(2, 8, 8, torch.float32),
        LayerShape(3, 64, 64, torch.bfloat16),
        LayerShape(1, 12, 8, torch.float32),  # rows of two sizes
        LayerShape(1, 3, 5, torch.bfloat16),  # of no multiple of 8 bytes
        LayerShape(3, 5, 5, torch.float8_e4m3fn),  # an odd number of bytes
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


examples = settings(max_examples=20 if IS_INTERPRETED else 150, derandomize=IS_INTERPRETED)


@examples
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


if IS_INTERPRETED:

    @examples
    @given(shape=shapes, num_tokens=st.integers(1, 3 * GROUP + 1), seed=st.integers(1, 99))
    def test_rows_of_the_pool_become_the_block_that_torch_makes(
        shape: LayerShape, num_tokens: int, seed: int
    ) -> None:
        codec = ModelCodecs(shape, 1, None, CodecOptions(group_size=GROUP))
        pool = random_rows(shape, 2 * num_tokens, seed)
        slots = torch.randperm(2 * num_tokens, generator=torch.Generator().manual_seed(seed))[:num_tokens]
        kv = LayerKV(pool.k[slots], pool.v[slots])
        as_read = TokenRun([kv].__getitem__, 0, num_tokens)
        in_pool = TokenRun(
            lambda layer: pytest.fail("it is read twice"), 0, num_tokens, in_pool=(_Pool(pool), slots)
        )
        plan = UnitPlan(Strategy.from_pairs(1))
        blocks = [dict(codec.native.encode(run, plan).blocks)[0] for run in (as_read, in_pool)]
        assert torch.equal(*blocks)

    @pytest.mark.parametrize("padding", [1, 3, 4])
    def test_rows_lie_at_any_number_of_wider_ones(padding: int) -> None:
        """Where rows do not all begin at a multiple of 8 bytes, they are copied number by number."""
        from krul_backend.triton_rows import move_rows

        block = torch.randint(0, 256, (5, 2, 32), dtype=torch.uint8)
        starts = torch.arange(10).view(5, 2).T.contiguous() * 4
        wider = torch.zeros(2, 9, padding + 16, dtype=torch.bfloat16)
        slots = torch.tensor([3, 8, 0, 5, 1])
        k, v = wider[..., padding:].unflatten(2, (2, 8))
        move_rows(starts, 8, block.view(-1), k, v, slots, to_pool=True)
        expected = torch.zeros_like(wider)
        expected[:, slots, padding:] = block.view(torch.bfloat16).transpose(0, 1)
        assert torch.equal(wider.view(torch.int16), expected.view(torch.int16))


else:

    def test_the_kernel_in_the_interpreter() -> None:
        run_interpreted("tests/unit/test_native_tails.py")

    @pytest.mark.parametrize("compute_capability", [80, 90, 100])
    @pytest.mark.parametrize("to_pool", [True, False])
    def test_the_kernel_copies_16_bytes_at_a_time(*, to_pool: bool, compute_capability: int) -> None:
        from krul_backend.triton_rows import copy_rows, move_launch

        shape = LayerShape(8, 128, 128, torch.bfloat16)
        pool = random_rows(shape, 100, 1)
        block = torch.empty(100 * (shape.k_token_bytes + shape.v_token_bytes), dtype=torch.uint8)
        starts = torch.zeros(2, 100, dtype=torch.int64)
        _, arguments = move_launch(starts, 16, block, pool.k, pool.v, starts[0], to_pool=to_pool)
        ptx = compiled_ptx(copy_rows, arguments, compute_capability)
        assert set(re.findall(r"st\.global[.\w]*", ptx)) == {"st.global.v2.b64"}


class _Pool:
    def __init__(self, kv: LayerKV) -> None:
        self.kv = kv

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv.k, self.kv.v


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
