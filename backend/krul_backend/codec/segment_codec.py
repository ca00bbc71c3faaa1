"""Encodes a segment layer by layer, as its strategy says, and decodes any rows of any layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from krul_backend.codec.interface import LayerKV, LayerShape, ReadLayer
from krul_backend.codec.layer_map import LayerMap, LayerMaps
from krul_backend.codec.options import CodecOptions, Sharing
from krul_backend.codec.parameters import MapDigest, PairParameters, RetainedCounts, SegmentParameters
from krul_backend.codec.predicted_pair import PredictedPair
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.shared_pair import SharedPair, count_retained
from krul_backend.codec.single_layer import single_layer
from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Pair, Precision, Strategy

Unit = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SegmentEncoding:
    """How one segment is encoded: fixed by ``SegmentCodec.prepare``, before the first block is written.

    ``layer_num_bytes``: exact size of each layer's block. ``params``: plain JSON values, all that is needed
    to decode beside the model's own shape.
    """

    strategy: Strategy
    layer_num_bytes: tuple[int, ...]
    params: dict[str, Any]
    units: Mapping[Unit, UnitCodec] = field(repr=False)


@dataclass(frozen=True, eq=False)
class UnitBlocks:
    """Where a layer is: layer ``index`` of a unit, with the unit's ``blocks`` that it needs, in order."""

    codec: UnitCodec
    index: int
    blocks: tuple[torch.Tensor, ...]


class SegmentDecoder:
    """Reads one segment's blocks; made by ``SegmentCodec.open``."""

    def __init__(self, strategy: Strategy, units: Mapping[Unit, UnitCodec], num_tokens: int) -> None:
        self.strategy = strategy
        self._num_tokens = num_tokens
        self._places = {layer: (unit, codec) for unit, codec in units.items() for layer in unit}

    @property
    def layer_num_bytes(self) -> tuple[int, ...]:
        """Size of each layer's block."""
        return tuple(
            self._places[layer][1].layouts[self._places[layer][0].index(layer)].num_bytes
            for layer in sorted(self._places)
        )

    def sources(self, layer: int) -> tuple[int, ...]:
        """The layers whose blocks ``decode`` needs for ``layer``."""
        unit, codec = self._place(layer)
        return tuple(unit[index] for index in codec.sources(unit.index(layer)))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each layer the last one that needs its block: itself, or the other one of a pair."""
        last = list(range(len(self._places)))
        for layer in range(len(self._places)):
            for source in self.sources(layer):
                last[source] = max(last[source], layer)
        return tuple(last)

    def tail_start(self, layer: int, first_token: int) -> int:
        """First byte of the part of ``layer``'s block that tokens from ``first_token`` on need."""
        unit, codec = self._place(layer)
        return codec.layouts[unit.index(layer)].byte_range(first_token, self._num_tokens).start

    def decode(
        self, layer: int, blocks: Mapping[int, torch.Tensor], first_token: int, end_token: int
    ) -> LayerKV:
        """Rows ``[first_token, end_token)`` of the segment, counted from its start.

        ``blocks``: uint8, of each layer in ``sources(layer)``, whole or from its ``tail_start`` of a token
        that is not after ``first_token`` on. Returns new tensors in the pool's dtype on the blocks' device,
        keys with their rotary embedding.

        Raises:
            CodecError: a block is missing or has a wrong size, or there are no such rows or layer.
        """
        found = self.unit_blocks(layer, blocks, first_token, end_token)
        return found.codec.decode(found.index, found.blocks, first_token, end_token)

    def unit_blocks(
        self, layer: int, blocks: Mapping[int, torch.Tensor], first_token: int, end_token: int
    ) -> UnitBlocks:
        """What ``decode`` reads, for those who decode in another way. Raises CodecError as it does."""
        unit, codec = self._place(layer)
        if not 0 <= first_token < end_token <= self._num_tokens:
            raise CodecError(f"rows [{first_token}, {end_token}) of a segment of {self._num_tokens} tokens")
        sources = self.sources(layer)
        missing = [source for source in sources if source not in blocks]
        if missing:
            raise CodecError(f"layer {layer} needs the blocks of layers {sources}, not given: {missing}")
        return UnitBlocks(codec, unit.index(layer), tuple(blocks[source] for source in sources))

    def _place(self, layer: int) -> tuple[Unit, UnitCodec]:
        if layer not in self._places:
            raise CodecError(f"layer {layer} of a segment of {len(self._places)} layers")
        return self._places[layer]


class SegmentCodec:
    """The codec of one model on one rank.

    ``rotary`` is the model's table; None if its rotation cannot be taken off (unknown or not invertible):
    then compressed keys keep it, and the parameters say so. ``maps`` are needed for pairs that share by
    prediction, to encode and to decode them; those that come to the mapping later are used, too.
    """

    def __init__(
        self,
        shape: LayerShape,
        num_layers: int,
        rotary: RotaryTable | None,
        options: CodecOptions | None = None,
        maps: LayerMaps | None = None,
    ) -> None:
        self._shape = shape
        self.num_layers = num_layers
        self._rotary = rotary
        self._options = CodecOptions() if options is None else options
        self._maps = {} if maps is None else maps

    def prepare(
        self, strategy: Strategy, read: ReadLayer, *, start_token: int, num_tokens: int
    ) -> SegmentEncoding:
        """Fix how tokens ``[start_token, start_token + num_tokens)`` of a conversation are encoded.

        Reads both layers of each pair that shares directions, for the number of tokens that are retained.

        Raises:
            CodecError: a strategy for another number of layers, no tokens, positions beyond the model's, or
                a pair that is to be predicted without a map for it.
        """
        if len(strategy.layers) != self.num_layers:
            raise CodecError(f"a strategy of {len(strategy.layers)} layers for a model of {self.num_layers}")
        pairs = tuple(
            self._share(pair, strategy.layers[pair[0]].precision, read, start_token)
            for pair in strategy.pairs
        )
        parameters = SegmentParameters(strategy, self._options.group_size, self._rotary is not None, pairs)
        units = self._units(parameters, start_token, num_tokens)
        decoder = SegmentDecoder(strategy, units, num_tokens)
        return SegmentEncoding(strategy, decoder.layer_num_bytes, parameters.to_json(), units)

    def encode_unit(
        self, encoding: SegmentEncoding, unit: Unit, layers: Sequence[LayerKV]
    ) -> tuple[torch.Tensor, ...]:
        """Blocks of a unit of ``encoding.strategy.units``, in its order.

        ``layers``: the unit's KV, all tokens of the segment; not changed. Returns new uint8 tensors
        ``[layer_num_bytes[l]]``, contiguous, on the device of the KV.

        Raises:
            CodecError: an unknown unit, or KV that is not of the segment's shape and dtype.
        """
        codec = encoding.units.get(unit)
        if codec is None:
            raise CodecError(f"{unit} is no unit of this strategy: {encoding.strategy.units}")
        if len(layers) != len(unit):
            raise CodecError(f"unit {unit} has {len(unit)} layers, got the KV of {len(layers)}")
        for kv in layers:
            self._check(kv, codec.place.num_tokens)
        return codec.encode(layers)

    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> SegmentDecoder:
        """A decoder for blocks that were encoded with these parameters at this place.

        Raises:
            CodecError: anything but parameters that this codec writes for this model and place, or a pair
                was stored with a map that is not there.
        """
        parameters = SegmentParameters.parse(
            params,
            num_layers=self.num_layers,
            num_kv_heads=self._shape.num_kv_heads,
            num_tokens=num_tokens,
        )
        if parameters.are_keys_unrotated and self._rotary is None:
            raise CodecError("keys were stored without rotary embedding, and this model's is not known")
        return SegmentDecoder(
            parameters.strategy, self._units(parameters, start_token, num_tokens), num_tokens
        )

    def _units(
        self, parameters: SegmentParameters, start_token: int, num_tokens: int
    ) -> dict[Unit, UnitCodec]:
        if start_token < 0 or num_tokens < 1:
            raise CodecError(f"{num_tokens} tokens from position {start_token} are no segment")
        rotary = self._rotary if parameters.are_keys_unrotated else None
        if rotary is not None and start_token + num_tokens > rotary.max_positions:
            raise CodecError(
                f"a segment ends at position {start_token + num_tokens}, the model's rotary embedding at "
                f"{rotary.max_positions}"
            )
        place = SegmentPlace(self._shape, start_token, num_tokens, parameters.group_size, rotary)
        units: dict[Unit, UnitCodec] = {}
        shared = dict(zip(parameters.strategy.pairs, parameters.pairs, strict=True))
        for unit in parameters.strategy.units:
            precision = parameters.strategy.layers[unit[0]].precision
            if len(unit) == 1:
                units[unit] = single_layer(place, precision)
                continue
            pair = unit[0], unit[1]
            how = shared[pair]
            if isinstance(how, RetainedCounts):
                units[unit] = SharedPair(place, precision, how, self._options)
            else:
                units[unit] = PredictedPair(place, precision, self._map(pair, precision, how.digest))
        return units

    def _share(self, pair: Pair, precision: Precision, read: ReadLayer, start_token: int) -> PairParameters:
        if self._options.sharing is Sharing.PREDICTED:
            return MapDigest(self._map(pair, precision).digest)
        return count_retained(read(pair[0]), read(pair[1]), start_token, self._options)

    def _map(self, pair: Pair, precision: Precision, digest: str | None = None) -> LayerMap:
        layer_map = self._maps.get((pair, precision))
        if layer_map is None:
            raise CodecError(f"no map predicts layer {pair[1]} from layer {pair[0]} at {precision.value}")
        if digest is not None and layer_map.digest != digest:
            raise CodecError(f"layers {pair} were stored with map {digest:.40}, known: {layer_map.digest}")
        return layer_map

    def _check(self, kv: LayerKV, num_tokens: int) -> None:
        shape = self._shape
        for name, x, head_dim in (("k", kv.k, shape.k_head_dim), ("v", kv.v, shape.v_head_dim)):
            expected = (num_tokens, shape.num_kv_heads, head_dim)
            if tuple(x.shape) != expected or x.dtype is not shape.dtype:
                raise CodecError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {shape.dtype} {expected}")
