"""The codecs of the rows: ways in which a pair of layers has something in common."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, islice

from benchmarks.quality.conversation import Conversation
from benchmarks.quality.methods import PRECISIONS
from benchmarks.quality.model import HistoryModel, pooled
from krul_backend.codec.layer_map import LayerMap, LayerMapFitter
from krul_backend.codec.options import CodecOptions, Sharing
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.strategy import Pair, Precision

MAP_CONVERSATIONS = 12


def make_codec(model: HistoryModel, sharing: Sharing, training: Iterable[Conversation]) -> SegmentCodec:
    """The codec of the model; where pairs are predicted, with maps learned from ``training``.

    The maps belong to the model and are kept once, so no conversation's bytes count them.
    """
    rotary = model.rotary_table(model.model.config.max_position_embeddings)
    options = CodecOptions(sharing=sharing)
    if sharing is Sharing.SLERP:
        return SegmentCodec(model.shape, model.num_layers, rotary, options)
    fitters = {pair: LayerMapFitter(model.shape, rotary) for pair in combinations(range(model.num_layers), 2)}
    for conversation in islice(training, MAP_CONVERSATIONS):
        kv = [pooled(layer) for layer in model.run(conversation.history, (), num_logits=1).kv]
        for (lower, upper), fitter in fitters.items():
            fitter.add(kv[lower], kv[upper], start_token=0)
    maps: dict[tuple[Pair, Precision], LayerMap] = {
        (pair, precision): fitter.fit(precision)
        for pair, fitter in fitters.items()
        for precision in (*PRECISIONS, Precision.INT2)
    }
    return SegmentCodec(model.shape, model.num_layers, rotary, options, maps)
