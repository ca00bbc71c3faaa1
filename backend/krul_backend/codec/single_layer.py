"""Stores a layer on its own, as the pool's bytes or as codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.layout import GroupRun, Views, in_groups
from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.codec.vector_format import key_and_value_formats
from krul_backend.strategy.strategy import Precision


class SingleLayer(UnitCodec):
    """A unit of one layer. Each record has the sections of its keys, then those of its values."""

    def __init__(self, place: SegmentPlace, precision: Precision) -> None:
        self.formats = key_and_value_formats(place.shape, precision)
        k, v = self.formats
        super().__init__(place, [place.layout(k.sections() + v.sections())])

    def sources(self, index: int) -> tuple[int, ...]:
        return (0,)

    def encode(self, layers: Sequence[LayerKV]) -> tuple[torch.Tensor, ...]:
        (kv,) = layers
        (layout,) = self.layouts
        block = layout.new_block(kv.k.device)
        for run in layout.runs(0, self.place.num_tokens):
            self._write(kv, run, layout.record_views(block, run))
        return (block,)

    @abstractmethod
    def _write(self, kv: LayerKV, run: GroupRun, views: Views) -> None:
        """Store the rows of ``run`` in ``views``, the sections of their records."""


class NativeLayer(SingleLayer):
    """Stores the pool's own numbers, bit-exact, keys with their rotary embedding."""

    def _write(self, kv: LayerKV, run: GroupRun, views: Views) -> None:
        views["k"].copy_(in_groups(kv.k[run.first_token : run.end_token], run))
        views["v"].copy_(in_groups(kv.v[run.first_token : run.end_token], run))

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.layouts[0].record_views(blocks[0], run)
        return views["k"].flatten(0, 1), views["v"].flatten(0, 1)


class CodedLayer(SingleLayer):
    """Codes keys per channel, without their rotary embedding, and values per token; see ``vector_format``."""

    def _write(self, kv: LayerKV, run: GroupRun, views: Views) -> None:
        for part, vectors in zip(self.formats, self.place.vectors(kv, run), strict=True):
            part.write(vectors, views)

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.layouts[0].record_views(blocks[0], run)
        k, v = (part.read(views).expand(-1, run.group_tokens, -1, -1) for part in self.formats)
        return self.place.with_rotary(k, run), v.flatten(0, 1)
