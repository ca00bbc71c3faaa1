"""Learns the bases of a model from texts, and measures how the damage that they expect compares with the
truth."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases, vector_size
from krul_backend.codec.subspace.codec import MOST_OUTSIDE, SubspaceCodec
from krul_backend.codec.subspace.learning import BasisLearner, LearningText
from krul_backend.errors import KrulError
from krul_sglang.learning.reader import History, ReadText, TextReader

logger = logging.getLogger(__name__)

_FEW_LAYERS, _MOST_CHANNELS = 5, 5120
"""A group of a model with few layers has so many of them, and any group at most so many channels, those of
its keys and values on one rank: memory grows with their square."""

_SUMS_BYTES, _FIT_BYTES, _BASES_BYTES, _WORK_BYTES = 16, 8, 8, 64
"""For each square of a group's channels: two fp64 matrices of sums, two fp32 ones of the fit, two of bases
that keep all coefficients, and eight fp64 ones while a group is fitted."""

_LOWERED_BYTES = 4
"""The same of the two matrices in bf16 that a server has besides."""

_LEAST_SHARE = 0.1
"""Of a divergence, at least so much is put down to errors of the tokens' own."""

_LEAST_DIVERGENCE = 1e-9
"""A model that its KV does not matter to has no divergence, and a factor must be positive."""


class LearningError(KrulError):
    """Text from which no bases can be learned."""


@dataclass(frozen=True)
class LearningPlan:
    """How bases are learned.

    ``text_tokens``: the length of the pieces that texts are cut into. ``read_tokens``: of each such piece the
    KV of these is learned from, and of a shorter one the same share; the others are predicted.
    ``layers_of_group``: the most layers that share a basis; fewer of wide or few ones. If more than five do,
    a third of them is in the first group, which a forward waits for. By ``measured_share`` of the pieces, not
    learned from, the damage expected is compared with the truth, at a limit of ``measured_damage`` nats.
    """

    text_tokens: int = 1024
    read_tokens: int = 768
    layers_of_group: int = 10
    measured_share: float = 0.2
    measured_damage: float = 0.01

    def num_read(self, piece: Sequence[int]) -> int:
        """So many tokens of a piece are learned from, the first ones."""
        return len(piece) * self.read_tokens // self.text_tokens

    def group_ends(self, num_layers: int, layer_channels: int) -> list[int]:
        """The last layer of each group, plus one, where keys and values of a layer have so many channels."""
        each = self.most_layers(num_layers, layer_channels)
        return [*range(each if each <= _FEW_LAYERS else each // 3, num_layers, each), num_layers]

    def most_layers(self, num_layers: int, layer_channels: int) -> int:
        """The layers of the largest group: five, or a third of all if these are more, fewer of wide ones."""
        wanted = min(self.layers_of_group, max(_FEW_LAYERS, num_layers // 3))
        return max(1, min(wanted, _MOST_CHANNELS // layer_channels))


def learn_bases(
    reader: TextReader, pieces: Sequence[Sequence[int]], plan: LearningPlan | None = None, tp_size: int = 1
) -> list[ModelBases]:
    """The bases of the reader's model, for each rank of ``tp_size`` those of its KV heads.

    ``pieces``: token ids, each of at most ``plan.text_tokens``.

    Raises:
        LearningError: fewer than two pieces, or KV heads that ``tp_size`` ranks cannot share.
        CodecError: too few tokens.
    """
    plan = LearningPlan() if plan is None else plan
    if len(pieces) < 2:
        raise LearningError(
            f"{len(pieces)} pieces of {plan.text_tokens} tokens are too few to learn from (at least 2)"
        )
    num_measured = max(1, round(plan.measured_share * len(pieces)))
    # Spread over the pieces: neighbours come from one text.
    of_measured = {(2 * index + 1) * len(pieces) // (2 * num_measured) for index in range(num_measured)}
    ranks = [heads_of_rank(reader.shape.num_kv_heads, rank, tp_size) for rank in range(tp_size)]
    shape = replace(reader.shape, num_kv_heads=len(ranks[0]))
    ends = plan.group_ends(reader.num_layers, vector_size(shape))
    learners = [BasisLearner(shape, ends) for _ in ranks]
    texts = reader.read([(ids[: plan.num_read(ids)], ids[plan.num_read(ids) :]) for ids in pieces])
    seeds = [number for number in range(len(pieces)) if number not in of_measured]
    to_learn = reader.to_learn([texts[number] for number in seeds], seeds)
    for number, layers in reversed([*enumerate(learners[0].groups)]):
        # The last layer came first.
        of_layers = [next(to_learn) for _ in layers][::-1]
        of_texts = [_joined(layers_of_text) for layers_of_text in zip(*of_layers, strict=True)]
        for heads, learner in zip(ranks, learners, strict=True):
            learner.learn_group(number, [_of_rank(text, heads) for text in of_texts])
    learned = [learner.bases() for learner in learners]
    measured = [texts[number] for number in sorted(of_measured)]
    of_ranks = damage_ratios(reader, learned, measured, plan.measured_damage)
    for rank, (bases, ratios) in enumerate(zip(learned, of_ranks, strict=True)):
        factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
        logger.info(
            "damage is %.3g times what the metric says; ranks %s",
            factor,
            [group.rank for group in bases.groups],
        )
        learned[rank] = ModelBases(bases.shape, bases.groups, factor)
    return learned


def _joined(layers: Sequence[LearningText]) -> LearningText:
    """Layers of one text together."""
    return LearningText(
        [kv for layer in layers for kv in layer.layers],
        [kv for layer in layers for kv in layer.gradients],
        torch.cat([layer.attention for layer in layers]),
    )


def _of_rank(text: LearningText, heads: range) -> LearningText:
    return LearningText(
        _of_heads(text.layers, heads), _of_heads(text.gradients, heads), text.attention[:, _slice(heads)]
    )


def learning_num_bytes(shape: LayerShape, num_layers: int, tp_size: int) -> int:
    """About the memory that learning takes beside model and texts: see ``learn_bases``. ``shape`` is that of
    all KV heads."""
    of_rank = replace(shape, num_kv_heads=len(heads_of_rank(shape.num_kv_heads, 0, tp_size)))
    squares = _channel_squares(of_rank, num_layers)
    # Of all ranks their fits and finished bases, and of one group its sums and what its fit works with.
    of_one = (_SUMS_BYTES + _WORK_BYTES) * max(squares)
    return tp_size * (_FIT_BYTES + _BASES_BYTES) * sum(squares) + of_one


def most_bases_bytes(shape: LayerShape, num_layers: int) -> int:
    """The memory that a rank's bases take on its device if they keep every coefficient. ``shape``: of its own
    heads."""
    return (_BASES_BYTES + _LOWERED_BYTES) * sum(_channel_squares(shape, num_layers))


def _channel_squares(shape: LayerShape, num_layers: int) -> list[int]:
    """The square of each group's channels, ``shape`` being that of one rank's heads."""
    channels = vector_size(shape)
    ends = [0, *LearningPlan().group_ends(num_layers, channels)]
    return [((end - first) * channels) ** 2 for first, end in pairwise(ends)]


def heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """The KV heads whose KV a rank keeps; one if there are more ranks than heads.

    Raises:
        LearningError: heads that so many ranks cannot share.
    """
    if num_kv_heads % tp_size == 0:
        each = num_kv_heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    if tp_size % num_kv_heads == 0:
        head = tp_rank * num_kv_heads // tp_size
        return range(head, head + 1)
    raise LearningError(f"{num_kv_heads} KV heads cannot be shared by {tp_size} ranks")


def damage_ratios(
    reader: TextReader, of_ranks: Sequence[ModelBases], texts: Sequence[ReadText], max_damage: float
) -> list[list[float]]:
    """Of each rank, and each text, of which its bases keep the rank's heads within ``max_damage`` nats: the
    divergence that this causes over the one that the bases expect; less, on both sides, what is expected of
    errors that all tokens have in common."""
    encoded, tried = [], []
    for rank, bases in enumerate(of_ranks):
        heads = heads_of_rank(reader.shape.num_kv_heads, rank, len(of_ranks))
        codec = SubspaceCodec(bases, reader.rotary)
        for text in texts:
            true, num_tokens = text.history.layers, len(text.history.layers[0].k)
            encoded.append(
                codec.encode(
                    _of_heads(true, heads).__getitem__,
                    start_token=0,
                    num_tokens=num_tokens,
                    attention=text.history.attention[:, _slice(heads)],
                    max_damage=max_damage,
                )
            )
            decoder = codec.open(encoded[-1].params, start_token=0, num_tokens=num_tokens)
            restored = decoder.decode_all(encoded[-1].blocks)
            tried.append((text, partial(_replaced, true, restored, heads)))
    ratios = []
    for of_text, divergence in zip(encoded, reader.divergences(tried), strict=True):
        own = max(divergence - of_text.shift_damage, _LEAST_SHARE * divergence, _LEAST_DIVERGENCE)
        ratios.append(own / (of_text.damage - of_text.shift_damage))
    return [ratios[first : first + len(texts)] for first in range(0, len(ratios), len(texts))]


def _replaced(true: Sequence[LayerKV], restored: Sequence[LayerKV], heads: range, layer: int) -> LayerKV:
    """A layer's KV, of which some heads were stored."""
    k, v = true[layer].k.clone(), true[layer].v.clone()
    k[:, _slice(heads)], v[:, _slice(heads)] = restored[layer].k, restored[layer].v
    return LayerKV(k, v)


def stored_num_bytes(
    rotary: RotaryTable | None, of_ranks: Sequence[ModelBases], texts: Sequence[History], max_damage: float
) -> int:
    """Bytes that texts take in the bases of all ranks, each text as a turn that may lose ``max_damage`` nats;
    natively if the bases cannot represent it within that."""
    limit, total = max_damage / len(of_ranks), 0
    for text in texts:
        num_tokens, num_heads = len(text.layers[0].k), text.layers[0].k.shape[1]
        for rank, bases in enumerate(of_ranks):
            heads = heads_of_rank(num_heads, rank, len(of_ranks))
            codec = SubspaceCodec(bases, rotary)
            layers, attention = _of_heads(text.layers, heads), text.attention[:, _slice(heads)]
            sample = codec.sample(
                layers.__getitem__, start_token=0, num_tokens=num_tokens, attention=attention
            )
            if sample.outside > MOST_OUTSIDE * limit:
                total += num_tokens * bases.num_layers * vector_size(bases.shape) * bases.shape.dtype.itemsize
            else:
                encoded = codec.encode(
                    layers.__getitem__,
                    start_token=0,
                    num_tokens=num_tokens,
                    attention=attention,
                    max_damage=limit,
                    sample=sample,
                )
                total += encoded.num_bytes
    return total


def _of_heads(layers: Sequence[LayerKV], heads: range) -> list[LayerKV]:
    return [LayerKV(kv.k[:, _slice(heads)], kv.v[:, _slice(heads)]) for kv in layers]


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)
