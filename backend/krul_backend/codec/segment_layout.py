"""Tells which bytes of a segment's blocks hold which tokens, and which layers need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from krul_backend.codec.unit import SegmentPlace, UnitCodec
from krul_backend.errors import CodecError

Unit = tuple[int, ...]


class SegmentLayout:
    """Computes sizes and byte ranges of one segment's blocks, whole or kept from a group of tokens on.

    ::

        [start_token, kept[l])  not in layer l's block
        [kept[l], end)          in layer l's block, kept[l] at the start of a group
        kept[l] == end          layer l's block is empty

    ``head_ends`` and ``kept`` are positions in the conversation, as in a manifest. All other tokens are
    counted from the segment's start.
    """

    def __init__(self, units: Mapping[Unit, UnitCodec], place: SegmentPlace) -> None:
        self._places = {layer: (unit, codec) for unit, codec in units.items() for layer in unit}
        self._num_tokens = place.num_tokens
        self._start_token = place.start_token
        self._group_size = place.group_size

    @cached_property
    def layer_num_bytes(self) -> tuple[int, ...]:
        """Size of each layer's whole block."""
        return self.kept_num_bytes([self._start_token] * len(self._places))

    def sources(self, layer: int) -> tuple[int, ...]:
        """The layers whose blocks ``layer`` is decoded from."""
        self._place(layer)
        return self._sources[layer]

    @cached_property
    def _sources(self) -> dict[int, tuple[int, ...]]:
        return {
            layer: tuple(unit[index] for index in codec.sources(unit.index(layer)))
            for layer, (unit, codec) in self._places.items()
        }

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """For each layer, the last layer that needs its block: the layer itself, or its partner in a pair."""
        last = list(range(len(self._places)))
        for layer in range(len(self._places)):
            for source in self.sources(layer):
                last[source] = max(last[source], layer)
        return tuple(last)

    def tail_start(self, layer: int, first_token: int) -> int:
        """The byte of ``layer``'s whole block from which on it holds tokens ``first_token`` and later."""
        unit, codec = self._place(layer)
        return codec.layouts[unit.index(layer)].byte_range(first_token, self._num_tokens).start

    def kept_from(self, head_ends: Sequence[int]) -> tuple[int, ...]:
        """The first token to keep in each block so that layer ``l`` can be decoded from ``head_ends[l]`` on.

        A block keeps the longest tail that any layer decoded from it needs, from the start of a group on. A
        head that ends before the segment keeps the whole block, one that ends after it keeps nothing.

        Raises:
            CodecError: another number of layers.
        """
        self._check_num_layers(head_ends)
        end = self._start_token + self._num_tokens
        kept = [end] * len(self._places)
        for layer, head_end in enumerate(head_ends):
            if head_end < end:
                head_len = max(0, head_end - self._start_token)
                first = self._start_token + head_len - head_len % self._group_size
                for source in self.sources(layer):
                    kept[source] = min(kept[source], first)
        return tuple(kept)

    def kept_num_bytes(self, layer_first_token: Sequence[int]) -> tuple[int, ...]:
        """Size in bytes of each layer's block if it is kept from ``layer_first_token[l]`` to its end.

        Raises:
            CodecError: another number of layers, or a token at which no group starts.
        """
        self._check_first_tokens(layer_first_token)
        sizes = []
        for layer, first_token in enumerate(layer_first_token):
            unit, codec = self._places[layer]
            layout = codec.layouts[unit.index(layer)]
            head_len = first_token - self._start_token
            is_empty = head_len == self._num_tokens
            sizes.append(0 if is_empty else layout.num_bytes - self.tail_start(layer, head_len))
        return tuple(sizes)

    def decodable_from(self, layer_first_token: Sequence[int]) -> tuple[int, ...]:
        """The first token from which each layer can be decoded, if the blocks are kept from there on.

        Raises:
            CodecError: as ``kept_num_bytes`` does.
        """
        self._check_first_tokens(layer_first_token)
        if len(set(layer_first_token)) == 1:
            # As most segments are stored: whole, or all layers from one group on. Every plan asks.
            return tuple(layer_first_token)
        return tuple(
            max(layer_first_token[source] for source in self.sources(layer))
            for layer in range(len(self._places))
        )

    def _place(self, layer: int) -> tuple[Unit, UnitCodec]:
        if layer not in self._places:
            raise CodecError(f"layer {layer} of a segment of {len(self._places)} layers")
        return self._places[layer]

    def _check_num_layers(self, tokens: Sequence[int]) -> None:
        if len(tokens) != len(self._places):
            raise CodecError(f"{len(tokens)} tokens for a segment of {len(self._places)} layers")

    def _check_first_tokens(self, layer_first_token: Sequence[int]) -> None:
        self._check_num_layers(layer_first_token)
        for layer, first_token in enumerate(layer_first_token):
            head_len = first_token - self._start_token
            is_group_start = head_len % self._group_size == 0 and 0 <= head_len < self._num_tokens
            if not is_group_start and head_len != self._num_tokens:
                raise CodecError(
                    f"layer {layer} is kept from token {first_token} on, where no group of "
                    f"{self._group_size} tokens starts: the segment has tokens {self._start_token} to "
                    f"{self._start_token + self._num_tokens}"
                )
