"""Stores a layer on its own, as the pool's bytes or as codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.layout import GroupRun, in_groups
from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.codec.vector_format import FloatFormat, VectorFormat, vector_format
from krul_backend.strategy.strategy import Precision


class SingleLayer(UnitCodec):
    """A unit of one layer. Each record has the sections of its keys, then those of its values."""

    def __init__(self, place: SegmentPlace, k: VectorFormat, v: VectorFormat) -> None:
        self._k, self._v = k, v
        super().__init__(place, [place.layout(k.sections() + v.sections())])

    @property
    def formats(self) -> tuple[VectorFormat, VectorFormat]:
        """The formats of keys and of values."""
        return self._k, self._v

    def sources(self, index: int) -> tuple[int, ...]:
        return (0,)


class NativeLayer(SingleLayer):
    """Stores the pool's own numbers, bit-exact, keys with their rotary embedding."""

    def __init__(self, place: SegmentPlace) -> None:
        shape = place.shape
        super().__init__(
            place,
            FloatFormat("k", shape.num_kv_heads, shape.k_head_dim, shape.dtype),
            FloatFormat("v", shape.num_kv_heads, shape.v_head_dim, shape.dtype),
        )

    def encode(self, layers: Sequence[LayerKV]) -> tuple[torch.Tensor, ...]:
        (kv,) = layers
        (layout,) = self.layouts
        block = layout.new_block(kv.k.device)
        for run in layout.runs(0, self.place.num_tokens):
            views = layout.record_views(block, run)
            views["k"].copy_(in_groups(kv.k[run.first_token : run.end_token], run))
            views["v"].copy_(in_groups(kv.v[run.first_token : run.end_token], run))
        return (block,)

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.layouts[0].record_views(blocks[0], run)
        return views["k"].flatten(0, 1), views["v"].flatten(0, 1)


class CodedLayer(SingleLayer):
    """Codes keys per channel, without their rotary embedding, and values per token; see ``vector_format``."""

    def __init__(self, place: SegmentPlace, precision: Precision) -> None:
        shape = place.shape
        super().__init__(
            place,
            vector_format(
                "k", shape.num_kv_heads, shape.k_head_dim, shape.dtype, precision, per_channel=True
            ),
            vector_format(
                "v", shape.num_kv_heads, shape.v_head_dim, shape.dtype, precision, per_channel=False
            ),
        )

    def encode(self, layers: Sequence[LayerKV]) -> tuple[torch.Tensor, ...]:
        (kv,) = layers
        (layout,) = self.layouts
        block = layout.new_block(kv.k.device)
        for run in layout.runs(0, self.place.num_tokens):
            views = layout.record_views(block, run)
            k, v = self.place.vectors(kv, run)
            self._k.write(k, views)
            self._v.write(v, views)
        return (block,)

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.layouts[0].record_views(blocks[0], run)
        k, v = (part.read(views).expand(-1, run.group_tokens, -1, -1) for part in self.formats)
        return self.place.with_rotary(k, run), v.flatten(0, 1)


def single_layer(place: SegmentPlace, precision: Precision) -> SingleLayer:
    """The codec of a layer alone at ``precision``."""
    return NativeLayer(place) if precision is Precision.NATIVE else CodedLayer(place, precision)
