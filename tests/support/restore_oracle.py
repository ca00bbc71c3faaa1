"""What a restore into the pool must leave there: what the decoder says, in these slots, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from krul_backend.codec.layout import LayerShape, PoolRows
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitDecoder
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.codec_builders import START_TOKEN, encode_all, random_layers, rotary_table

Restore = Callable[[UnitDecoder, int, dict[int, torch.Tensor], range, PoolRows], None]
"""As ``restore_layer``."""

# Sums in another order, and a result of fp32 that lies near a rounding boundary of the pool's dtype.
RELATIVE_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass(frozen=True)
class RestoreCase:
    """A segment of two layers, and tokens ``[first_token, end_token)`` of it; all of it by default.

    ``retained_share``: the codec's ``retained_amount``; with 1 all tokens of a pair have rows of their own.
    ``has_tail_only``: the blocks start with the group of ``first_token``.
    """

    shape: LayerShape
    precision: Precision
    is_pair: bool
    rotary_dim: int
    is_neox: bool = True
    num_tokens: int = 37
    group_size: int = 16
    first_token: int = 0
    end_token: int | None = None
    has_tail_only: bool = False
    retained_share: float = 0.1

    @property
    def is_exact(self) -> bool:
        if self.is_pair:
            return self.retained_share == 1
        return self.precision is Precision.NATIVE


def encode_case(case: RestoreCase, device: str) -> tuple[dict[int, torch.Tensor], UnitDecoder]:
    """Blocks of both layers on ``device``, and their decoder."""
    rotary = rotary_table(case.rotary_dim, 8192, case.is_neox) if case.rotary_dim > 0 else None
    options = CodecOptions(
        case.group_size,
        retained_amount=case.retained_share,
        # Of equal numbers none is above the smallest one.
        num_first_tokens=0 if case.retained_share < 1 else START_TOKEN + case.num_tokens,
    )
    codec = ModelCodecs(case.shape, 2, rotary, options)
    strategy = Strategy.from_pairs(2, [(0, 1)] if case.is_pair else [], case.precision)
    _, blocks, decoder = encode_all(codec, strategy, random_layers(case.shape, 2, case.num_tokens))
    return {layer: block.to(device) for layer, block in blocks.items()}, decoder


def check_restored(case: RestoreCase, restore: Restore, device: str = "cpu") -> None:
    blocks, decoder = encode_case(case, device)
    first, end = case.first_token, case.num_tokens if case.end_token is None else case.end_token
    if case.has_tail_only:
        blocks = {layer: block[decoder.tail_start(layer, first) :] for layer, block in blocks.items()}
    num_slots = case.num_tokens + 9
    generator = torch.Generator().manual_seed(case.num_tokens)
    slots = torch.randperm(num_slots, generator=generator)[: end - first].to(device)
    shape = case.shape
    for layer in (0, 1) if case.is_pair else (0,):
        k_buffer, v_buffer = (
            torch.full((num_slots, shape.num_kv_heads, dim), 7.0, dtype=shape.dtype, device=device)
            for dim in (shape.k_head_dim, shape.v_head_dim)
        )
        restore(decoder, layer, blocks, range(first, end), PoolRows(k_buffer, v_buffer, slots))
        decoded = decoder.decode(layer, blocks, first, end)
        is_untouched = torch.ones(num_slots, dtype=torch.bool, device=device).index_fill_(0, slots, False)
        for buffer, expected in ((k_buffer, decoded.k), (v_buffer, decoded.v)):
            assert bool((buffer[is_untouched] == 7).all())
            if case.is_exact:
                assert torch.equal(buffer[slots], expected)
                continue
            tolerance = RELATIVE_TOLERANCE[shape.dtype]
            # Rotation adds numbers that may cancel: what they were rounded to counts, not their sum.
            size = float(expected.float().abs().amax())
            torch.testing.assert_close(buffer[slots], expected, rtol=tolerance, atol=size * 1e-5)
