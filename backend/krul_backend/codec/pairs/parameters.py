"""The parameters that are stored beside the blocks of a segment to decode them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from krul_backend.codec.native import Damage, known_damage, stored_damage
from krul_backend.errors import CodecError, StrategyError
from krul_backend.strategy import Strategy

_Counts = tuple[Annotated[int, Meta(ge=0)], ...]


class RetainedCounts(Struct, frozen=True, forbid_unknown_fields=True):
    """Counts the tokens of a pair of layers that keep their own vectors instead of a shared one.

    ``k`` has one number per KV head for keys, ``v`` one for values.
    """

    k: _Counts
    v: _Counts


class _Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a segment as JSON has them."""

    codec: Literal["pairs"]
    version: Literal[1]
    group_size: Annotated[int, Meta(ge=1)]
    are_keys_unrotated: bool
    layers: list[Any]
    pairs: tuple[RetainedCounts, ...]
    damage: Damage = UNSET


@dataclass(frozen=True)
class PairParameters:
    """Everything that decoding a segment's blocks takes beside the model's own shape.

    ``pairs`` has one entry for each pair of ``strategy.pairs``. ``are_keys_unrotated``: compressed keys
    are stored without their rotary embedding. ``damage``: see ``UnitSegment``.
    """

    strategy: Strategy
    group_size: int
    are_keys_unrotated: bool
    pairs: tuple[RetainedCounts, ...]
    damage: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that ``parse`` accepts."""
        stored = _Stored(
            "pairs",
            1,
            self.group_size,
            self.are_keys_unrotated,
            self.strategy.to_json(),
            self.pairs,
            stored_damage(self.damage),
        )
        params: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(stored))
        return params

    @classmethod
    def parse(
        cls, params: Mapping[str, Any], *, num_layers: int, num_kv_heads: int, num_tokens: int
    ) -> PairParameters:
        """Parse ``params`` and check them against the model and the segment's length.

        Raises:
            CodecError: for anything but what ``to_json`` writes for such a segment.
        """
        try:
            stored = msgspec.convert(params, _Stored)
            strategy = Strategy.from_json(stored.layers)
        except (msgspec.ValidationError, OverflowError, StrategyError, TypeError) as error:
            raise CodecError(f"not the parameters of codec 'pairs': {error}") from error
        if len(strategy.layers) != num_layers:
            raise CodecError(f"a strategy of {len(strategy.layers)} layers for a model of {num_layers}")
        if len(stored.pairs) != len(strategy.pairs):
            raise CodecError(f"{len(strategy.pairs)} pairs have as many parameters, got {len(stored.pairs)}")
        for counts in (each for pair in stored.pairs for each in (pair.k, pair.v)):
            if len(counts) != num_kv_heads:
                raise CodecError(
                    f"retained counts of {num_kv_heads} KV heads are needed, got {counts!r:.200}"
                )
            if max(counts) > num_tokens:
                raise CodecError(f"retained counts {counts!r:.200} are not all in 0..{num_tokens}")
        damage = known_damage(stored.damage)
        return cls(strategy, stored.group_size, stored.are_keys_unrotated, stored.pairs, damage)
