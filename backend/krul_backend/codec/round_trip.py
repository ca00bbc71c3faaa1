"""Encodes a unit and decodes it again, to measure what compression would do to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy


class UnitRoundTrip:
    """Called with ``(unit, precision, layers)``, gives ``(layers afterwards, bytes per stored token)``.

    ``layers`` are the KV of the unit's layers, tokens ``[start_token, start_token + T)`` of a conversation.
    The first ``num_kept < T`` of these are not stored, and come back unchanged.
    """

    def __init__(self, codec: SegmentCodec, *, start_token: int, num_kept: int = 0) -> None:
        self._codec = codec
        self._start_token = start_token
        self._num_kept = num_kept

    def __call__(
        self, unit: tuple[int, ...], precision: Precision, layers: Sequence[LayerKV]
    ) -> tuple[Sequence[LayerKV], float]:
        """New layers on the device of ``layers``, and the bytes of all blocks per stored token.

        Raises:
            CodecError: see ``SegmentCodec``.
            StrategyError: not a unit of this model.
        """
        if len(layers) != len(unit) or len(unit) not in (1, 2):
            raise CodecError(f"unit {unit} with the KV of {len(layers)} layers")
        kept = [LayerKV(kv.k[: self._num_kept], kv.v[: self._num_kept]) for kv in layers]
        stored = [LayerKV(kv.k[self._num_kept :], kv.v[self._num_kept :]) for kv in layers]
        start_token = self._start_token + self._num_kept
        num_tokens = stored[0].k.shape[0]
        encoding = self._codec.prepare(
            Strategy.of_unit(self._codec.num_layers, unit, precision),
            lambda layer: stored[unit.index(layer)],
            start_token=start_token,
            num_tokens=num_tokens,
        )
        blocks = dict(zip(unit, self._codec.encode_unit(encoding, unit, stored), strict=True))
        decoder = self._codec.open(encoding.params, start_token=start_token, num_tokens=num_tokens)
        decoded = [decoder.decode(layer, blocks, 0, num_tokens) for layer in unit]
        if self._num_kept:
            decoded = [
                LayerKV(torch.cat([before.k, kv.k]), torch.cat([before.v, kv.v]))
                for before, kv in zip(kept, decoded, strict=True)
            ]
        return decoded, sum(block.numel() for block in blocks.values()) / num_tokens
