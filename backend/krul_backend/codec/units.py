"""Codecs that store a segment unit by unit, as a strategy says, and decode any rows of any layer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from krul_backend.codec.interface import Codec, EncodedRun, ModelKV, SegmentDecoder, TokenRun
from krul_backend.codec.layout import LayerKV, ReadLayer
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.rotary import check_positions
from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.codec.unit_restore import NativeTail, NativeTails, UnitRestorer
from krul_backend.device import Device
from krul_backend.errors import CodecError
from krul_backend.strategy import Pair, Strategy

Unit = tuple[int, ...]


@dataclass(frozen=True)
class UnitPlan:
    """How a run of tokens is stored. ``damage``, in nats, is noted of it; None if it was not measured."""

    strategy: Strategy
    damage: float | None = None


@dataclass(frozen=True, eq=False)
class UnitSegment:
    """A segment by its units.

    ``damage``: what the compression cost, in nats, and what the KV had lost before. Infinite if it is
    unknown. None if it was not measured: then it counts as 0 for a lossless strategy and as infinite for any
    other.
    """

    strategy: Strategy
    place: SegmentPlace
    units: Mapping[Unit, UnitCodec]
    damage: float | None = None

    @property
    def known_damage(self) -> float:
        if self.damage is None:
            return 0.0 if self.strategy.is_lossless else math.inf
        return self.damage


@dataclass(frozen=True, eq=False)
class UnitBlocks:
    """Layer number ``index`` of a unit, with those of the unit's ``blocks`` that it needs, in order."""

    codec: UnitCodec
    index: int
    blocks: tuple[torch.Tensor, ...]


class UnitDecoder(SegmentDecoder):
    """Lays out, and decodes, a segment that is stored unit by unit: a layer alone, or a pair that shares."""

    restorer = UnitRestorer

    def __init__(self, segment: UnitSegment) -> None:
        place, units = segment.place, segment.units
        self._places = {layer: (unit, codec) for unit, codec in units.items() for layer in unit}
        super().__init__(len(self._places), place.start_token, place.num_tokens, place.group_size)
        self.stored_as: Strategy = segment.strategy
        self.damage = segment.known_damage

    def sources(self, layer: int) -> tuple[int, ...]:
        self._check_layer(layer)
        return self._sources[layer]

    def tail_start(self, layer: int, first_token: int) -> int:
        unit, codec = self._place(layer)
        return codec.layouts[unit.index(layer)].byte_range(first_token, self._num_tokens).start

    def whole_num_bytes(self, layer: int) -> int:
        unit, codec = self._place(layer)
        return codec.layouts[unit.index(layer)].num_bytes

    @cached_property
    def _sources(self) -> dict[int, tuple[int, ...]]:
        return {
            layer: tuple(unit[index] for index in codec.sources(unit.index(layer)))
            for layer, (unit, codec) in self._places.items()
        }

    def _place(self, layer: int) -> tuple[Unit, UnitCodec]:
        self._check_layer(layer)
        return self._places[layer]

    def decode(
        self, layer: int, blocks: Mapping[int, torch.Tensor], first_token: int, end_token: int
    ) -> LayerKV:
        """Decode tokens ``[first_token, end_token)`` of one layer, counted from the segment's start.

        ``blocks``: uint8, one for each layer in ``sources(layer)``; each is whole, or begins at the
        ``tail_start`` of a token that is not after ``first_token``. Returns new tensors in the pool's dtype
        on the blocks' device, keys with their rotary embedding.

        Raises:
            CodecError: a block is missing or has a wrong size, or there are no such rows or layer.
        """
        found = self.unit_blocks(layer, blocks, first_token, end_token)
        return found.codec.decode(found.index, found.blocks, first_token, end_token)

    def unit_blocks(
        self, layer: int, blocks: Mapping[int, torch.Tensor], first_token: int, end_token: int
    ) -> UnitBlocks:
        """The unit and the blocks that ``decode`` reads, for another decoder. Same errors."""
        unit, codec = self._place(layer)
        if not 0 <= first_token < end_token <= self._num_tokens:
            raise CodecError(f"rows [{first_token}, {end_token}) of a segment of {self._num_tokens} tokens")
        sources = self.sources(layer)
        missing = [source for source in sources if source not in blocks]
        if missing:
            raise CodecError(f"layer {layer} needs the blocks of layers {sources}, not given: {missing}")
        return UnitBlocks(codec, unit.index(layer), tuple(blocks[source] for source in sources))

    @cached_property
    def native_units(self) -> tuple[UnitCodec | None, ...]:
        """``[L]``: the unit of each layer that is stored natively and alone; None for any other layer."""
        units = (self._place(layer)[1] for layer in range(self._num_layers))
        return tuple(unit if unit.is_native else None for unit in units)


class UnitsCodec(Codec[UnitPlan]):
    """Encodes segments unit by unit, and opens them."""

    def __init__(self, model: ModelKV, options: CodecOptions | None = None) -> None:
        super().__init__(model)
        self._options = CodecOptions() if options is None else options

    @abstractmethod
    def _segment(self, strategy: Strategy, place: SegmentPlace, damage: float | None = None) -> UnitSegment:
        """A segment of units that retain nothing."""

    def _observed(self, segment: UnitSegment, read: ReadLayer, kept_pairs: Sequence[Pair]) -> UnitSegment:
        """The same segment, with what its KV decides: both layers of each of ``kept_pairs`` are read."""
        return segment

    @abstractmethod
    def _params(self, segment: UnitSegment) -> dict[str, Any]:
        """Plain JSON values that ``_parse`` accepts."""

    @abstractmethod
    def _parse(self, params: Mapping[str, Any], start_token: int, num_tokens: int) -> UnitSegment:
        """The segment with these parameters.

        Raises:
            CodecError: anything that ``_params`` does not write.
        """

    def encode(self, run: TokenRun, how: UnitPlan, pause: Callable[[], None] = lambda: None) -> EncodedRun:
        """See ``Codec.encode``. To count retained tokens, both layers of each pair are read, unless nothing
        of the pair is kept. Retained rows of such pairs are not counted in ``left_out_num_bytes``.
        """
        strategy, end_token = how.strategy, run.start_token + run.num_tokens
        head_ends = run.head_ends or [run.start_token] * self.model.num_layers
        place = self._place(run.start_token, run.num_tokens, self._options.group_size)
        segment = self._checked(strategy, place, how.damage)
        layout = UnitDecoder(segment)
        layer_first_token = layout.kept_from(head_ends)
        kept_pairs = [pair for pair in strategy.pairs if min(head_ends[layer] for layer in pair) < end_token]
        if kept_pairs:
            segment = self._observed(segment, run.read, kept_pairs)
            layout = UnitDecoder(segment)
        layer_num_bytes = layout.kept_num_bytes(layer_first_token)
        return EncodedRun(
            self.name,
            self._params(segment),
            layer_first_token,
            layer_num_bytes,
            sum(layout.layer_num_bytes) - sum(layer_num_bytes),
            self._blocks(segment, layer_num_bytes, run, pause),
        )

    def _blocks(
        self, segment: UnitSegment, sizes: Sequence[int], run: TokenRun, pause: Callable[[], None]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Unit after unit, so that the device never holds the blocks of several."""
        rows: NativeTails | None = None
        for unit, codec in segment.units.items():
            if not any(sizes[layer] for layer in unit):
                continue
            pause()
            if codec.is_native and run.in_pool is not None and Device.of(run.in_pool[1]).runs_triton:
                pool, slots = run.in_pool
                rows = rows or NativeTails([NativeTail(codec, 0, run.num_tokens)], Device.of(slots))
                blocks: Sequence[torch.Tensor] = [rows.gather(*pool.buffers(unit[0]), slots)]
            else:
                layers = [run.read(layer) for layer in unit]
                for kv in layers:
                    self._check(kv, segment.place.num_tokens)
                blocks = codec.encode(layers)
            for layer, block in zip(unit, blocks, strict=True):
                yield layer, block[block.numel() - sizes[layer] :]

    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> UnitDecoder:
        return UnitDecoder(self._parse(params, start_token, num_tokens))

    def layer_token_bytes(self, strategy: Strategy) -> tuple[float, ...]:
        """Bytes that a token takes in each layer's block, in a full group.

        Rows that a pair retains are not counted: how many there are depends on the KV, and differs by rank.

        Raises:
            CodecError: a strategy for another number of layers.
        """
        group_size = self._options.group_size
        return tuple(num_bytes / group_size for num_bytes in self._of_one_group(strategy).layer_num_bytes)

    def last_use(self, strategy: Strategy) -> tuple[int, ...]:
        """For each layer, the last layer that needs its block: the layer itself, or its partner in a pair.

        Raises:
            CodecError: as ``layer_token_bytes`` does.
        """
        return self._of_one_group(strategy).last_use

    def _of_one_group(self, strategy: Strategy) -> UnitDecoder:
        """The layout of one full group, without retained rows."""
        group_size = self._options.group_size
        place = self._place(0, group_size, group_size, are_keys_unrotated=False)
        return UnitDecoder(self._checked(strategy, place))

    def _checked(self, strategy: Strategy, place: SegmentPlace, damage: float | None = None) -> UnitSegment:
        """See ``_segment``. Raises CodecError for a strategy of another number of layers."""
        if len(strategy.layers) != self.model.num_layers:
            raise CodecError(
                f"a strategy of {len(strategy.layers)} layers for a model of {self.model.num_layers}"
            )
        return self._segment(strategy, place, damage)

    def _place(
        self, start_token: int, num_tokens: int, group_size: int, *, are_keys_unrotated: bool = True
    ) -> SegmentPlace:
        rotary = self.model.rotary if are_keys_unrotated else None
        check_positions(start_token, num_tokens, rotary)
        return SegmentPlace(self.model.shape, start_token, num_tokens, group_size, rotary)

    def _check(self, kv: LayerKV, num_tokens: int) -> None:
        shape = self.model.shape
        for name, x, head_dim in (("k", kv.k, shape.k_head_dim), ("v", kv.v, shape.v_head_dim)):
            expected = (num_tokens, shape.num_kv_heads, head_dim)
            if tuple(x.shape) != expected or x.dtype is not shape.dtype:
                raise CodecError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {shape.dtype} {expected}")
