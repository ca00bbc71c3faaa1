"""The rows of the subspace codec."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from benchmarks.quality.methods import Method, Stored, StoreTurn, Turn
from krul_backend.attention.rows import attention_drawn
from krul_backend.codec.coefficients.coders import FixedWidthCoder, RansCoder
from krul_backend.codec.subspace.codec import MOST_OUTSIDE, SubspaceCodec

LIMITS = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Nats per predicted token."""

FIXED_WIDTH_LIMIT = 0.01


@dataclass(frozen=True)
class Subspace(Method):
    """Groups of layers in a common subspace, with the largest steps that a limit in nats allows.

    Each turn may lose the share of the limit that its tokens have in the conversation so far: what older
    turns have lost weighs less, the more tokens there are to attend to. As in a server, a turn is stored
    natively if the bases cannot represent it within its share.
    """

    name: str
    codec: SubspaceCodec = field(repr=False)
    limit: float
    coder: str
    family: str = "subspace"

    def start(self) -> StoreTurn:
        return self._store

    def _store(self, turn: Turn) -> Stored:
        start, num_tokens = turn.start_token, len(turn.segment[0].k)
        attention = attention_drawn(turn.rows, lambda layer: turn.kv[layer].k, start, num_tokens)
        read = turn.segment.__getitem__
        max_damage = self.limit * num_tokens / (start + num_tokens)
        outside = self.codec.outside(read, start_token=start, num_tokens=num_tokens, attention=attention)
        if outside > MOST_OUTSIDE * max_damage:
            num_bytes = sum(part.nbytes for kv in turn.segment for part in (kv.k, kv.v))
            return Stored(turn.segment, num_bytes, damage=0.0)
        encoded = self.codec.encode(
            read,
            start_token=start,
            num_tokens=num_tokens,
            attention=attention,
            max_damage=max_damage,
            coder=self.coder,
        )
        decoder = self.codec.open(encoded.params, start_token=start, num_tokens=num_tokens)
        decoded = decoder.decode_all(encoded.blocks)
        # The parameters have sizes and scales of this segment: they count.
        return Stored(
            tuple(decoded), encoded.num_bytes + len(orjson.dumps(encoded.params)), damage=encoded.damage
        )


def subspace_methods(codec: SubspaceCodec) -> list[Subspace]:
    """One row for each limit, and one with the coder that decodes faster."""
    return [
        *(Subspace(f"subspace {limit}", codec, limit, RansCoder.name) for limit in LIMITS),
        Subspace(
            f"subspace {FIXED_WIDTH_LIMIT} fixed",
            codec,
            FIXED_WIDTH_LIMIT,
            FixedWidthCoder.name,
            "subspace fixed",
        ),
    ]
