"""The options of encoding a segment, and the parameters that are stored beside its blocks to decode them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from krul_backend.errors import CodecError, StrategyError
from krul_backend.strategy.strategy import Strategy

CODEC_NAME = "segment"
CODEC_VERSION = 2
_KEYS = {"codec", "version", "group_size", "are_keys_unrotated", "layers", "pairs"}


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


@dataclass(frozen=True)
class RetainedCounts:
    """Counts the tokens of a pair of layers that keep their own vectors instead of a shared one.

    ``k`` has one number per KV head for keys, ``v`` one for values.
    """

    k: tuple[int, ...]
    v: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"k": list(self.k), "v": list(self.v)}


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
            "pairs": [pair.to_json() for pair in self.pairs],
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
        _check_codec(params)
        group_size = params["group_size"]
        if not _is_count(group_size) or group_size < 1:
            raise CodecError(f"group_size {group_size!r} is no number of tokens")
        are_keys_unrotated = params["are_keys_unrotated"]
        if not isinstance(are_keys_unrotated, bool):
            raise CodecError(f"are_keys_unrotated {are_keys_unrotated!r} is neither true nor false")
        strategy = _parse_strategy(params["layers"], num_layers)
        pairs = params["pairs"]
        if not isinstance(pairs, list) or len(pairs) != len(strategy.pairs):
            raise CodecError(f"{len(strategy.pairs)} pairs have as many parameters, got {pairs!r:.200}")
        parsed = tuple(_parse_pair(pair, num_kv_heads, num_tokens) for pair in pairs)
        damage = _parse_damage(params, strategy)
        return cls(strategy, group_size, are_keys_unrotated, parsed, damage)


def _check_codec(params: object) -> None:
    if not isinstance(params, Mapping) or params.get("codec") != CODEC_NAME:
        raise CodecError(f"not the parameters of codec {CODEC_NAME!r}: {params!r:.200}")
    found = params.get("version")
    if type(found) is not int or found != CODEC_VERSION:
        raise CodecError(f"version {found!r} of codec {CODEC_NAME!r} is unknown (known: {CODEC_VERSION})")
    if set(params) - {"damage"} != _KEYS:
        raise CodecError(f"codec parameters are {sorted(_KEYS)}, got {sorted(map(str, params))}")


def _parse_strategy(layers: object, num_layers: int) -> Strategy:
    if not isinstance(layers, list):
        raise CodecError(f"layers of a strategy are a list, got {layers!r:.200}")
    try:
        strategy = Strategy.from_json(layers)
    except (StrategyError, TypeError) as error:
        raise CodecError(f"codec parameters with an impossible strategy: {error}") from error
    if len(strategy.layers) != num_layers:
        raise CodecError(f"a strategy of {len(strategy.layers)} layers for a model of {num_layers}")
    return strategy


def _parse_damage(params: Mapping[str, Any], strategy: Strategy) -> float:
    if "damage" not in params:
        return 0.0 if strategy.is_lossless else math.inf
    damage = params["damage"]
    if damage is None:
        return math.inf
    if isinstance(damage, bool) or not isinstance(damage, (int, float)) or not 0 <= damage < math.inf:
        raise CodecError(f"damage {damage!r} is no number of nats")
    return float(damage)


def _parse_pair(pair: object, num_kv_heads: int, num_tokens: int) -> RetainedCounts:
    if not isinstance(pair, Mapping) or set(pair) != {"k", "v"}:
        raise CodecError(f"a pair has retained counts k and v, got {pair!r:.200}")
    return RetainedCounts(*(_parse_counts(pair[name], num_kv_heads, num_tokens) for name in ("k", "v")))


def _parse_counts(counts: object, num_kv_heads: int, num_tokens: int) -> tuple[int, ...]:
    if not isinstance(counts, list) or len(counts) != num_kv_heads:
        raise CodecError(f"retained counts of {num_kv_heads} KV heads are needed, got {counts!r:.200}")
    if not all(_is_count(count) and count <= num_tokens for count in counts):
        raise CodecError(f"retained counts {counts!r:.200} are not all in 0..{num_tokens}")
    return tuple(counts)


def _is_count(value: object) -> bool:
    """True for an int of 0 or more, but not for a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
