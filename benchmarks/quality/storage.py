"""A history that was stored segment by segment and restored, with each round trip done once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.round_trip import UnitRoundTrip
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.strategy import Precision, Strategy

Unit = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class StoredUnit:
    """One unit of one segment after storing: decoded KV of its layers, and the bytes of their blocks."""

    layers: tuple[LayerKV, ...]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Restored:
    """All segments of a history: ``kv[l]`` of tokens ``[0, num_tokens)`` and the bytes they took."""

    kv: tuple[LayerKV, ...]
    num_tokens: int
    num_bytes: int


class StoredHistory:
    """The segments of one history, in order. ``codecs`` by name of the way in which pairs are shared.

    A unit's round trip does not depend on what the rest of the strategy is, so that methods which agree about
    a unit of a segment use one result.
    """

    def __init__(self, codecs: Mapping[str, SegmentCodec]) -> None:
        self._codecs = codecs
        self._segments: list[tuple[int, tuple[LayerKV, ...]]] = []
        self._units: dict[tuple[str, int, Unit, Precision], StoredUnit] = {}

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def num_tokens(self) -> int:
        if not self._segments:
            return 0
        start, kv = self._segments[-1]
        return start + len(kv[0].k)

    def add_segment(self, kv: Sequence[LayerKV]) -> None:
        """``kv[l]``: the next tokens' KV in the pool's dtype, keys with their rotary embedding."""
        self._segments.append((self.num_tokens, tuple(kv)))

    def unit(self, sharing: str, segment: int, unit: Unit, precision: Precision) -> StoredUnit:
        """One unit of one segment, stored and read back."""
        if len(unit) == 1:
            # how pairs are shared says nothing about a layer alone
            sharing = next(iter(self._codecs))
        key = (sharing, segment, unit, precision)
        if key not in self._units:
            start, kv = self._segments[segment]
            trip = UnitRoundTrip(self._codecs[sharing], start_token=start)
            layers, token_bytes = trip(unit, precision, [kv[layer] for layer in unit])
            self._units[key] = StoredUnit(tuple(layers), round(token_bytes * len(kv[0].k)))
        return self._units[key]

    def restore(self, sharing: str, strategies: Sequence[Strategy]) -> Restored:
        """The first ``len(strategies)`` segments, each stored by its own strategy; at least one."""
        num_layers = len(strategies[0].layers)
        parts: list[list[LayerKV]] = [[] for _ in range(num_layers)]
        num_bytes = 0
        for segment, strategy in enumerate(strategies):
            for unit in strategy.units:
                stored = self.unit(sharing, segment, unit, strategy.layers[unit[0]].precision)
                num_bytes += stored.num_bytes
                for layer, kv in zip(unit, stored.layers, strict=True):
                    parts[layer].append(kv)
        restored = tuple(concatenate(layer_parts) for layer_parts in parts)
        return Restored(restored, len(restored[0].k), num_bytes)

    def restore_unit(self, sharing: str, num_segments: int, unit: Unit, precision: Precision) -> StoredUnit:
        """One unit in the first ``num_segments`` segments, at least one."""
        stored = [self.unit(sharing, segment, unit, precision) for segment in range(num_segments)]
        layers = (concatenate(parts) for parts in zip(*(part.layers for part in stored), strict=True))
        return StoredUnit(tuple(layers), sum(part.num_bytes for part in stored))


def concatenate(parts: Sequence[LayerKV]) -> LayerKV:
    """KV of the tokens of all parts, in order."""
    return LayerKV(torch.cat([kv.k for kv in parts]), torch.cat([kv.v for kv in parts]))


def token_slice(kv: Sequence[LayerKV], start: int, end: int) -> tuple[LayerKV, ...]:
    return tuple(LayerKV(layer.k[start:end], layer.v[start:end]) for layer in kv)
