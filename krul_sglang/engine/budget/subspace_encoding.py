"""Encodes the runs of a turn in the bases of the model, each within its own limit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from krul_backend.codec.interface import EncodedRun, TokenRun
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import EncodedSegment
from krul_backend.codec.subspace.held_bases import HeldBases, RunLimit, SubspaceRun
from krul_backend.errors import CodecError
from krul_backend.strategy import LayerGroups
from krul_sglang.engine.save import LayerEncoding, TurnEncoding

logger = logging.getLogger(__name__)

SHARE_OF_LEFT = 0.9
"""Of what is left for a turn: its step is chosen by a sample of its tokens, and may cost a little more."""

_FIRST_RATIO = 10.0
"""Until the first turn has been encoded, blocks are expected to be smaller than the KV by this factor."""

_LEARNING_RATE = 0.2


class SubspaceEncoding(TurnEncoding):
    """Stores a turn in the model's bases, but those of its runs that they cannot keep within their limits as
    ``without_bases(index, run, pause)`` encodes them.

    ``limit_of(index, run)`` is asked when a run is encoded; None: the bases shall not have it. Each run is
    told to ``on_encoded(index, run, encoded)`` if it is in bases. ``exact`` is how the turn is stored at
    first.
    """

    def __init__(
        self,
        codec: HeldBases,
        groups: LayerGroups,
        group_token_bytes: list[float],
        limit_of: Callable[[int, TokenRun], RunLimit | None],
        on_encoded: Callable[[int, TokenRun, EncodedSegment], None],
        without_bases: Callable[[int, TokenRun, Callable[[], None]], EncodedRun],
        exact: LayerEncoding,
    ) -> None:
        self.exact: LayerEncoding = exact
        self.stored_as = groups
        self.last_use = tuple(
            group[-1] if layer == group[0] else layer for group in groups.groups for layer in group
        )
        self.layer_token_bytes = tuple(
            num_bytes if layer == group[0] else 0.0
            for group, num_bytes in zip(groups.groups, group_token_bytes, strict=True)
            for layer in group
        )
        self._codec = codec
        self._group_token_bytes = group_token_bytes
        self._limit_of = limit_of
        self._on_encoded = on_encoded
        self._without_bases = without_bases

    def encode(self, index: int, run: TokenRun, pause: Callable[[], None]) -> EncodedRun:
        limit = self._limit_of(index, run)
        encoded = None if limit is None else self._encoded(limit, run, pause)
        if encoded is None:
            return self._without_bases(index, run, pause)
        self._on_encoded(index, run, encoded.segment)
        for group, block in enumerate(encoded.segment.blocks):
            here = block.numel() / run.num_tokens
            self._group_token_bytes[group] += _LEARNING_RATE * (here - self._group_token_bytes[group])
        return encoded

    def _encoded(self, limit: RunLimit, run: TokenRun, pause: Callable[[], None]) -> SubspaceRun | None:
        """Encode a run; None if that costs too much, or fails.

        The step is chosen by a sample of the tokens. If all of them together cost more than the run may add,
        it is encoded once more, with as much less for rounding as rounding has cost too much.
        """
        most, aim = limit.max_damage / SHARE_OF_LEFT, limit.max_damage
        for _ in range(2):
            try:
                encoded = self._codec.encode(run, replace(limit, max_damage=aim), pause)
            except CodecError as error:
                logger.warning("krul: %d tokens are not stored in the bases: %s", run.num_tokens, error)
                return None
            damage = encoded.segment.damage
            if damage <= most:
                return encoded
            rounding = limit.max_damage - limit.sample.outside
            aim = limit.sample.outside + rounding**2 / (damage - limit.sample.outside)
        logger.info(
            "krul: %d tokens are not stored in the bases: they would lose %.3g nats, %.3g are allowed",
            run.num_tokens,
            damage,
            most,
        )
        return None


def first_group_token_bytes(bases: ModelBases) -> list[float]:
    """Bytes that a token is expected to take in each group until a turn has been encoded."""
    token_bytes = bases.shape.k_token_bytes + bases.shape.v_token_bytes
    return [len(basis.layers) * token_bytes / _FIRST_RATIO for basis in bases.groups]
