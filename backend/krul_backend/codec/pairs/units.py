"""Layers that are stored as codes, and how units are decoded by one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from krul_backend.codec.layout import GroupRun, LayerKV, PoolRows, Views
from krul_backend.codec.pairs.vector_format import VectorFormat, key_and_value_formats
from krul_backend.codec.unit import SegmentPlace, SingleLayer, UnitCodec
from krul_backend.device import Device
from krul_backend.strategy import Precision

_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedUnit(UnitCodec):
    """A unit that one kernel decodes straight into the pool, where a GPU can; see ``triton_restore``.

    ``formats``: of its keys and of its values.
    """

    formats: tuple[VectorFormat, VectorFormat]

    def restore(self, index: int, blocks: Sequence[torch.Tensor], tokens: range, target: PoolRows) -> None:
        if can_fuse(self, blocks, target):
            from krul_backend.codec.pairs.triton_restore import restore_fused

            restore_fused(self, index, blocks, tokens, target)
        else:
            super().restore(index, blocks, tokens, target)


def can_fuse(unit: UnitCodec, blocks: Sequence[torch.Tensor], target: PoolRows) -> bool:
    """True if the fused pass can restore a layer of this unit.

    It cannot if a tensor is on the CPU or on another GPU; if elements of the pool are not bf16, fp16 or fp32;
    or if the channels of a vector are not neighbours in memory.
    """
    return (
        isinstance(unit, FusedUnit)
        and Device.of(target.k_buffer).runs_triton
        and all(tensor.device == target.k_buffer.device for tensor in (*blocks, *target))
        and unit.place.shape.dtype in _FUSED_DTYPES
        and target.k_buffer.stride(-1) == target.v_buffer.stride(-1) == 1
        and target.slots.is_contiguous()
    )


class CodedLayer(FusedUnit, SingleLayer):
    """Codes keys per channel, without their rotary embedding, and values per token; see ``vector_format``."""

    def __init__(self, place: SegmentPlace, precision: Precision) -> None:
        self.formats = key_and_value_formats(place.shape, precision)
        k, v = self.formats
        super().__init__(place, k.sections() + v.sections())

    def _write(self, kv: LayerKV, run: GroupRun, views: Views) -> None:
        for part, vectors in zip(self.formats, self.place.vectors(kv, run), strict=True):
            part.write(vectors, views)

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.layouts[0].record_views(blocks[0], run)
        k, v = (part.read(views).expand(-1, run.group_tokens, -1, -1) for part in self.formats)
        return self.place.with_rotary(k, run), v.flatten(0, 1)
