"""The codec ``native``: every layer is stored as it is in the pool, to the bit."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from krul_backend.codec.unit import NativeLayer, SegmentPlace
from krul_backend.codec.units import UnitsCodec, UnitSegment
from krul_backend.errors import CodecError
from krul_backend.strategy import Strategy

Damage = Annotated[float, Meta(ge=0, le=sys.float_info.max)] | UnsetType | None
"""Noted damage as JSON has it: None if it is infinite, absent if it was not measured."""


def stored_damage(damage: float | None) -> Damage:
    """Noted damage as it is stored; ``known_damage`` reads it."""
    if damage is None:
        return UNSET
    return damage if math.isfinite(damage) else None


def known_damage(stored: Damage) -> float | None:
    """Noted damage as ``UnitSegment`` has it."""
    if isinstance(stored, UnsetType):
        return None
    return math.inf if stored is None else stored


class _Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a segment as JSON has them."""

    codec: Literal["native"]
    version: Literal[1]
    group_size: Annotated[int, Meta(ge=1)]
    damage: Damage = UNSET


class NativeCodec(UnitsCodec):
    """Stores layers as they are, in records of ``group_size`` tokens, so that tails of them can be read."""

    name = "native"

    def _segment(self, strategy: Strategy, place: SegmentPlace, damage: float | None = None) -> UnitSegment:
        if not strategy.is_lossless:
            raise CodecError("a strategy that changes layers is none of the codec native")
        return UnitSegment(strategy, place, dict.fromkeys(strategy.units, NativeLayer(place)), damage)

    def _params(self, segment: UnitSegment) -> dict[str, Any]:
        stored = _Stored("native", 1, segment.place.group_size, stored_damage(segment.damage))
        params: dict[str, Any] = msgspec.to_builtins(stored)
        return params

    def _parse(self, params: Mapping[str, Any], start_token: int, num_tokens: int) -> UnitSegment:
        try:
            stored = msgspec.convert(params, _Stored)
        except (msgspec.ValidationError, OverflowError, TypeError) as error:
            raise CodecError(f"not the parameters of codec {self.name!r}: {error}") from error
        place = self._place(start_token, num_tokens, stored.group_size)
        strategy = Strategy.from_pairs(self.model.num_layers)
        return self._segment(strategy, place, known_damage(stored.damage))
