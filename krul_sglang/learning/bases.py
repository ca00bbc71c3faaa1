"""Learns the bases of a model from texts, and measures how the damage that they expect compares with the
truth."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.subspace.bases import ModelBases, vector_size
from krul_backend.codec.subspace.codec import MOST_OUTSIDE, SubspaceCodec
from krul_backend.codec.subspace.learning import BasisLearner, LearningText
from krul_backend.errors import KrulError
from krul_sglang.learning.reader import TextReader

logger = logging.getLogger(__name__)

LAYERS_OF_GROUP = 5

_MOST_CHANNELS = 5120
"""Channels of a group: keys and values of its layers, on one rank. Memory grows with their square, so wide
layers are in smaller groups."""

_SUMS_BYTES, _FIT_BYTES, _BASES_BYTES, _WORK_BYTES = 16, 16, 8, 64
"""For each square of a group's channels: two fp64 matrices of sums, two of the fit, two fp32 ones of bases
that keep all coefficients, and eight fp64 ones while a group is fitted."""

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
    ``layers_of_group``: consecutive layers that share a basis; fewer do if they are wide. ``measured_share``
    of the pieces are not learned from: by them the damage that is expected is compared with the truth, at a
    limit of ``measured_damage`` nats.
    """

    text_tokens: int = 1024
    read_tokens: int = 768
    layers_of_group: int = LAYERS_OF_GROUP
    measured_share: float = 0.2
    measured_damage: float = 0.01

    def num_read(self, piece: Sequence[int]) -> int:
        """So many tokens of a piece are learned from, the first ones."""
        return len(piece) * self.read_tokens // self.text_tokens

    def group_ends(self, num_layers: int, layer_channels: int) -> list[int]:
        """The last layer of each group, plus one, where keys and values of a layer have so many channels."""
        each = max(1, min(self.layers_of_group, _MOST_CHANNELS // layer_channels))
        return [*range(each, num_layers, each), num_layers]


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
    measured = {(2 * index + 1) * len(pieces) // (2 * num_measured) for index in range(num_measured)}
    ranks = [heads_of_rank(reader.shape.num_kv_heads, rank, tp_size) for rank in range(tp_size)]
    shape = replace(reader.shape, num_kv_heads=len(ranks[0]))
    ends = plan.group_ends(reader.num_layers, vector_size(shape))
    learners = [BasisLearner(shape, ends) for _ in ranks]
    num_read = 0
    for number, ids in enumerate(pieces):
        if number not in measured:
            text = reader.read(ids, plan.num_read(ids), seed=number)
            for heads, learner in zip(ranks, learners, strict=True):
                learner.add(
                    LearningText(
                        _of_heads(text.layers, heads),
                        _of_heads(text.gradients, heads),
                        text.attention[:, _slice(heads)],
                    )
                )
            num_read += 1
            logger.info("read %d of %d pieces", num_read, len(pieces) - num_measured)
    learned = []
    for heads, learner in zip(ranks, learners, strict=True):
        bases = learner.fit()
        factors = [damage_ratio(reader, bases, heads, pieces[number], plan) for number in sorted(measured)]
        factor = math.exp(sum(math.log(ratio) for ratio in factors) / len(factors))
        logger.info(
            "damage is %.3g times what the metric says; ranks %s",
            factor,
            [group.rank for group in bases.groups],
        )
        learned.append(ModelBases(bases.shape, bases.groups, factor))
    return learned


def learning_num_bytes(shape: LayerShape, num_layers: int, tp_size: int) -> int:
    """About the memory that learning takes beside the model: see ``learn_bases``. ``shape`` is that of all KV
    heads."""
    of_rank = replace(shape, num_kv_heads=len(heads_of_rank(shape.num_kv_heads, 0, tp_size)))
    channels = vector_size(of_rank)
    ends = [0, *LearningPlan().group_ends(num_layers, channels)]
    squares = [((end - first) * channels) ** 2 for first, end in pairwise(ends)]
    # Of all ranks sums and finished bases, of one rank its fits, and of one group what its fit works with.
    return (tp_size * (_SUMS_BYTES + _BASES_BYTES) + _FIT_BYTES) * sum(squares) + _WORK_BYTES * max(squares)


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


def damage_ratio(
    reader: TextReader, bases: ModelBases, heads: range, ids: Sequence[int], plan: LearningPlan
) -> float:
    """The divergence that one text's compression causes over the one that ``bases``, those of ``heads``,
    expect; less, on both sides, what is expected of errors that all tokens have in common."""
    num_read = plan.num_read(ids)
    text = reader.read_history(ids[:num_read])
    codec = SubspaceCodec(bases, reader.rotary)
    encoded = codec.encode(
        _of_heads(text.layers, heads).__getitem__,
        start_token=0,
        num_tokens=num_read,
        attention=text.attention[:, _slice(heads)],
        max_damage=plan.measured_damage,
    )
    decoder = codec.open(encoded.params, start_token=0, num_tokens=num_read)
    restored = []
    for true, decoded in zip(text.layers, decoder.decode_all(encoded.blocks), strict=True):
        k, v = true.k.clone(), true.v.clone()
        k[:, _slice(heads)], v[:, _slice(heads)] = decoded.k, decoded.v
        restored.append(LayerKV(k, v))
    divergence = reader.divergence(ids[num_read:], text.layers, restored)
    own = max(divergence - encoded.shift_damage, _LEAST_SHARE * divergence, _LEAST_DIVERGENCE)
    return own / (encoded.damage - encoded.shift_damage)


def stored_num_bytes(
    reader: TextReader, of_ranks: Sequence[ModelBases], pieces: Sequence[Sequence[int]], max_damage: float
) -> int:
    """Bytes that texts take in the bases of all ranks, each text as a turn that may lose ``max_damage`` nats;
    natively if the bases cannot represent it within that."""
    limit, total = max_damage / len(of_ranks), 0
    for ids in pieces:
        text = reader.read_history(ids)
        for rank, bases in enumerate(of_ranks):
            heads = heads_of_rank(reader.shape.num_kv_heads, rank, len(of_ranks))
            codec = SubspaceCodec(bases, reader.rotary)
            layers, attention = _of_heads(text.layers, heads), text.attention[:, _slice(heads)]
            outside = codec.outside(
                layers.__getitem__, start_token=0, num_tokens=len(ids), attention=attention
            )
            if outside > MOST_OUTSIDE * limit:
                total += len(ids) * bases.num_layers * vector_size(bases.shape) * bases.shape.dtype.itemsize
            else:
                encoded = codec.encode(
                    layers.__getitem__,
                    start_token=0,
                    num_tokens=len(ids),
                    attention=attention,
                    max_damage=limit,
                )
                total += encoded.num_bytes
    return total


def _of_heads(layers: Sequence[LayerKV], heads: range) -> list[LayerKV]:
    return [LayerKV(kv.k[:, _slice(heads)], kv.v[:, _slice(heads)]) for kv in layers]


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)
