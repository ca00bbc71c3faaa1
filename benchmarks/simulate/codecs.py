"""What is stored of a token, layer by layer, in the ways that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.pairs.selectors import num_shared_pairs
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitPlan
from krul_backend.strategy.strategy import Pair, Precision, Strategy
from krul_sglang.sizing.on_paper import HBM_SHARE, Gpu, Model

LAYER_RATIO = 0.5
"""The paper's ``r_l``: half of the layers are in a pair."""
_TOKENS = 1024
_OPTIONS = CodecOptions(retained_amount=0.0, num_first_tokens=53)


@dataclass(frozen=True)
class Codec:
    """``pairs`` share one direction; everything is stored at ``precision``."""

    name: str
    pairs: tuple[Pair, ...]
    precision: Precision


def make_codecs(num_layers: int) -> tuple[Codec, ...]:
    """Native; MiniCache's adjacent pairs of the deep half; as many of Krul's; those with all at 4 bits.

    Krul chooses its pairs for each conversation; here they are around the middle, where the paper finds most
    of them (figure 20).
    """
    num_pairs = num_shared_pairs(num_layers, LAYER_RATIO)
    deep = num_layers - 2 * num_pairs
    middle = (num_layers - 2 * num_pairs) // 2
    return (
        Codec("native", (), Precision.NATIVE),
        Codec("minicache", _adjacent(deep, num_pairs), Precision.NATIVE),
        Codec("krul", _adjacent(middle, num_pairs), Precision.NATIVE),
        Codec("krul-int4", _adjacent(middle, num_pairs), Precision.INT4),
    )


def layer_token_bytes(codec: Codec, model: Model) -> tuple[float, ...]:
    """Bytes of a token in each layer's block, as this project's codec writes them; 5% of tokens retained."""
    single, lower, upper = _unit_token_bytes(model.num_kv_heads, model.head_dim, codec.precision)
    sizes = [single] * model.num_layers
    for i, j in codec.pairs:
        sizes[i], sizes[j] = lower, upper
    return tuple(sizes)


def last_use(codec: Codec, num_layers: int) -> tuple[int, ...]:
    """The layer that needs each block last."""
    layers = list(range(num_layers))
    for i, j in codec.pairs:
        layers[i] = j
    return tuple(layers)


def decode_token_s(codec: Codec, model: Model, gpu: Gpu) -> tuple[float, ...]:
    """Seconds to decode a token: what is stored is read and the native KV written, at the memory's rate.

    Native blocks are copied to their place and need no decoding.
    """
    rate = HBM_SHARE * gpu.hbm_bytes_s * model.num_gpus
    sizes = layer_token_bytes(codec, model)
    shared = {layer for pair in codec.pairs for layer in pair}
    return tuple(
        (sizes[layer] + model.layer_token_bytes) / rate
        if layer in shared or codec.precision is not Precision.NATIVE
        else 0.0
        for layer in range(model.num_layers)
    )


def _adjacent(first: int, num_pairs: int) -> tuple[Pair, ...]:
    return tuple((first + 2 * pair, first + 2 * pair + 1) for pair in range(num_pairs))


@cache
def _unit_token_bytes(num_kv_heads: int, head_dim: int, precision: Precision) -> tuple[float, float, float]:
    """Of a layer alone, and of the lower and the upper layer of a pair: sizes that the codec announces."""
    shape = LayerShape(num_kv_heads, head_dim, head_dim, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn((2, 2, _TOKENS, num_kv_heads, head_dim), generator=generator).bfloat16()
    strategy = Strategy.from_pairs(3, [(1, 2)], precision)

    def read(layer: int) -> LayerKV:
        return LayerKV(*kv[layer % 2])

    codec = ModelCodecs(shape, 3, None, _OPTIONS)
    sizes = codec.of(strategy).encode(TokenRun(read, 0, _TOKENS), UnitPlan(strategy)).layer_num_bytes
    single, lower, upper = (size / _TOKENS for size in sizes)
    return single, lower, upper
