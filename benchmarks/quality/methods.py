"""The rows of the benchmark: ways to store a history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.baselines import RandomSelector, SeededEvidence
from krul_backend.attention.rows import QueryRows
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.selectors import (
    FixedSelector,
    KrulSelector,
    MatchingSelector,
    MiniCacheSelector,
    StrategySelector,
    UnsharedSelector,
)
from krul_backend.strategy.strategy import Pair, Precision, Strategy

LAYER_RATIOS = (0.25, 0.5)
"""r_l of the sharing rows. r_l = 0 shares nothing: that is the rows `full`, `int8` and `int4`."""

PRECISIONS = (Precision.NATIVE, Precision.INT8, Precision.INT4)
EVICTION_RATIOS = (4 / 3, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True, eq=False)
class Turn:
    """What a server knows when a turn ends and its segment is stored.

    ``segment[l]`` is the KV to store, tokens ``[start_token, start_token + S)``, and ``kv[l]`` that of all
    tokens up to the turn's end, as they were used; both in the pool's dtype, keys with rotary embedding.
    ``rows`` are query rows sampled in this turn; ``statistics`` those of all turns so far.
    """

    start_token: int
    segment: tuple[LayerKV, ...]
    kv: tuple[LayerKV, ...]
    rows: QueryRows
    statistics: AttentionStatistics
    conversation_seed: int


@dataclass(frozen=True, eq=False)
class Stored:
    """A segment after storing: its decoded KV, layer by layer, and every byte that was kept of it.

    Bytes that belong to the model, such as a basis learned before, are not counted. ``pairs``: layers that
    share. ``damage``: the divergence in nats per token that is expected when the turn ends, if the method
    predicts it.
    """

    segment: tuple[LayerKV, ...]
    num_bytes: int
    pairs: tuple[Pair, ...] = ()
    damage: float | None = None


StoreTurn = Callable[[Turn], Stored]


class Method(ABC):
    """One row that stores segments. ``family`` is what the figure gives one colour."""

    name: str
    family: str

    @abstractmethod
    def start(self) -> StoreTurn:
        """The function that stores one conversation's turns, called in their order: it may keep a state."""


@dataclass(frozen=True)
class Compression(Method):
    """A selector's pairs at a precision, encoded and decoded by the codec that a server has."""

    name: str
    family: str
    codec: SegmentCodec = field(repr=False)
    selector: StrategySelector = field(repr=False)
    precision: Precision
    layer_ratio: float = 0.0

    def start(self) -> StoreTurn:
        return self._store

    def _store(self, turn: Turn) -> Stored:
        num_layers, segment = len(turn.segment), turn.segment
        evidence = SeededEvidence(num_layers, turn.statistics, turn.conversation_seed)
        chosen = self.selector.select(evidence)
        strategy = Strategy.from_pairs(num_layers, chosen.pairs, self.precision)
        start, num_tokens = turn.start_token, len(segment[0].k)
        encoding = self.codec.prepare(strategy, segment.__getitem__, start_token=start, num_tokens=num_tokens)
        blocks: dict[int, Tensor] = {}
        for unit in strategy.units:
            encoded = self.codec.encode_unit(encoding, unit, [segment[layer] for layer in unit])
            blocks |= dict(zip(unit, encoded, strict=True))
        decoder = self.codec.open_units(encoding.params, start_token=start, num_tokens=num_tokens)
        decoded = tuple(decoder.decode(layer, blocks, 0, num_tokens) for layer in range(num_layers))
        return Stored(decoded, sum(block.numel() for block in blocks.values()), strategy.pairs)


@dataclass(frozen=True)
class Eviction:
    """Keeps so many tokens that the bytes are those of a compression by ``ratio``."""

    name: str
    ratio: float
    family: str = "h2o"


def all_methods(codec: SegmentCodec, gamma: float) -> list[Method | Eviction]:
    """All rows; ``codec`` is the model's, ``gamma`` the I-R threshold of Algorithm 1."""
    alone = (Precision.NATIVE, Precision.INT8, Precision.INT4, Precision.INT2)
    names = {each: "full" if each is Precision.NATIVE else each.value for each in alone}
    return [
        *(Compression(name, name, codec, UnsharedSelector(), each) for each, name in names.items()),
        *(
            Compression(f"{family} r={ratio} {precision.value}", family, codec, selector, precision, ratio)
            for ratio in LAYER_RATIOS
            for family, selector in _selectors(gamma, ratio).items()
            for precision in PRECISIONS
        ),
        *(Eviction(f"h2o {ratio:.2f}x", ratio) for ratio in EVICTION_RATIOS),
    ]


def _selectors(gamma: float, layer_ratio: float) -> dict[str, StrategySelector]:
    return {
        "minicache": MiniCacheSelector(layer_ratio),
        "krul-fixed": FixedSelector(layer_ratio),
        "krul": KrulSelector(layer_ratio, gamma=gamma),
        "matching": MatchingSelector(layer_ratio, gamma=gamma),
        "random": RandomSelector(layer_ratio),
    }
