"""Encodes a segment unit by unit, as its strategy says, and decodes any rows of any layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson
import torch

from krul_backend.codec.layout import LayerKV, LayerShape, ReadLayer
from krul_backend.codec.parameters import CodecOptions, RetainedCounts, SegmentParameters
from krul_backend.codec.rotary import RotaryTable, check_positions
from krul_backend.codec.segment_layout import Unit, UnitLayout
from krul_backend.codec.shared_pair import SharedPair, count_retained
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.unit import CodedLayer, NativeLayer, SegmentPlace, UnitCodec
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import SUBSPACE, Precision, Strategy

_MAX_OPENED = 256
"""Decoders that a codec keeps: of the conversations that return now."""

MOST_BASES = 4
"""Bases in which a codec opens segments: those that turns are stored in, and three older ones."""


class AwaitedBasesError(CodecError):
    """A segment is stored in bases that are not here, but may come: it cannot be decoded yet."""


@dataclass(frozen=True, eq=False)
class SegmentEncoding:
    """Holds what ``SegmentCodec.prepare`` decides about one segment before its first block is encoded.

    ``layer_first_token``: the position in the conversation from which each layer's block is kept.
    ``layer_num_bytes``: the exact size of each block from there on; see ``SegmentLayout``.
    ``left_out_num_bytes``: bytes of the parts of blocks that are not kept. Retained rows of pairs of which
    nothing is kept are not counted: how many there would be is not known.
    ``params``: plain JSON values with all that decoding needs beside the model's own shape.
    """

    strategy: Strategy
    layer_first_token: tuple[int, ...]
    layer_num_bytes: tuple[int, ...]
    left_out_num_bytes: int
    params: dict[str, Any]
    units: Mapping[Unit, UnitCodec] = field(repr=False)

    @property
    def kept_units(self) -> tuple[Unit, ...]:
        """The units that must be encoded, because something of them is kept."""
        return tuple(
            unit for unit in self.strategy.units if any(self.layer_num_bytes[layer] for layer in unit)
        )


@dataclass(frozen=True, eq=False)
class UnitBlocks:
    """Layer number ``index`` of a unit, with those of the unit's ``blocks`` that it needs, in order."""

    codec: UnitCodec
    index: int
    blocks: tuple[torch.Tensor, ...]


class SegmentDecoder(UnitLayout):
    """Decodes a segment that was stored unit by unit, by a strategy. ``SegmentCodec.open`` makes it.

    ``damage``: what the compression cost, in nats; see ``SegmentParameters``.
    """

    def __init__(
        self, parameters: SegmentParameters, units: Mapping[Unit, UnitCodec], place: SegmentPlace
    ) -> None:
        super().__init__(units, place)
        self.stored_as = parameters.strategy
        assert parameters.damage is not None
        self.damage: float = parameters.damage

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
    def native_units(self) -> tuple[NativeLayer | None, ...]:
        """``[L]``: the unit of each layer that is stored natively and alone; None for any other layer."""
        units = (self._place(layer)[1] for layer in range(len(self.stored_as.layers)))
        return tuple(unit if isinstance(unit, NativeLayer) else None for unit in units)


OpenedSegment = SegmentDecoder | SubspaceDecoder
"""A decoder of a segment that is stored in either way."""


class SegmentCodec:
    """Decodes all segments of one model on one rank, and encodes those that are stored unit by unit.

    ``rotary`` is the model's table. None if its rotation cannot be taken off (unknown or not invertible):
    then compressed keys keep it, and the parameters say so. ``subspace`` opens segments whose groups of
    layers share a subspace, if they are stored in its bases; so do those that ``add_subspace`` was given.
    """

    def __init__(
        self,
        shape: LayerShape,
        num_layers: int,
        rotary: RotaryTable | None,
        options: CodecOptions | None = None,
        subspace: SubspaceCodec | None = None,
    ) -> None:
        self._shape = shape
        self.num_layers = num_layers
        # By the digest of their bases.
        self._subspaces = {} if subspace is None else {subspace.bases.digest: subspace}
        self._rotary = rotary
        self._options = CodecOptions() if options is None else options
        # The least recently used first.
        self._opened: dict[tuple[int, int, bytes], OpenedSegment] = {}
        self._opened_lock = threading.Lock()
        # Asked for bases that are not here, by their digest: whether they may come.
        self.may_come: Callable[[str], bool] = lambda digest: False

    @property
    def num_bases(self) -> int:
        """In how many different bases segments can be opened."""
        return len(self._subspaces)

    def add_subspace(self, subspace: SubspaceCodec, *, is_older: bool = False) -> None:
        """Open segments that are stored in its bases, too, from here on. Turns are stored in those that come
        last and are not ``is_older``: these stay, and of all others the last ``MOST_BASES - 1``. Any thread
        may call it.
        """
        digest = subspace.bases.digest
        with self._opened_lock:
            others = [(known, each) for known, each in self._subspaces.items() if known != digest]
            # The newest ones are the last.
            place = len(others) - 1 if is_older and others else len(others)
            others.insert(place, (digest, subspace))
            self._subspaces = dict(others[-MOST_BASES:])
            # A decoder holds its bases.
            self._opened = {
                key: decoder
                for key, decoder in self._opened.items()
                if not isinstance(decoder, SubspaceDecoder) or decoder.bases_digest in self._subspaces
            }

    def prepare(
        self,
        strategy: Strategy,
        read: ReadLayer,
        *,
        start_token: int,
        num_tokens: int,
        head_ends: Sequence[int] | None = None,
        damage: float | None = None,
    ) -> SegmentEncoding:
        """Fix how tokens ``[start_token, start_token + num_tokens)`` of a conversation are encoded.

        ``head_ends``: tokens of layer ``l`` before position ``head_ends[l]`` of the conversation need not be
        kept; None keeps everything. ``damage`` (nats) is noted in the parameters. To count retained tokens,
        both layers of each pair are read, unless nothing of the pair is kept.

        Raises:
            CodecError: a strategy or heads for another number of layers, no tokens, or positions beyond the
                model's.
        """
        self._check_strategy(strategy)
        if head_ends is None:
            head_ends = [start_token] * self.num_layers
        elif len(head_ends) != self.num_layers:
            raise CodecError(f"heads of {len(head_ends)} layers for a model of {self.num_layers}")
        pairs = []
        for pair in strategy.pairs:
            is_kept = any(head_ends[layer] < start_token + num_tokens for layer in pair)
            pairs.append(
                count_retained(read(pair[0]), read(pair[1]), start_token, self._options)
                if is_kept
                else self._none_retained
            )
        parameters = SegmentParameters(
            strategy, self._options.group_size, self._rotary is not None, tuple(pairs), damage
        )
        place = self._place(parameters, start_token, num_tokens)
        units = self._units(parameters, place)
        layout = UnitLayout(units, place)
        layer_first_token = layout.kept_from(head_ends)
        layer_num_bytes = layout.kept_num_bytes(layer_first_token)
        return SegmentEncoding(
            strategy,
            layer_first_token,
            layer_num_bytes,
            sum(layout.layer_num_bytes) - sum(layer_num_bytes),
            parameters.to_json(),
            units,
        )

    def layer_token_bytes(self, strategy: Strategy) -> tuple[float, ...]:
        """Bytes that a token takes in each layer's block, in a full group.

        Rows that a pair retains are not counted: how many there are depends on the KV, and differs by rank.

        Raises:
            CodecError: a strategy for another number of layers.
        """
        group_size = self._options.group_size
        return tuple(num_bytes / group_size for num_bytes in self._group_layout(strategy).layer_num_bytes)

    def last_use(self, strategy: Strategy) -> tuple[int, ...]:
        """For each layer, the last layer that needs its block: the layer itself, or its partner in a pair.

        Raises:
            CodecError: as ``layer_token_bytes`` does.
        """
        return self._group_layout(strategy).last_use

    def _group_layout(self, strategy: Strategy) -> UnitLayout:
        """The layout of one full group, without retained rows."""
        self._check_strategy(strategy)
        pairs = (self._none_retained,) * len(strategy.pairs)
        parameters = SegmentParameters(strategy, self._options.group_size, False, pairs)
        place = self._place(parameters, 0, self._options.group_size)
        return UnitLayout(self._units(parameters, place), place)

    def encode_unit(
        self, encoding: SegmentEncoding, unit: Unit, layers: Sequence[LayerKV]
    ) -> tuple[torch.Tensor, ...]:
        """Encode one unit of ``encoding.strategy.units``; blocks come in the order of its layers.

        ``layers``: the unit's KV, all tokens of the segment; not changed. Returns the part of each block that
        is kept: new uint8 tensors ``[layer_num_bytes[l]]``, contiguous, on the device of the KV.

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
        blocks = codec.encode(layers)
        kept_num_bytes = [encoding.layer_num_bytes[layer] for layer in unit]
        return tuple(
            block[block.numel() - num_bytes :]
            for block, num_bytes in zip(blocks, kept_num_bytes, strict=True)
        )

    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> OpenedSegment:
        """A decoder for blocks that were encoded with these parameters at this place.

        Equal arguments get the same decoder again, as long as it is among those asked for last.

        Raises:
            AwaitedBasesError: it is stored in bases that may come.
            CodecError: anything but parameters that this codec writes for this model and place.
        """
        try:
            key = start_token, num_tokens, orjson.dumps(params)
        except TypeError:
            return self._open(params, start_token, num_tokens)
        with self._opened_lock:
            decoder = self._opened.pop(key, None)
            if decoder is None:
                decoder = self._open(params, start_token, num_tokens)
            self._opened[key] = decoder
            if len(self._opened) > _MAX_OPENED:
                del self._opened[next(iter(self._opened))]
        return decoder

    def _open(self, params: Mapping[str, Any], start_token: int, num_tokens: int) -> OpenedSegment:
        if not isinstance(params, Mapping) or params.get("codec") != SUBSPACE:
            return self.open_units(params, start_token=start_token, num_tokens=num_tokens)
        digest = params.get("bases")
        subspace = self._subspaces.get(digest) if isinstance(digest, str) else None
        if subspace is None:
            if isinstance(digest, str) and self.may_come(digest):
                raise AwaitedBasesError(f"stored in bases {digest:.16}, which are looked for")
            raise CodecError(f"stored in bases {digest!r:.80}, which are not here")
        return subspace.open(params, start_token=start_token, num_tokens=num_tokens)

    def open_units(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> SegmentDecoder:
        """Open a segment that was stored unit by unit. A new decoder each time; errors as for ``open``."""
        parameters = SegmentParameters.parse(
            params,
            num_layers=self.num_layers,
            num_kv_heads=self._shape.num_kv_heads,
            num_tokens=num_tokens,
        )
        if parameters.are_keys_unrotated and self._rotary is None:
            raise CodecError("keys were stored without rotary embedding, and this model's is not known")
        place = self._place(parameters, start_token, num_tokens)
        return SegmentDecoder(parameters, self._units(parameters, place), place)

    def _place(self, parameters: SegmentParameters, start_token: int, num_tokens: int) -> SegmentPlace:
        rotary = self._rotary if parameters.are_keys_unrotated else None
        check_positions(start_token, num_tokens, rotary)
        return SegmentPlace(self._shape, start_token, num_tokens, parameters.group_size, rotary)

    def _units(self, parameters: SegmentParameters, place: SegmentPlace) -> dict[Unit, UnitCodec]:
        units: dict[Unit, UnitCodec] = {}
        alone: dict[Precision, UnitCodec] = {}
        retained = dict(zip(parameters.strategy.pairs, parameters.pairs, strict=True))
        for unit in parameters.strategy.units:
            precision = parameters.strategy.layers[unit[0]].precision
            if len(unit) == 1:
                if precision not in alone:
                    kind = NativeLayer if precision is Precision.NATIVE else CodedLayer
                    alone[precision] = kind(place, precision)
                units[unit] = alone[precision]
                continue
            units[unit] = SharedPair(place, precision, retained[unit[0], unit[1]], self._options)
        return units

    @property
    def _none_retained(self) -> RetainedCounts:
        none = (0,) * self._shape.num_kv_heads
        return RetainedCounts(none, none)

    def _check_strategy(self, strategy: Strategy) -> None:
        if len(strategy.layers) != self.num_layers:
            raise CodecError(f"a strategy of {len(strategy.layers)} layers for a model of {self.num_layers}")

    def _check(self, kv: LayerKV, num_tokens: int) -> None:
        shape = self._shape
        for name, x, head_dim in (("k", kv.k, shape.k_head_dim), ("v", kv.v, shape.v_head_dim)):
            expected = (num_tokens, shape.num_kv_heads, head_dim)
            if tuple(x.shape) != expected or x.dtype is not shape.dtype:
                raise CodecError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {shape.dtype} {expected}")
