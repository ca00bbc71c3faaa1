"""Tells which bytes of a segment's blocks hold which tokens, and which layers need them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.errors import CodecError

Unit = tuple[int, ...]


class SegmentLayout(ABC):
    """Computes sizes and byte ranges of one segment's blocks, whole or kept from a record of tokens on.

    ::

        [start_token, kept[l])  not in layer l's block
        [kept[l], end)          in layer l's block, kept[l] at the start of a record
        kept[l] == end          layer l's block is empty

    ``head_ends`` and ``kept`` are positions in the conversation, as in a manifest. All other tokens are
    counted from the segment's start. ``record_tokens`` are coded together: a block can be cut between them.
    """

    def __init__(self, num_layers: int, start_token: int, num_tokens: int, record_tokens: int) -> None:
        self._num_layers = num_layers
        self._start_token = start_token
        self._num_tokens = num_tokens
        self._record_tokens = record_tokens

    @abstractmethod
    def sources(self, layer: int) -> tuple[int, ...]:
        """The layers whose blocks ``layer`` is decoded from.

        Raises:
            CodecError: no such layer.
        """

    @abstractmethod
    def tail_start(self, layer: int, first_token: int) -> int:
        """The byte of ``layer``'s whole block from which on it holds tokens ``first_token`` and later."""

    @abstractmethod
    def whole_num_bytes(self, layer: int) -> int:
        """Size of ``layer``'s whole block: none if its KV lies in the block of another layer."""

    @cached_property
    def layer_num_bytes(self) -> tuple[int, ...]:
        """Size of each layer's whole block."""
        return tuple(self.whole_num_bytes(layer) for layer in range(self._num_layers))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each layer, the last layer that needs its block: the layer itself, or one that shares it."""
        last = list(range(self._num_layers))
        for layer in range(self._num_layers):
            for source in self.sources(layer):
                last[source] = max(last[source], layer)
        return tuple(last)

    def kept_from(self, head_ends: Sequence[int]) -> tuple[int, ...]:
        """The first token to keep in each block so that layer ``l`` can be decoded from ``head_ends[l]`` on.

        A block keeps the longest tail that any layer decoded from it needs, from the start of a record on. A
        head that ends before the segment keeps the whole block, one that ends after it keeps nothing.

        Raises:
            CodecError: another number of layers.
        """
        self._check_num_layers(head_ends)
        end = self._start_token + self._num_tokens
        kept = [end] * self._num_layers
        for layer, head_end in enumerate(head_ends):
            if head_end < end:
                head_len = max(0, head_end - self._start_token)
                first = self._start_token + head_len - head_len % self._record_tokens
                for source in self.sources(layer):
                    kept[source] = min(kept[source], first)
        return tuple(kept)

    def kept_num_bytes(self, layer_first_token: Sequence[int]) -> tuple[int, ...]:
        """Size in bytes of each layer's block if it is kept from ``layer_first_token[l]`` to its end.

        Raises:
            CodecError: another number of layers, or a token at which no record starts.
        """
        self._check_first_tokens(layer_first_token)
        sizes = []
        for layer, first_token in enumerate(layer_first_token):
            head_len = first_token - self._start_token
            is_empty = head_len == self._num_tokens
            sizes.append(0 if is_empty else self.layer_num_bytes[layer] - self.tail_start(layer, head_len))
        return tuple(sizes)

    def decodable_from(self, layer_first_token: Sequence[int]) -> tuple[int, ...]:
        """The first token from which each layer can be decoded, if the blocks are kept from there on.

        Raises:
            CodecError: as ``kept_num_bytes`` does.
        """
        self._check_first_tokens(layer_first_token)
        if len(set(layer_first_token)) == 1:
            # As most segments are stored: whole, or all layers from one record on. Every plan asks.
            return tuple(layer_first_token)
        return tuple(
            max(layer_first_token[source] for source in self.sources(layer))
            for layer in range(self._num_layers)
        )

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self._num_layers:
            raise CodecError(f"layer {layer} of a segment of {self._num_layers} layers")

    def _check_num_layers(self, tokens: Sequence[int]) -> None:
        if len(tokens) != self._num_layers:
            raise CodecError(f"{len(tokens)} tokens for a segment of {self._num_layers} layers")

    def _check_first_tokens(self, layer_first_token: Sequence[int]) -> None:
        self._check_num_layers(layer_first_token)
        for layer, first_token in enumerate(layer_first_token):
            head_len = first_token - self._start_token
            is_record_start = head_len % self._record_tokens == 0 and 0 <= head_len < self._num_tokens
            if not is_record_start and head_len != self._num_tokens:
                raise CodecError(
                    f"layer {layer} is kept from token {first_token} on, where no record of "
                    f"{self._record_tokens} tokens starts: the segment has tokens {self._start_token} to "
                    f"{self._start_token + self._num_tokens}"
                )


class UnitLayout(SegmentLayout):
    """The layout of a segment that is stored unit by unit: a layer alone, or a pair that shares."""

    def __init__(self, units: Mapping[Unit, UnitCodec], place: SegmentPlace) -> None:
        self._places = {layer: (unit, codec) for unit, codec in units.items() for layer in unit}
        super().__init__(len(self._places), place.start_token, place.num_tokens, place.group_size)

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
