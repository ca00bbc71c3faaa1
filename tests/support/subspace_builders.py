"""Bases with a known transform, and KV that lies in their subspace, for the tests of the subspace codec."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, split_vectors, vector_size

SHARE = 0.01
"""The attention that makes a token of ``make_bases`` an average one."""

OUTSIDE_COLUMNS = 8


def make_bases(
    shape: LayerShape,
    layers_of_groups: Sequence[int],
    *,
    rank: int = 20,
    decay: float = 0.85,
    slope: float = 1.0,
    damage_factor: float = 1.0,
    shift_cost: float = 0.0,
    seed: int = 0,
) -> ModelBases:
    """Random orthogonal directions with a metric of their own, variances that fall, and means that are not
    zero. ``rank``: at most so many coefficients per group. What is orthogonal to all of them lies outside.
    ``decay``: of their magnitudes, from one to the next. ``shift_cost``: of each channel."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.Generator().manual_seed(seed + 1000)
    ends = list(itertools.accumulate(layers_of_groups))
    groups = []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        dim, heads = (end - first) * vector_size(shape), (end - first, shape.num_kv_heads)
        used = min(rank, dim)
        directions = torch.linalg.qr(torch.randn(dim, used, generator=generator)).Q
        metric = 0.05 + 0.1 * torch.rand(used, generator=generator)
        outside = 0.1 * torch.randn(dim, OUTSIDE_COLUMNS, generator=others) / OUTSIDE_COLUMNS**0.5
        groups.append(
            GroupBasis(
                first,
                end,
                mean=torch.randn(dim, generator=generator),
                encoder=(directions * metric).contiguous(),
                decoder=(directions / metric).T.contiguous(),
                outside=outside - directions @ (directions.T @ outside),
                shift_costs=torch.full((dim,), shift_cost),
                magnitudes=0.5 * decay ** torch.arange(used),
                attention_means=torch.full(heads, math.log(SHARE)),
                attention_slopes=torch.full(heads, slope),
                attention_levels=torch.full(heads, 1 / math.prod(heads)),
            )
        )
    return ModelBases(shape, tuple(groups), damage_factor)


def make_layers(
    bases: ModelBases,
    num_tokens: int,
    rotary: RotaryTable | None,
    *,
    start_token: int = 0,
    seed: int = 0,
    outside: float = 0.0,
) -> list[LayerKV]:
    """KV of all layers in the pool's dtype, whose coefficients have the magnitudes that the bases state.

    ``outside``: the length of a part of each vector that changes no coefficient.
    """
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(start_token, start_token + num_tokens)
    layers = []
    for basis in bases.groups:
        normal = torch.randn(num_tokens, basis.rank, generator=generator)
        vectors = basis.mean + normal * basis.magnitudes * math.sqrt(math.pi / 2) @ basis.decoder
        vectors += outside * torch.nn.functional.normalize(basis.outside[:, 0], dim=0)
        for kv in split_vectors(vectors, bases.shape, len(basis.layers)):
            k = kv.k if rotary is None else rotary.rotate(kv.k, positions)
            layers.append(
                LayerKV(k.to(bases.shape.dtype).contiguous(), kv.v.to(bases.shape.dtype).contiguous())
            )
    return layers
