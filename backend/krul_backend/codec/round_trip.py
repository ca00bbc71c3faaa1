"""A unit encoded and decoded again, for those who ask what compression would do to it."""

from __future__ import annotations

from collections.abc import Sequence

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy


class UnitRoundTrip:
    """Callable ``(unit, precision, layers) -> (decoded layers, stored bytes)``, at one place.

    ``layers`` are the KV of the unit's layers, tokens ``[start_token, start_token + T)`` of the conversation.
    """

    def __init__(self, codec: SegmentCodec, *, start_token: int) -> None:
        self._codec = codec
        self._start_token = start_token

    def __call__(
        self, unit: tuple[int, ...], precision: Precision, layers: Sequence[LayerKV]
    ) -> tuple[Sequence[LayerKV], int]:
        """Decoded layers on the device of ``layers``, and the bytes of all their blocks.

        Raises:
            CodecError: see ``SegmentCodec``.
            StrategyError: not a unit of this model.
        """
        if len(layers) != len(unit) or len(unit) not in (1, 2):
            raise CodecError(f"unit {unit} with the KV of {len(layers)} layers")
        num_tokens = layers[0].k.shape[0]
        encoding = self._codec.prepare(
            Strategy.of_unit(self._codec.num_layers, unit, precision),
            lambda layer: layers[unit.index(layer)],
            start_token=self._start_token,
            num_tokens=num_tokens,
        )
        blocks = dict(zip(unit, self._codec.encode_unit(encoding, unit, layers), strict=True))
        decoder = self._codec.open(encoding.params, start_token=self._start_token, num_tokens=num_tokens)
        decoded = [decoder.decode(layer, blocks, 0, num_tokens) for layer in unit]
        return decoded, sum(block.numel() for block in blocks.values())
