"""Encodes the runs of a turn in the bases of the model, each within its own limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import EncodedSegment, SubspaceCodec
from krul_backend.codec.subspace.sample import SegmentSample
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import SUBSPACE
from krul_sglang.engine.save.turn_encoding import EncodedRun, LayerEncoding, TokenRun, TurnEncoding

logger = logging.getLogger(__name__)

SHARE_OF_LEFT = 0.9
"""Of what is left for a turn: its step is chosen by a sample of its tokens, and may cost a little more."""

_FIRST_RATIO = 10.0
"""Until the first turn has been encoded, blocks are expected to be smaller than the KV by this factor."""

_LEARNING_RATE = 0.2


@dataclass(frozen=True, eq=False)
class RunLimit:
    """The limit of one run of tokens. Storing it may add ``max_damage``, of which ``sample.outside`` is lost
    whatever the step; ``carried`` was lost before. All in nats at the run's own end, see ``DamagedSpan``.

    ``sample`` is what was read of the run for that, with which encoding it begins. ``attention``:
    ``[L, Hkv, tokens of the run]``, see ``GroupBasis.token_worth``.
    """

    max_damage: float
    sample: SegmentSample
    carried: float
    attention: torch.Tensor


class SubspaceEncoding(TurnEncoding):
    """Stores a turn in the model's bases, but natively those of its runs that they cannot keep within their
    limits.

    ``limit_of(index, run)`` is asked when a run is encoded; None: it shall be native. Each run is told to
    ``on_encoded(index, run, encoded)``; None: it is native. ``exact`` is how the turn is stored without the
    bases, which is how it is stored at first.
    """

    def __init__(
        self,
        codec: SubspaceCodec,
        group_token_bytes: list[float],
        limit_of: Callable[[int, TokenRun], RunLimit | None],
        on_encoded: Callable[[int, TokenRun, EncodedSegment | None], None],
        exact: LayerEncoding,
    ) -> None:
        self.exact: LayerEncoding = exact
        self.stored_as = codec.bases.layer_groups
        self._groups = groups = self.stored_as.groups
        self.last_use = tuple(
            group[-1] if layer == group[0] else layer for group in groups for layer in group
        )
        self.layer_token_bytes = tuple(
            num_bytes if layer == group[0] else 0.0
            for group, num_bytes in zip(groups, group_token_bytes, strict=True)
            for layer in group
        )
        self._codec = codec
        self._group_token_bytes = group_token_bytes
        self._limit_of = limit_of
        self._on_encoded = on_encoded

    def encode(self, index: int, run: TokenRun, pause: Callable[[], None]) -> EncodedRun:
        limit = self._limit_of(index, run)
        encoded = None if limit is None else self._encoded(limit, run, pause)
        self._on_encoded(index, run, encoded)
        if encoded is None:
            return self.exact.encode(index, run, pause)
        for group, block in enumerate(encoded.blocks):
            here = block.numel() / run.num_tokens
            self._group_token_bytes[group] += _LEARNING_RATE * (here - self._group_token_bytes[group])
        layout = self._codec.open(encoded.params, start_token=run.start_token, num_tokens=run.num_tokens)
        first = layout.kept_from(run.head_ends or (run.start_token,) * len(self.last_use))
        kept = layout.kept_num_bytes(first)
        blocks = [
            (group.start, block[block.numel() - kept[group.start] :])
            for group, block in zip(self._groups, encoded.blocks, strict=True)
            if kept[group.start]
        ]
        return EncodedRun(SUBSPACE, encoded.params, first, kept, encoded.num_bytes - sum(kept), blocks)

    def _encoded(self, limit: RunLimit, run: TokenRun, pause: Callable[[], None]) -> EncodedSegment | None:
        """Encode a run; None if that costs too much, or fails.

        The step is chosen by a sample of the tokens. If all of them together cost more than the run may add,
        it is encoded once more, with as much less for rounding as rounding has cost too much.
        """
        most, aim = limit.max_damage / SHARE_OF_LEFT, limit.max_damage
        for _ in range(2):
            try:
                encoded = self._codec.encode(
                    run.read,
                    start_token=run.start_token,
                    num_tokens=run.num_tokens,
                    attention=limit.attention,
                    max_damage=aim,
                    carried_damage=limit.carried,
                    before_group=pause,
                    sample=limit.sample,
                )
            except CodecError as error:
                logger.warning("krul: %d tokens are stored natively: %s", run.num_tokens, error)
                return None
            if encoded.damage <= most:
                return encoded
            rounding = limit.max_damage - limit.sample.outside
            aim = limit.sample.outside + rounding**2 / (encoded.damage - limit.sample.outside)
        logger.info(
            "krul: %d tokens are stored natively: in the bases they would lose %.3g nats, %.3g are allowed",
            run.num_tokens,
            encoded.damage,
            most,
        )
        return None


def first_group_token_bytes(bases: ModelBases, shape: LayerShape) -> list[float]:
    """Bytes that a token is expected to take in each group until a turn has been encoded. ``shape``: the
    pool's."""
    token_bytes = shape.k_token_bytes + shape.v_token_bytes
    return [len(basis.layers) * token_bytes / _FIRST_RATIO for basis in bases.groups]
