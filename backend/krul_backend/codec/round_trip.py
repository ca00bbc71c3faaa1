"""Encodes a layer and decodes it again, to measure what compression would do to it."""

from __future__ import annotations

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.strategy import Precision, Strategy


class LayerRoundTrip:
    """Called with ``(layer, precision, kv)``, gives ``(the KV afterwards, bytes per stored token)``.

    ``kv`` is that of one layer, stored alone, tokens ``[start_token, start_token + T)`` of a conversation.
    The first ``num_kept < T`` of these are not stored, and come back unchanged.
    """

    def __init__(self, codec: SegmentCodec, *, start_token: int, num_kept: int = 0) -> None:
        self._codec = codec
        self._start_token = start_token
        self._num_kept = num_kept

    def __call__(self, layer: int, precision: Precision, kv: LayerKV) -> tuple[LayerKV, float]:
        """New KV on the device of ``kv``, and the bytes of its block per stored token.

        Raises:
            CodecError: see ``SegmentCodec``.
            StrategyError: not a layer of this model.
        """
        codec, kept = self._codec, self._num_kept
        stored = LayerKV(kv.k[kept:], kv.v[kept:])
        start_token, num_tokens = self._start_token + kept, stored.k.shape[0]
        strategy = Strategy.of_unit(codec.num_layers, (layer,), precision)
        encoding = codec.prepare(strategy, lambda _: stored, start_token=start_token, num_tokens=num_tokens)
        (block,) = codec.encode_unit(encoding, (layer,), [stored])
        decoder = codec.open(encoding.params, start_token=start_token, num_tokens=num_tokens)
        decoded = decoder.decode(layer, {layer: block}, 0, num_tokens)
        if kept:
            decoded = LayerKV(torch.cat([kv.k[:kept], decoded.k]), torch.cat([kv.v[:kept], decoded.v]))
        return decoded, block.numel() / num_tokens
