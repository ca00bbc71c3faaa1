"""Stores a pair of layers as the lower one and the upper one's difference from its prediction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.layer_map import LayerMap
from krul_backend.codec.layout import GroupRun
from krul_backend.codec.single_layer import SingleLayer, single_layer
from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.codec.vector_format import vector_format
from krul_backend.strategy.strategy import Precision

_LOWER = 0
_RESIDUAL_PRECISION = {
    Precision.NATIVE: Precision.INT8,
    Precision.INT8: Precision.INT4,
    Precision.INT4: Precision.INT2,
    Precision.INT2: Precision.INT0,
    Precision.INT0: Precision.INT0,
}
"""What the prediction leaves is small: fewer bits make about the error that the lower layer has."""


class PredictedPair(UnitCodec):
    """Stores the lower layer as if it were alone, and of the upper one what a ``LayerMap`` does not predict.

    ::

        block of the lower layer = | records: as of a single layer of the pair's precision |
        block of the upper layer = | records: codes of true minus predicted vectors        |

    The prediction is made from the decoded lower layer, so its error is part of what is stored.
    """

    def __init__(self, place: SegmentPlace, precision: Precision, layer_map: LayerMap) -> None:
        shape = place.shape
        rest = _RESIDUAL_PRECISION[precision]
        self._map = layer_map
        self._lower = single_layer(place, precision)
        self._k = vector_format(
            "k", shape.num_kv_heads, shape.k_head_dim, shape.dtype, rest, per_channel=True
        )
        self._v = vector_format(
            "v", shape.num_kv_heads, shape.v_head_dim, shape.dtype, rest, per_channel=False
        )
        upper = place.layout(self._k.sections() + self._v.sections())
        super().__init__(place, [*self._lower.layouts, upper])

    @property
    def lower(self) -> SingleLayer:
        """The codec of the lower layer, which does not need the upper one."""
        return self._lower

    def sources(self, index: int) -> tuple[int, ...]:
        return (_LOWER,) if index == _LOWER else (_LOWER, index)

    def encode(self, layers: Sequence[LayerKV]) -> tuple[torch.Tensor, ...]:
        lower, upper = layers
        (lower_block,) = self._lower.encode([lower])
        layout = self.layouts[1]
        block = layout.new_block(upper.k.device)
        for run in layout.runs(0, self.place.num_tokens):
            predicted_k, predicted_v = self._map.predict(*self._lower.read_vectors(lower_block, run))
            k, v = self.place.vectors(upper, run)
            views = layout.record_views(block, run)
            self._k.write(k - predicted_k, views)
            self._v.write(v - predicted_v, views)
        return lower_block, block

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if index == _LOWER:
            return self._lower.decode_run(_LOWER, blocks, run)
        k, v = self._map.predict(*self._lower.read_vectors(blocks[_LOWER], run))
        views = self.layouts[index].record_views(blocks[index], run)
        return self.place.with_rotary(k + self._k.read(views), run), (v + self._v.read(views)).flatten(0, 1)
