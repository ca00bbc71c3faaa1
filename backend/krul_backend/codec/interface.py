"""The contract of codecs: how each encodes tokens, opens what it stored, and restores it.

A codec has a ``name``, which stands in the parameters of every segment that it stored; ``registry.py`` finds
it by that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from krul_backend.codec.layout import LayerShape, ReadLayer, number_type
from krul_backend.codec.rotary import RotaryTable
from krul_backend.device import Device
from krul_backend.errors import CodecError
from krul_backend.strategy import StoredAs

MAX_JOINED_BYTES = 32 << 20
"""Most bytes of a layer, as the pool holds it, that are copied or decoded together: those of one long
segment."""


@dataclass(frozen=True, eq=False)
class ModelKV:
    """The KV of one model on one rank, as codecs need to know it.

    ``rotary`` is the model's table. None if its rotation cannot be taken off (unknown or not invertible).
    """

    shape: LayerShape
    num_layers: int
    rotary: RotaryTable | None


@dataclass(frozen=True)
class TokenRun:
    """Tokens ``[start_token, start_token + num_tokens)`` of a conversation that become one segment.

    ``read`` reads them from the pool. ``head_ends[l]``: tokens of layer ``l`` before that position need not
    be kept; None keeps everything. ``in_pool``: the pool and the slots that ``read`` reads, if it does.
    """

    read: ReadLayer
    start_token: int
    num_tokens: int
    head_ends: Sequence[int] | None = None
    in_pool: tuple[KVBuffers, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class EncodedRun:
    """A run of tokens as it is stored. See ``SegmentManifest`` for the first four.

    ``left_out_num_bytes``: of the parts of blocks that are not kept. ``blocks``: the layer and the bytes
    (uint8, on any device) of every block that is not empty; some are only made when they are asked for.
    """

    codec: str
    params: dict[str, Any]
    layer_first_token: tuple[int, ...]
    layer_num_bytes: tuple[int, ...]
    left_out_num_bytes: int
    blocks: Iterable[tuple[int, torch.Tensor]] = field(repr=False)


How = TypeVar("How")


class Codec(ABC, Generic[How]):
    """One way to store segments, for one model on one rank. Any thread may use it.

    ``How`` says how a run of tokens is stored: what the codec leaves open. What a segment's decoding costs
    follows from ``SegmentDecoder.stored_as``.
    """

    name: ClassVar[str]

    def __init__(self, model: ModelKV) -> None:
        self.model = model

    @abstractmethod
    def encode(self, run: TokenRun, how: How, pause: Callable[[], None] = lambda: None) -> EncodedRun:
        """Encode a run of tokens, or the beginning of it. ``pause`` is called between pieces of the work,
        which it may hold up.

        Raises:
            CodecError: no tokens, positions beyond the model's, or ``how`` is none for this model.
        """

    @abstractmethod
    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> SegmentDecoder:
        """A decoder for blocks that were encoded with these parameters at this place.

        Raises:
            CodecError: anything but parameters that this codec writes for this model and place.
        """


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


class SegmentDecoder(SegmentLayout):
    """A stored segment that its codec has opened.

    ``stored_as``: how its layers are stored. ``damage``: the KL divergence of next-token distributions, in
    nats, that is expected when a conversation gets this KV back, what it had lost before included; infinite
    if it is unknown. ``restorer``: what restores such segments. ``uses_cores``: whether decoding on a host
    is faster on several cores.
    """

    stored_as: StoredAs
    damage: float
    restorer: ClassVar[type[Restorer[Any]]]
    uses_cores: ClassVar[bool] = False


class KVBuffers(Protocol):
    """Hands out what KV is written to: the buffers of each layer, see ``DevicePool.buffers``."""

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...


Decoder = TypeVar("Decoder", bound=SegmentDecoder)
Decoder_co = TypeVar("Decoder_co", bound=SegmentDecoder, covariant=True)


class TailReader(Protocol[Decoder_co]):
    """Reads the tails of one leased segment. Rows are tokens of the segment, counted from its first one.

    ::

        [row, first_row(layer))      the head of a layer: not read
        [first_row(layer), end_row)  its tail
    """

    @property
    def decoder(self) -> Decoder_co: ...

    @property
    def num_tokens(self) -> int:
        """The number of the segment's tokens that are wanted, the heads of layers included."""

    @property
    def end_row(self) -> int: ...

    @property
    def slots(self) -> torch.Tensor:
        """The slots of these tokens: int64 ``[num_tokens]``."""

    def has_tail(self, layer: int) -> bool: ...

    def first_row(self, layer: int) -> int: ...

    def num_head_rows(self, layer: int) -> int:
        """The number of wanted tokens that the head of this layer covers."""

    def block(self, source: int) -> Any:
        """Names the part of a block that is read, so that its bytes are checked before."""

    def num_tail_bytes(self, source: int, layer: int) -> int:
        """The size of a block from the record on in which the tail of ``layer`` begins; 0 without a tail."""

    def end_of_block(self, source: int, num_bytes: int) -> NDArray[np.uint8]:
        """The last bytes of a layer's block. They count as read.

        Raises:
            CodecError: so much of it is not stored.
        """


class TailGroup(ABC):
    """Tails of one layer. ``fetch`` and then ``restore`` are called; a second ``fetch`` does nothing.
    ``blocks`` name what must have been checked before ``fetch``. ``is_decoded``: ``restore`` does more than
    copy; ``decodes_early``: so does ``fetch``, on a GPU.
    """

    blocks: list[Any]
    is_decoded: ClassVar[bool] = False
    decodes_early: ClassVar[bool] = False

    @abstractmethod
    def fetch(self, device: Device, later: Sequence[TailGroup] = ()) -> None:
        """Copy to the device what is not there yet, on the current stream; and of ``later`` groups, which may
        be fetched already, what is sooner done together."""

    @abstractmethod
    def restore(self, pool: KVBuffers) -> None:
        """Write the tails to their slots, on the current stream.

        Raises:
            CodecError: blocks that the codec cannot have written.
        """


class Restorer(ABC, Generic[Decoder]):
    """Restores the segments of one batch that are stored alike: one object per batch."""

    def __init__(self, device: Device) -> None:
        self.device = device

    @abstractmethod
    def groups(self, layer: int, readers: Sequence[TailReader[Decoder]]) -> list[TailGroup]:
        """The tails of a layer, as they are restored together: none of readers without one. ``readers`` are
        the same for every layer; layers are restored in ascending order."""

    @property
    def has_decoded(self) -> bool:
        """True once something was decoded, so that ``check`` may find damage."""
        return False

    def check(self) -> None:
        """After the last layer: raise what ``TailGroup.restore`` could not know yet, because a GPU finds it.

        The calling thread waits for the current stream if anything was decoded on a GPU.

        Raises:
            CodecError: as for ``TailGroup.restore``.
        """

    def close(self) -> None:
        """Free what is still kept in device memory. Nothing is restored afterwards."""


_Joined = TypeVar("_Joined")


def in_batches(parts: Sequence[_Joined], num_bytes: Callable[[_Joined], int]) -> Iterator[list[_Joined]]:
    """Runs of ``parts`` of at most ``MAX_JOINED_BYTES`` together; a larger part is alone."""
    batch: list[_Joined] = []
    for part in parts:
        if batch and sum(map(num_bytes, batch)) + num_bytes(part) > MAX_JOINED_BYTES:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def check_slots(num_tokens: int, slots: torch.Tensor) -> None:
    """Raises CodecError unless ``slots`` are one int64 for each of the tokens."""
    if slots.shape != (num_tokens,) or slots.dtype is not torch.int64:
        shape = tuple(slots.shape)
        raise CodecError(f"{num_tokens} tokens need as many int64 slots, got {slots.dtype} {shape}")


def check_buffers(shape: LayerShape, k_buffer: torch.Tensor, v_buffer: torch.Tensor) -> None:
    """Raises CodecError unless the buffers are those of a pool of this shape, and of its dtype or fp8."""
    for name, buffer, head_dim in (
        ("k_buffer", k_buffer, shape.k_head_dim),
        ("v_buffer", v_buffer, shape.v_head_dim),
    ):
        expected = (shape.num_kv_heads, head_dim)
        fits = shape.dtype in (buffer.dtype, number_type(buffer.dtype))
        if buffer.ndim != 3 or tuple(buffer.shape[1:]) != expected or not fits:
            raise CodecError(
                f"{name} is {buffer.dtype} {tuple(buffer.shape)}, expected {shape.dtype} [slots, *{expected}]"
            )
