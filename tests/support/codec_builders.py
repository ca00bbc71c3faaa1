"""Random KV and codecs of small models for the codec's tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from krul_backend.codec.interface import EncodedRun, TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.units import UnitDecoder, UnitPlan
from krul_backend.strategy.strategy import Strategy

START_TOKEN = 128


def rotary_table(rotary_dim: int, max_positions: int = 1024, is_neox: bool = True) -> RotaryTable:
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_positions, dtype=torch.float64).outer(frequencies)
    return RotaryTable(angles.cos().float(), angles.sin().float(), is_neox)


def random_layers(shape: LayerShape, num_layers: int, num_tokens: int, seed: int = 0) -> list[LayerKV]:
    """Layers that have something in common, with channels of different mean, as keys have."""
    generator = torch.Generator().manual_seed(seed)

    def parts(head_dim: int) -> list[torch.Tensor]:
        common = torch.randn(num_tokens, shape.num_kv_heads, head_dim, generator=generator)
        offset = torch.randn(shape.num_kv_heads, head_dim, generator=generator)
        own = torch.randn(num_layers, num_tokens, shape.num_kv_heads, head_dim, generator=generator)
        return list((common + offset + own).to(shape.dtype))

    keys, values = parts(shape.k_head_dim), parts(shape.v_head_dim)
    return [LayerKV(k, v) for k, v in zip(keys, values, strict=True)]


def make_codec(
    shape: LayerShape, num_layers: int, options: CodecOptions | None = None, with_rotary: bool = True
) -> ModelCodecs:
    rotary = rotary_table(shape.k_head_dim) if with_rotary else None
    return ModelCodecs(shape, num_layers, rotary, options)


def encode_all(
    codec: ModelCodecs, strategy: Strategy, layers: Sequence[LayerKV], start_token: int = START_TOKEN
) -> tuple[EncodedRun, dict[int, torch.Tensor], UnitDecoder]:
    """Encoding, the block of each layer, and a decoder opened from the parameters alone."""
    num_tokens = layers[0].k.shape[0]
    codec_of = codec.of(strategy)
    encoding = codec_of.encode(TokenRun(layers.__getitem__, start_token, num_tokens), UnitPlan(strategy))
    decoder = codec_of.open(encoding.params, start_token=start_token, num_tokens=num_tokens)
    blocks = dict(encoding.blocks)
    return encoding, blocks, decoder
