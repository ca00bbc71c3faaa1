"""The codec ``pairs``: layers as they are or as codes, alone or in pairs that share directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from krul_backend.codec.layout import ReadLayer
from krul_backend.codec.pairs.parameters import PairParameters, RetainedCounts
from krul_backend.codec.pairs.shared_pair import SharedPair, count_retained
from krul_backend.codec.pairs.units import CodedLayer
from krul_backend.codec.unit import NativeLayer, SegmentPlace, UnitCodec
from krul_backend.codec.units import Unit, UnitsCodec, UnitSegment
from krul_backend.errors import CodecError
from krul_backend.strategy import Pair, Precision, Strategy


class PairCodec(UnitsCodec):
    """Stores layers as a strategy says: each alone or in a pair, each at some precision.

    If the model's rotary embedding is not known, compressed keys keep it, and the parameters say so.
    """

    name = "pairs"

    def _segment(self, strategy: Strategy, place: SegmentPlace, damage: float | None = None) -> UnitSegment:
        none = (0,) * self.model.shape.num_kv_heads
        retained = dict.fromkeys(strategy.pairs, RetainedCounts(none, none))
        return UnitSegment(strategy, place, self._units(strategy, place, retained), damage)

    def _observed(self, segment: UnitSegment, read: ReadLayer, kept_pairs: Sequence[Pair]) -> UnitSegment:
        units = dict(segment.units)
        for pair in kept_pairs:
            lower, upper = (read(layer) for layer in pair)
            retained = count_retained(lower, upper, segment.place.start_token, self._options)
            precision = segment.strategy.layers[pair[0]].precision
            units[pair] = SharedPair(segment.place, precision, retained, self._options)
        return replace(segment, units=units)

    def _params(self, segment: UnitSegment) -> dict[str, Any]:
        place = segment.place
        return PairParameters(
            segment.strategy,
            place.group_size,
            place.rotary is not None,
            tuple(unit.retained for unit in segment.units.values() if isinstance(unit, SharedPair)),
            segment.damage,
        ).to_json()

    def _parse(self, params: Mapping[str, Any], start_token: int, num_tokens: int) -> UnitSegment:
        parameters = PairParameters.parse(
            params,
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.shape.num_kv_heads,
            num_tokens=num_tokens,
        )
        is_unrotated, strategy = parameters.are_keys_unrotated, parameters.strategy
        if is_unrotated and self.model.rotary is None:
            raise CodecError("keys were stored without rotary embedding, and this model's is not known")
        place = self._place(start_token, num_tokens, parameters.group_size, are_keys_unrotated=is_unrotated)
        retained = dict(zip(strategy.pairs, parameters.pairs, strict=True))
        return UnitSegment(strategy, place, self._units(strategy, place, retained), parameters.damage)

    def _units(
        self, strategy: Strategy, place: SegmentPlace, retained: Mapping[Pair, RetainedCounts]
    ) -> dict[Unit, UnitCodec]:
        alone: dict[Precision, UnitCodec] = {Precision.NATIVE: NativeLayer(place)}
        units: dict[Unit, UnitCodec] = {}
        for unit in strategy.units:
            precision = strategy.layers[unit[0]].precision
            if len(unit) == 2:
                units[unit] = SharedPair(place, precision, retained[unit[0], unit[1]], self._options)
                continue
            if precision not in alone:
                alone[precision] = CodedLayer(place, precision)
            units[unit] = alone[precision]
        return units
