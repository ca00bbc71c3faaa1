"""A unit is what is encoded together: one layer, or a pair that shares. What each of them offers, and native
layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from krul_backend.codec.layout import (
    BlockLayout,
    GroupRun,
    LayerKV,
    LayerShape,
    PoolRows,
    Section,
    Views,
    empty_kv,
    in_groups,
    put_rows,
    to_elements,
)
from krul_backend.codec.rotary import RotaryTable


@dataclass(frozen=True)
class SegmentPlace:
    """Where a segment lies: tokens ``[start_token, start_token + num_tokens)`` of a conversation.

    They are coded in groups of ``group_size``. ``rotary`` takes the embedding off keys before they are
    compressed; None leaves it on.
    """

    shape: LayerShape
    start_token: int
    num_tokens: int
    group_size: int
    rotary: RotaryTable | None

    def layout(self, record: tuple[Section, ...], trailer: tuple[Section, ...] = ()) -> BlockLayout:
        return BlockLayout(record, trailer, self.group_size, self.num_tokens)

    def vectors(self, kv: LayerKV, run: GroupRun) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of ``run`` in a segment's ``kv``, keys without rotary embedding: fp32 ``[G, n, H, D]``."""
        k, v = kv.k[run.first_token : run.end_token], kv.v[run.first_token : run.end_token]
        if self.rotary is not None:
            k = self.rotary.unrotate(k, self._positions(run))
        return in_groups(k, run).float(), in_groups(v, run).float()

    def with_rotary(self, k: torch.Tensor, run: GroupRun) -> torch.Tensor:
        """Decoded keys, fp32 ``[G, n, H, D]``, with rotary embedding: ``[tokens of the run, H, D]``."""
        k = k.reshape(-1, *k.shape[2:])
        return k if self.rotary is None else self.rotary.rotate(k, self._positions(run))

    def _positions(self, run: GroupRun) -> torch.Tensor:
        assert self.rotary is not None
        first, end = self.start_token + run.first_token, self.start_token + run.end_token
        # Made on the table's device: nothing is copied, and the thread does not wait for the stream.
        return torch.arange(first, end, device=self.rotary.cos.device)


class UnitCodec(ABC):
    """Encodes and decodes one unit of one segment. ``layouts`` has one block for each of its layers.

    ``is_native``: it is one layer, stored as it is in the pool.
    """

    is_native: ClassVar[bool] = False

    def __init__(self, place: SegmentPlace, layouts: Sequence[BlockLayout]) -> None:
        self.place = place
        self.layouts = tuple(layouts)

    @abstractmethod
    def encode(self, layers: Sequence[LayerKV]) -> tuple[torch.Tensor, ...]:
        """Encode all tokens of the segment: uint8 ``[layouts[n].num_bytes]`` on the device of the KV."""

    @abstractmethod
    def sources(self, index: int) -> tuple[int, ...]:
        """The layers of the unit whose blocks are needed to decode its layer ``index``."""

    @abstractmethod
    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the keys and values ``[tokens of the run, H, D]`` of layer ``index``, in pool dtype or fp32.

        ``blocks`` are checked blocks in the order of ``sources(index)``.
        """

    def decode(self, index: int, blocks: Sequence[torch.Tensor], first_token: int, end_token: int) -> LayerKV:
        """Decode tokens ``[first_token, end_token)`` in the pool's dtype, on the blocks' device.

        Raises:
            CodecError: a block that this unit cannot have written.
        """
        checked = self.check(index, blocks, first_token)
        kv = empty_kv(self.place.shape, end_token - first_token, checked[0].device)
        for run in self.layouts[index].runs(first_token, end_token):
            run_k, run_v = self.decode_run(index, checked, run)
            # [first, end)  of the segment: what this run has of the rows asked for
            first, end = max(first_token, run.first_token), min(end_token, run.end_token)
            for rows, run_rows in ((kv.k, run_k), (kv.v, run_v)):
                wanted = run_rows[first - run.first_token : end - run.first_token]
                rows[first - first_token : end - first_token] = to_elements(wanted, rows.dtype)
        return kv

    def restore(self, index: int, blocks: Sequence[torch.Tensor], tokens: range, target: PoolRows) -> None:
        """Decode tokens into rows of one layer of the pool; see ``restore_layer``."""
        kv = self.decode(index, blocks, tokens.start, tokens.stop)
        put_rows(target.k_buffer, target.slots, kv.k)
        put_rows(target.v_buffer, target.slots, kv.v)

    def check(self, index: int, blocks: Sequence[torch.Tensor], first_token: int) -> list[torch.Tensor]:
        """Blocks of ``sources(index)`` that can be viewed; see ``BlockLayout.check``."""
        layouts = [self.layouts[source] for source in self.sources(index)]
        return [layout.check(block, first_token) for layout, block in zip(layouts, blocks, strict=True)]


class SingleLayer(UnitCodec):
    """A unit of one layer. ``sections``: of a record."""

    def __init__(self, place: SegmentPlace, sections: tuple[Section, ...]) -> None:
        super().__init__(place, [place.layout(sections)])

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

    is_native = True

    def __init__(self, place: SegmentPlace) -> None:
        shape = place.shape
        k, v = (
            Section(name, shape.dtype, (shape.num_kv_heads, head_dim), per_token=True)
            for name, head_dim in (("k", shape.k_head_dim), ("v", shape.v_head_dim))
        )
        super().__init__(place, (k, v))

    def _write(self, kv: LayerKV, run: GroupRun, views: Views) -> None:
        views["k"].copy_(in_groups(kv.k[run.first_token : run.end_token], run))
        views["v"].copy_(in_groups(kv.v[run.first_token : run.end_token], run))

    def decode_run(
        self, index: int, blocks: Sequence[torch.Tensor], run: GroupRun
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = self.layouts[0].record_views(blocks[0], run)
        return views["k"].flatten(0, 1), views["v"].flatten(0, 1)
