"""Stores a pair of layers with one direction per token and head (Krul, section 6.1; MiniCache, section 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from krul_backend.codec.layout import GroupRun, LayerKV, Section, Views
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.pairs.parameters import RetainedCounts
from krul_backend.codec.pairs.units import FusedUnit
from krul_backend.codec.pairs.vector_format import FP16_MAX, VectorFormat, key_and_value_formats
from krul_backend.codec.unit import SegmentPlace
from krul_backend.device import Device
from krul_backend.strategy import Precision

_LOWER = 0
_STEP_TOKENS = 1024

_SMALLEST_NORM = 1e-30
"""Shorter vectors have no direction."""

_SMALLEST_SINE = 1e-4
"""Below it ``sin((1 - t) W) / sin W`` is more rounding than number, and linear weights differ from it by less
than 1e-8 relative (at W near 0; near pi no interpolation is better than another)."""

_ALWAYS = 2.0
"""Stands for the distance of tokens that are always retained; angular distances are at most 1."""


class SharedPair(FusedUnit):
    """Stores, per token and head, one direction between both layers' vectors, and both norms.

    ::

        block of the lower layer = | records: directions, norms | trailer: retained rows and their tokens |
        block of the upper layer = | records: norms             | trailer: retained rows                  |

    The rows of retained tokens are the pool's own, bit-exact, keys with their rotary embedding on. Their
    tokens are listed head after head, ascending, ``retained.k[h]`` and ``retained.v[h]`` for head ``h``.
    """

    def __init__(
        self, place: SegmentPlace, precision: Precision, retained: RetainedCounts, options: CodecOptions
    ) -> None:
        shape = place.shape
        num_heads = shape.num_kv_heads
        self.retained = retained
        self._options = options
        self.formats = key_and_value_formats(shape, precision)
        norms = tuple(
            Section(f"{name}_norm", torch.float16, (num_heads, 1), per_token=True) for name in ("k", "v")
        )
        num_k, num_v = sum(retained.k), sum(retained.v)
        rows = (
            Section("k_rows", shape.dtype, (num_k, shape.k_head_dim), per_token=False),
            Section("v_rows", shape.dtype, (num_v, shape.v_head_dim), per_token=False),
        )
        token_type = torch.int16 if place.num_tokens <= 2**15 else torch.int32
        tokens = (
            Section("k_tokens", token_type, (num_k,), per_token=False),
            Section("v_tokens", token_type, (num_v,), per_token=False),
        )
        k, v = self.formats
        lower = place.layout(k.sections() + v.sections() + norms, rows + tokens)
        super().__init__(place, [lower, place.layout(norms, rows)])

    def sources(self, index: int) -> tuple[int, ...]:
        return (_LOWER,) if index == _LOWER else (_LOWER, index)

    def encode(self, layers: Sequence[LayerKV]) -> tuple[torch.Tensor, ...]:
        blocks = tuple(layout.new_block(kv.k.device) for layout, kv in zip(self.layouts, layers, strict=True))
        for run in self.layouts[_LOWER].runs(0, self.place.num_tokens):
            views = [
                layout.record_views(block, run) for layout, block in zip(self.layouts, blocks, strict=True)
            ]
            of_layers = [self.place.vectors(kv, run) for kv in layers]
            for directions, *vectors in zip(self.formats, *of_layers, strict=True):
                self._write(directions, vectors, views)
        trailers = [layout.trailer_views(block) for layout, block in zip(self.layouts, blocks, strict=True)]
        start_token = self.place.start_token
        for name, vectors, counts in (
            ("k", [kv.k for kv in layers], self.retained.k),
            ("v", [kv.v for kv in layers], self.retained.v),
        ):
            tokens = retained_tokens(layer_distances(*vectors), counts, start_token, self._options)
            heads = _heads(counts, tokens.device)
            trailers[_LOWER][f"{name}_tokens"].copy_(tokens)
            for trailer, x in zip(trailers, vectors, strict=True):
                trailer[f"{name}_rows"].copy_(x[tokens, heads])
        return blocks

    def _write(
        self, directions: VectorFormat, vectors: Sequence[torch.Tensor], views: Sequence[Views]
    ) -> None:
        """``vectors`` fp32 ``[G, n, H, D]`` of both layers."""
        units = []
        for x, layer_views in zip(vectors, views, strict=True):
            unit, norm = unit_directions(x)
            units.append(unit)
            layer_views[f"{directions.name}_norm"].copy_(norm.clamp_(max=FP16_MAX))
        directions.write(slerp(units[0], units[1], self._options.slerp_t), views[_LOWER])

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lower = self.layouts[_LOWER].record_views(blocks[0], run)
        own = self.layouts[index].record_views(blocks[-1], run)
        # Rounding and codes have changed the length of the directions.
        k, v = (unit_directions(part.read(lower))[0] * own[f"{part.name}_norm"] for part in self.formats)
        return self.place.with_rotary(k, run), v.flatten(0, 1)

    def decode(self, index: int, blocks: Sequence[torch.Tensor], first_token: int, end_token: int) -> LayerKV:
        kv = super().decode(index, blocks, first_token, end_token)
        checked = self.check(index, blocks, first_token)
        lower = self.layouts[_LOWER].trailer_views(checked[0])
        own = self.layouts[index].trailer_views(checked[-1])
        for name, x, counts in (("k", kv.k, self.retained.k), ("v", kv.v, self.retained.v)):
            row = lower[f"{name}_tokens"].long() - first_token
            is_wanted = (row >= 0) & (row < x.shape[0])
            x[row[is_wanted], _heads(counts, row.device)[is_wanted]] = own[f"{name}_rows"][is_wanted]
        return kv


def layer_distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Angular distance of two layers' vectors ``[T, H, D]``, by token and head: fp32 ``[T, H]``.

    Keys may have their rotary embedding or not: it turns both layers' keys alike.
    """
    parts = [
        angular_distance(unit_directions(a.float())[0], unit_directions(b.float())[0])
        for a, b in zip(torch.split(first, _STEP_TOKENS), torch.split(second, _STEP_TOKENS), strict=True)
    ]
    return torch.cat(parts)


def count_retained(
    first: LayerKV, second: LayerKV, start_token: int, options: CodecOptions
) -> RetainedCounts:
    """Count the rows of a pair that keep their own vectors, in a segment that starts at ``start_token``."""
    return RetainedCounts(
        retained_counts(layer_distances(first.k, second.k), start_token, options),
        retained_counts(layer_distances(first.v, second.v), start_token, options),
    )


def _heads(counts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The head of each retained row, int64 ``[sum(counts)]``."""
    repeats = Device(device).from_list(counts)
    return torch.arange(len(counts), device=device).repeat_interleave(repeats, output_size=sum(counts))


def unit_directions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., D]`` as unit vectors ``[..., D]`` and norms ``[..., 1]``; the direction of zero is zero."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norms.clamp(min=_SMALLEST_NORM), norms


def cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Cosine of the angle between unit vectors ``[..., D]``: ``[..., 1]`` in [-1, 1]."""
    return (first * second).sum(dim=-1, keepdim=True).clamp_(-1, 1)


def angular_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``arccos(cosine) / pi`` of unit vectors ``[..., D]``: ``[...]`` in [0, 1] (MiniCache, equation 5)."""
    return torch.arccos(cosines(first, second)).squeeze(-1) / math.pi


def slerp(first: torch.Tensor, second: torch.Tensor, t: float) -> torch.Tensor:
    """The unit vector at ``t`` of the way along the great circle from ``first`` to ``second`` (both unit).

    ``sin((1 - t) W) / sin W * first + sin(t W) / sin W * second`` with ``W = arccos(cosine)`` (MiniCache,
    equation 3). Where the vectors are parallel or opposite, the weights are ``1 - t`` and ``t``. If one of
    them is zero, the result is the other; if both are, zero.
    """
    angle = torch.arccos(cosines(first, second))
    sine = torch.sin(angle)
    is_flat = sine < _SMALLEST_SINE
    safe_sine = torch.where(is_flat, 1, sine)
    first_weight = torch.where(is_flat, 1 - t, torch.sin((1 - t) * angle) / safe_sine)
    second_weight = torch.where(is_flat, t, torch.sin(t * angle) / safe_sine)
    merged, _ = unit_directions(torch.addcmul(first * first_weight, second, second_weight))
    return merged


def must_retain(
    num_tokens: int, start_token: int, options: CodecOptions, device: torch.device
) -> torch.Tensor:
    """Mark the conversation's first tokens, which are retained whatever their distance: bool ``[T]``.

    The segment starts at ``start_token``.
    """
    return start_token + torch.arange(num_tokens, device=device) < options.num_first_tokens


def retained_counts(distances: torch.Tensor, start_token: int, options: CodecOptions) -> tuple[int, ...]:
    """Count the tokens that each head retains, by angular distances ``[T, H]``; see ``CodecOptions``."""
    forced = must_retain(len(distances), start_token, options, distances.device)
    low, high = torch.aminmax(distances, dim=0)
    is_far = distances > high - (high - low) * options.retained_amount
    counts: list[int] = (is_far | forced.unsqueeze(1)).sum(dim=0).tolist()
    return tuple(counts)


def retained_tokens(
    distances: torch.Tensor, counts: tuple[int, ...], start_token: int, options: CodecOptions
) -> torch.Tensor:
    """The tokens that are retained, int64 ``[sum(counts)]``: head after head, ascending within each.

    Head ``h`` retains ``counts[h]`` tokens: first those that it must, then those with the largest
    ``distances [T, H]``; of equal distances the earlier token.
    """
    forced = must_retain(distances.shape[0], start_token, options, distances.device)
    order = distances.masked_fill(forced.unsqueeze(1), _ALWAYS).argsort(dim=0, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(order.shape[0], device=order.device).unsqueeze(1).expand_as(order))
    is_retained = rank < Device.of(rank).from_list(counts)
    return is_retained.t().nonzero()[:, 1]
