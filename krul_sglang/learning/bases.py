"""Learns the bases of a model from texts, and measures how the damage that they expect compares with the
truth."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from krul_backend.codec.coefficients.coders import FixedWidthCoder
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.learning import BasisLearner
from krul_backend.errors import KrulError
from krul_sglang.learning.reader import TextReader

logger = logging.getLogger(__name__)

LAYERS_OF_GROUP = 5
_LEAST_DIVERGENCE = 1e-9


class LearningError(KrulError):
    """Text from which no bases can be learned."""


@dataclass(frozen=True)
class LearningPlan:
    """How bases are learned.

    ``text_tokens``: the length of the pieces that texts are cut into. ``read_tokens``: of each piece the KV
    of these is learned from; the others are predicted. ``layers_of_group``: consecutive layers that share a
    basis. ``measured_share`` of the pieces are not learned from: by them the damage that is expected is
    compared with the truth, at a limit of ``measured_damage`` nats.
    """

    text_tokens: int = 1024
    read_tokens: int = 768
    layers_of_group: int = LAYERS_OF_GROUP
    measured_share: float = 0.2
    measured_damage: float = 0.01

    def group_ends(self, num_layers: int) -> list[int]:
        return [*range(self.layers_of_group, num_layers, self.layers_of_group), num_layers]


def learn_bases(
    reader: TextReader, pieces: Sequence[Sequence[int]], plan: LearningPlan | None = None
) -> ModelBases:
    """Learn the bases of the reader's model. ``pieces``: token ids, each of ``plan.text_tokens``.

    Raises:
        LearningError: fewer than two pieces.
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
    learner = BasisLearner(reader.shape, plan.group_ends(reader.num_layers))
    for number, ids in enumerate(pieces):
        if number not in measured:
            learner.add(reader.read(ids, plan.read_tokens, seed=number))
            logger.info("read %d of %d pieces", learner.num_texts, len(pieces) - num_measured)
    bases = learner.fit()
    factors = [damage_ratio(reader, bases, pieces[number], plan) for number in sorted(measured)]
    factor = math.exp(sum(math.log(ratio) for ratio in factors) / len(factors))
    logger.info(
        "damage is %.3g times what the metric says; ranks %s", factor, [group.rank for group in bases.groups]
    )
    return ModelBases(bases.shape, bases.groups, factor)


def damage_ratio(reader: TextReader, bases: ModelBases, ids: Sequence[int], plan: LearningPlan) -> float:
    """Compress one text, and divide the divergence that this causes by the one that ``bases`` expect."""
    text = reader.read_history(ids[: plan.read_tokens])
    codec = SubspaceCodec(bases, reader.rotary, [FixedWidthCoder()])
    encoded = codec.encode(
        text.layers.__getitem__,
        start_token=0,
        num_tokens=plan.read_tokens,
        attention=text.attention,
        max_damage=plan.measured_damage,
        coder=FixedWidthCoder.name,
    )
    decoder = codec.open(encoded.params, start_token=0, num_tokens=plan.read_tokens)
    restored = decoder.decode_all(encoded.blocks)
    divergence = reader.divergence(ids[plan.read_tokens :], text.layers, restored)
    # A model that its KV does not matter to has no divergence, and a factor must be positive.
    return max(divergence, _LEAST_DIVERGENCE) / encoded.damage
