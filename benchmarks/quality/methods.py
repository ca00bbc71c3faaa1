"""The rows of the benchmark: ways to store a history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson
import torch
from torch import Tensor

from benchmarks.baselines import FixedSelector, MatchingSelector, RandomSelector, SeededEvidence
from krul_backend.attention.rows import QueryRows, attention_drawn, attention_rows
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.pairs.selectors import (
    KrulSelector,
    MiniCacheSelector,
    StrategySelector,
    UnsharedSelector,
)
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import MOST_OUTSIDE, SubspaceCodec
from krul_backend.codec.units import UnitPlan
from krul_backend.strategy.strategy import Pair, Precision, Strategy
from krul_sglang.engine.budget.coarse import coarse_plan

LAYER_RATIOS = (0.25, 0.5)
"""r_l of the sharing rows. r_l = 0 shares nothing: that is the rows `full`, `int8` and `int4`."""

PRECISIONS = (Precision.NATIVE, Precision.INT8, Precision.INT4)
EVICTION_RATIOS = (4 / 3, 2.0, 4.0, 8.0, 16.0)
_ROWS_PER_BLOCK = 256
_INDEX_BYTES = 4


@dataclass(frozen=True, eq=False)
class Turn:
    """What a server knows when a turn ends and its segment is stored.

    ``segment[l]`` is the KV to store, tokens ``[start_token, start_token + S)``, and ``kv[l]`` that of all
    tokens up to the turn's end, as they were used; both in the pool's dtype, keys with rotary embedding.
    ``history_tokens``: of the whole conversation, which only methods that keep its end exact may look at.
    ``rows`` are query rows sampled in this turn; ``statistics`` those of all turns so far.
    """

    start_token: int
    segment: tuple[LayerKV, ...]
    kv: tuple[LayerKV, ...]
    rows: QueryRows
    statistics: AttentionStatistics
    conversation_seed: int
    history_tokens: int


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
    codec: ModelCodecs = field(repr=False)
    selector: StrategySelector = field(repr=False)
    precision: Precision
    layer_ratio: float = 0.0

    def start(self) -> StoreTurn:
        return self._store

    def _store(self, turn: Turn) -> Stored:
        num_layers, segment = len(turn.segment), turn.segment
        evidence = SeededEvidence(num_layers, turn.statistics, turn.conversation_seed)
        chosen = self.selector.select(evidence)
        run = TokenRun(segment.__getitem__, turn.start_token, len(segment[0].k))
        return _in_units(self.codec, run, Strategy.from_pairs(num_layers, chosen.pairs, self.precision))


def _in_units(codec: ModelCodecs, run: TokenRun, strategy: Strategy, damage: float | None = None) -> Stored:
    """A run as a server's codec stores it that keeps layers alone or in pairs."""
    encoding = codec.of(strategy).encode(run, UnitPlan(strategy, damage))
    blocks: dict[int, Tensor] = dict(encoding.blocks)
    at = {"start_token": run.start_token, "num_tokens": run.num_tokens}
    decoder = codec.of(strategy).open(encoding.params, **at)
    decoded = tuple(decoder.decode(layer, blocks, 0, run.num_tokens) for layer in range(codec.num_layers))
    return Stored(decoded, sum(block.numel() for block in blocks.values()), strategy.pairs, damage)


@dataclass(frozen=True)
class Eviction:
    """Keeps heavy hitters (H2O, Zhang et al. 2023): as many tokens as take the bytes of a compression by
    ``ratio``."""

    name: str
    ratio: float
    family: str = "h2o"


def all_methods(codec: ModelCodecs, gamma: float) -> list[Method | Eviction]:
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


LIMITS = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Nats per predicted token."""


@dataclass(frozen=True)
class Subspace(Method):
    """Groups of layers in a common subspace, with the largest steps that a limit in nats allows.

    Each turn may lose the share of the limit that its tokens have in the conversation so far: what older
    turns have lost weighs less, the more tokens there are to attend to. As in a server, a turn is stored
    in few bits or natively if the bases cannot represent it within its share.
    """

    name: str
    codec: SubspaceCodec = field(repr=False)
    others: ModelCodecs = field(repr=False)
    limit: float
    family: str = "subspace"

    def start(self) -> StoreTurn:
        return self._store

    def _store(self, turn: Turn) -> Stored:
        start, num_tokens = turn.start_token, len(turn.segment[0].k)
        attention = attention_drawn(turn.rows, lambda layer: turn.kv[layer].k, start, num_tokens)
        read = turn.segment.__getitem__
        max_damage = self.limit * num_tokens / (start + num_tokens)
        sample = self.codec.sample(read, start_token=start, num_tokens=num_tokens, attention=attention)
        if sample.outside > MOST_OUTSIDE * max_damage:
            run = TokenRun(read, start, num_tokens)
            native = Strategy.from_pairs(self.others.num_layers), 0.0
            found = coarse_plan(max_damage, run, attention, self.others, self.codec, lambda: None)
            return _in_units(self.others, run, *(found or native))
        encoded = self.codec.encode(
            read,
            start_token=start,
            num_tokens=num_tokens,
            attention=attention,
            max_damage=max_damage,
            sample=sample,
        )
        decoder = self.codec.open(encoded.params, start_token=start, num_tokens=num_tokens)
        decoded = decoder.decode_all(encoded.blocks)
        # The parameters have sizes and scales of this segment: they count.
        return Stored(
            tuple(decoded), encoded.num_bytes + len(orjson.dumps(encoded.params)), damage=encoded.damage
        )


def subspace_methods(codec: SubspaceCodec, others: ModelCodecs) -> list[Subspace]:
    """One row for each limit. ``others`` store what the bases cannot."""
    return [Subspace(f"subspace {limit}", codec, others, limit) for limit in LIMITS]


def accumulated_attention(
    queries: Sequence[Tensor], kv: Sequence[LayerKV], kv_heads: Tensor, scaling: float
) -> list[Tensor]:
    """Per layer fp32 ``[Hkv, T]``: the attention each token got from all queries of its KV head's group.

    ``queries[l] [T, H, D]`` of every token of the history.
    """
    totals = []
    for layer_queries, layer in zip(queries, kv, strict=True):
        num_tokens, num_kv_heads, _ = layer.k.shape
        heads = kv_heads.to(layer.k.device)
        total = torch.zeros(num_kv_heads, num_tokens, device=layer.k.device)
        for start in range(0, num_tokens, _ROWS_PER_BLOCK):
            end = min(start + _ROWS_PER_BLOCK, num_tokens)
            positions = torch.arange(start, end, device=layer.k.device)
            # [H, R, T]
            rows = attention_rows(layer_queries[positions], layer.k, positions, heads, scaling)
            total.index_add_(0, heads, rows.sum(1))
        totals.append(total)
    return totals


def num_kept_tokens(num_tokens: int, num_bytes: float, shape: LayerShape, num_layers: int) -> int:
    """How many tokens each head of each layer can keep in ``num_bytes``, a 4-byte index with each."""
    head_bytes = (shape.k_head_dim + shape.v_head_dim) * shape.dtype.itemsize + _INDEX_BYTES
    return min(num_tokens, int(num_bytes / (head_bytes * shape.num_kv_heads * num_layers)))


def stored_bytes(num_kept: int, shape: LayerShape, num_layers: int) -> int:
    head_bytes = (shape.k_head_dim + shape.v_head_dim) * shape.dtype.itemsize + _INDEX_BYTES
    return num_kept * head_bytes * shape.num_kv_heads * num_layers


def visible_tokens(accumulated: Sequence[Tensor], num_kept: int) -> list[Tensor]:
    """Per layer bool ``[Hkv, T]`` with ``num_kept`` tokens of each head: the latest half of them, and those
    before that got the most attention.

    H2O decides token by token while the history grows; here one decision is made at its end, with all that
    the tokens have got until then, which can only help it.
    """
    masks = []
    for total in accumulated:
        num_tokens = total.shape[1]
        num_recent = num_kept // 2
        mask = torch.zeros_like(total, dtype=torch.bool)
        mask[:, num_tokens - num_recent :] = True
        older = total[:, : num_tokens - num_recent]
        mask.scatter_(1, older.topk(num_kept - num_recent, dim=1).indices, True)
        masks.append(mask)
    return masks
