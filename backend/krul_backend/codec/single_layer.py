"""A layer on its own: the pool's bytes, or codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.layout import GroupRun, in_groups
from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.codec.vector_format import FloatFormat, vector_format
from krul_backend.strategy.strategy import Precision


class _SingleLayer(UnitCodec):
    """A unit of one layer, all of whose rows lie in the groups."""

    def sources(self, index: int) -> tuple[int, ...]:
        return (0,)

    def overwrite(self, index: int, blocks: Sequence[torch.Tensor], kv: LayerKV, first_token: int) -> None:
        pass


class NativeLayer(_SingleLayer):
    """The pool's own numbers, rotary embedding on, bit-exact: in a record all keys, then all values."""

    def __init__(self, place: SegmentPlace) -> None:
        shape = place.shape
        self._k = FloatFormat("k", shape.num_kv_heads, shape.k_head_dim, shape.dtype)
        self._v = FloatFormat("v", shape.num_kv_heads, shape.v_head_dim, shape.dtype)
        super().__init__(place, [place.layout(self._k.sections() + self._v.sections())])

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


class CodedLayer(_SingleLayer):
    """Keys without rotary embedding per channel, values per token; see ``vector_format``."""

    def __init__(self, place: SegmentPlace, precision: Precision) -> None:
        shape = place.shape
        self._k = vector_format(
            "k", shape.num_kv_heads, shape.k_head_dim, shape.dtype, precision, per_channel=True
        )
        self._v = vector_format(
            "v", shape.num_kv_heads, shape.v_head_dim, shape.dtype, precision, per_channel=False
        )
        super().__init__(place, [place.layout(self._k.sections() + self._v.sections())])

    def encode(self, layers: Sequence[LayerKV]) -> tuple[torch.Tensor, ...]:
        (kv,) = layers
        (layout,) = self.layouts
        block = layout.new_block(kv.k.device)
        for run in layout.runs(0, self.place.num_tokens):
            views = layout.record_views(block, run)
            self._k.write(self.place.without_rotary(kv.k, run), views)
            self._v.write(in_groups(kv.v[run.first_token : run.end_token], run).float(), views)
        return (block,)

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.layouts[0].record_views(blocks[0], run)
        k = self._k.read(views).expand(-1, run.group_tokens, -1, -1)
        v = self._v.read(views).expand(-1, run.group_tokens, -1, -1)
        return self.place.with_rotary(k, run), v.flatten(0, 1)
