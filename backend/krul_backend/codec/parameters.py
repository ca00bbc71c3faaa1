"""The options of encoding a segment, and the parameters that are stored beside its blocks to decode them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from krul_backend.errors import CodecError, StrategyError
from krul_backend.strategy.strategy import Strategy

CODEC_NAME = "segment"
CODEC_VERSION = 2
"""Both are in ``_Stored``, too."""


class RetentionRule(Enum):
    """Says which tokens of a pair keep their own vectors, by the angle between the two layers' vectors.

    ``THRESHOLD`` (MiniCache, section 4.3): distance above ``d_max - (d_max - d_min) * amount``, with the
    largest and smallest distance of the head in the segment. MiniCache's inequality, read literally, keeps
    the most similar tokens; its text says the most different ones, and that is what is done here.
    ``SHARE``: the ``amount`` share of a head's tokens with the largest distances, rounded up.
    """

    THRESHOLD = "threshold"
    SHARE = "share"


@dataclass(frozen=True)
class CodecOptions:
    """Options for encoding blocks. What decoding needs of these options is stored with each segment.

    ``group_size``: tokens that have one scale per key channel, and the unit of partial reads. The other
    options are for pairs that share directions.
    ``slerp_t``: how far the shared direction lies from the lower layer's to the upper layer's.
    ``retention``, ``retained_amount``: see ``RetentionRule``; 0 retains no token for its angle.
    ``num_first_tokens``: tokens at the start of the conversation that are always retained.

    Raises:
        CodecError: an amount or t outside [0, 1], no tokens in a group, or a negative number of tokens.
    """

    group_size: int = 64
    slerp_t: float = 0.6
    retention: RetentionRule = RetentionRule.THRESHOLD
    retained_amount: float = 0.05
    num_first_tokens: int = 1

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise CodecError(f"group_size {self.group_size} is no number of tokens (at least 1)")
        if self.num_first_tokens < 0:
            raise CodecError(f"num_first_tokens {self.num_first_tokens} is negative")
        for name, value in (("slerp_t", self.slerp_t), ("retained_amount", self.retained_amount)):
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise CodecError(f"{name} {value} is not in [0, 1]")


_Counts = tuple[Annotated[int, Meta(ge=0)], ...]


class RetainedCounts(Struct, frozen=True, forbid_unknown_fields=True):
    """Counts the tokens of a pair of layers that keep their own vectors instead of a shared one.

    ``k`` has one number per KV head for keys, ``v`` one for values.
    """

    k: _Counts
    v: _Counts


class _Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a segment as JSON has them."""

    codec: Literal["segment"]
    version: Literal[2]
    group_size: Annotated[int, Meta(ge=1)]
    are_keys_unrotated: bool
    layers: list[Any]
    pairs: tuple[RetainedCounts, ...]
    damage: Annotated[float, Meta(ge=0, le=sys.float_info.max)] | UnsetType | None = UNSET


@dataclass(frozen=True)
class SegmentParameters:
    """Everything that decoding a segment's blocks takes beside the model's own shape.

    ``pairs`` has one entry for each pair of ``strategy.pairs``. ``are_keys_unrotated``: compressed keys
    are stored without their rotary embedding.

    ``damage``: the KL divergence of next-token distributions, in nats, that is expected when a conversation
    gets this KV back. It includes what the KV had lost before it was encoded. Infinite if it is unknown. None
    if it was not measured: then the JSON leaves it out, and parsing gives 0 for a lossless strategy and
    infinity for any other.
    """

    strategy: Strategy
    group_size: int
    are_keys_unrotated: bool
    pairs: tuple[RetainedCounts, ...]
    damage: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that ``parse`` accepts."""
        values = {
            "codec": CODEC_NAME,
            "version": CODEC_VERSION,
            "group_size": self.group_size,
            "are_keys_unrotated": self.are_keys_unrotated,
            "layers": self.strategy.to_json(),
            "pairs": [{"k": list(pair.k), "v": list(pair.v)} for pair in self.pairs],
        }
        if self.damage is not None:
            values["damage"] = self.damage if math.isfinite(self.damage) else None
        return values

    @classmethod
    def parse(
        cls, params: Mapping[str, Any], *, num_layers: int, num_kv_heads: int, num_tokens: int
    ) -> SegmentParameters:
        """Parse ``params`` and check them against the model and the segment's length.

        Raises:
            CodecError: for anything but what ``to_json`` writes for such a segment.
        """
        try:
            stored = msgspec.convert(params, _Stored)
            strategy = Strategy.from_json(stored.layers)
        except (msgspec.ValidationError, OverflowError, StrategyError, TypeError) as error:
            raise CodecError(f"not the parameters of codec {CODEC_NAME!r}: {error}") from error
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
        damage = math.inf if stored.damage is None else stored.damage
        if isinstance(damage, UnsetType):
            damage = 0.0 if strategy.is_lossless else math.inf
        return cls(strategy, stored.group_size, stored.are_keys_unrotated, stored.pairs, damage)
