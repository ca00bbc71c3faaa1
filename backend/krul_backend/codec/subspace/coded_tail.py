"""Decodes the tails of a group of layers, those of several segments together."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.coefficients.scales import RECORD_TOKENS
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import GroupBasis, split_vectors
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.codec.subspace.vectors import put_layers
from krul_backend.device import Device
from krul_backend.machine_code import elements

_CPU = torch.device("cpu")

_LEAST_ROWS = 64
"""At least so many rows are multiplied at a time. Products of fewer rows add up in another order, and a token
would depend on where the tail that it is decoded with begins."""

_LEAST_EXACT_SCALE = 33
"""Coefficients up to the last one of this scale, a mean magnitude of 8 steps, are multiplied in fp32. In bf16
their errors would come near to those of their levels."""

_CHUNK_RECORDS = 16

CHUNK_TOKENS = _CHUNK_RECORDS * RECORD_TOKENS
"""The most tokens whose vectors are held at a time."""


class KeptMemory(threading.local):
    """The memory in which each thread decodes. It is kept, since the system is slow to give new pages."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def tensor(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU
    ) -> torch.Tensor:
        """A tensor with undefined values, in the memory of the last one with this name if that is a CPU's."""
        if not Device(device).shares_cores:
            return torch.empty(*shape, dtype=dtype, device=device)
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or len(kept) < size or (kept.dtype, kept.device) != (dtype, device):
            kept = self._kept[name] = torch.empty(size, dtype=dtype, device=device)
        return kept[:size].view(*shape)


@dataclass(frozen=True)
class SegmentTokens:
    """The tokens of a segment: ``[start_token, start_token + num_tokens)`` of its conversation. The first
    ``num_first_tokens`` of them are stored as in the pool."""

    start_token: int
    num_tokens: int
    num_first_tokens: int


@dataclass(frozen=True, eq=False)
class GroupTransform:
    """Turns the coefficients of a group into KV of the pool.

    ``decoder [R, D]``: that of the basis, in the element type in which small coefficients are multiplied.
    ``magnitudes [R]``: those of the basis, on the host, where they are read without waiting for a device.
    ``rotary``: put on keys; None for a model without it. ``shape``: of each layer in the pool.
    """

    basis: GroupBasis
    decoder: torch.Tensor
    magnitudes: NDArray[np.float32]
    rotary: RotaryTable | None
    shape: LayerShape
    memory: KeptMemory


@dataclass(frozen=True, eq=False)
class CodedTail:
    """Tokens ``[first_token, end_token)`` of a segment in a group of layers, not decoded yet.

    ``block`` uint8: the group's, from the record of ``first_token`` on. It begins with ``num_raw_bytes`` of
    the segment's first tokens; one record of each of ``record_num_bytes`` uint32 follows. ``scales`` uint8
    ``[R]``: of all coefficients. ``step``: the segment's.
    """

    first_token: int
    end_token: int
    block: torch.Tensor
    num_raw_bytes: int
    record_num_bytes: NDArray[np.uint32]
    scales: NDArray[np.uint8]
    step: float
    coder: RansCoder
    transform: GroupTransform
    segment: SegmentTokens

    @property
    def first_record(self) -> int:
        return self.first_token // RECORD_TOKENS

    @property
    def num_tokens(self) -> int:
        return self.end_token - self.first_token

    @property
    def num_used(self) -> int:
        """All coefficients from here on are zero. They matter less and less."""
        return _end_of(self.scales > 0)

    @property
    def num_exact(self) -> int:
        """So many coefficients, the first ones, are multiplied in fp32."""
        return _end_of(self.scales >= _LEAST_EXACT_SCALE)


def decode_tails(tails: Sequence[CodedTail]) -> Iterator[tuple[slice, list[LayerKV]]]:
    """Decode tails of the same group, of one or more segments of a model: all their tokens, tail after tail.

    Yields some of these rows, and the KV of each layer in them: in fp32 or the pool's type, keys with their
    rotary embedding. It lies in memory that this thread decodes the next rows into.

    Raises:
        CodecError: a record is damaged. What was yielded before is undefined then.
    """
    first_row = 0
    for chunk in _chunks(tails):
        layers = _decode_chunk(chunk)
        num_rows = len(layers[0].k)
        yield slice(first_row, first_row + num_rows), layers
        first_row += num_rows


@dataclass(frozen=True, eq=False)
class _Records:
    """Some records of a tail: bytes ``[first_byte, end_byte)`` of its block, and what is wanted of their
    tokens."""

    tail: CodedTail
    record_num_bytes: NDArray[np.uint32]
    first_byte: int
    end_byte: int
    num_unwanted: int
    first_token: int
    end_token: int


def _chunks(tails: Sequence[CodedTail]) -> Iterator[list[_Records]]:
    """Records that are decoded together: at most ``CHUNK_TOKENS``. Only the first ones of a chunk may begin
    with tokens that are not wanted."""
    chunk: list[_Records] = []
    num_records = 0
    for tail in tails:
        first_byte = tail.num_raw_bytes
        record, end_record = tail.first_record, -(-tail.end_token // RECORD_TOKENS)
        while record < end_record:
            first_token = max(tail.first_token, record * RECORD_TOKENS)
            num_unwanted = first_token - record * RECORD_TOKENS
            if chunk and (num_unwanted or num_records == _CHUNK_RECORDS):
                yield chunk
                chunk, num_records = [], 0
            end = min(end_record, record + _CHUNK_RECORDS - num_records)
            sizes = tail.record_num_bytes[record - tail.first_record : end - tail.first_record]
            end_byte = first_byte + int(sizes.sum())
            end_token = min(tail.end_token, end * RECORD_TOKENS)
            chunk.append(_Records(tail, sizes, first_byte, end_byte, num_unwanted, first_token, end_token))
            num_records += end - record
            first_byte, record = end_byte, end
    if chunk:
        yield chunk


def _decode_chunk(chunk: Sequence[_Records]) -> list[LayerKV]:
    transform, num_unwanted = chunk[0].tail.transform, chunk[0].num_unwanted
    num_rows = sum(part.end_token - part.first_token for part in chunk)
    num_used = max(part.tail.num_used for part in chunk)
    size = (num_unwanted + max(num_rows, _LEAST_ROWS) + RECORD_TOKENS, num_used)
    values = transform.memory.tensor("values", size, torch.float32)
    row = 0
    for part in chunk:
        # The coder decodes whole records; what follows the end of the tail is overwritten.
        num_decoded = min(
            len(part.record_num_bytes) * RECORD_TOKENS,
            part.tail.segment.num_tokens - (part.first_token - part.num_unwanted),
        )
        part.tail.coder.decode(
            part.tail.block[part.first_byte : part.end_byte].numpy(),
            part.record_num_bytes,
            part.tail.scales[:num_used],
            values[row : row + num_decoded].numpy(),
            shrink=SHRINK,
            step=part.tail.step,
            num_threads=torch.get_num_threads(),
        )
        row += part.num_unwanted + part.end_token - part.first_token
    values[row:] = 0
    values = values[num_unwanted : num_unwanted + max(num_rows, _LEAST_ROWS)]
    vectors, others = _multiply(transform, values, max(part.tail.num_exact for part in chunk))
    positions = [
        torch.arange(part.first_token, part.end_token) + part.tail.segment.start_token for part in chunk
    ]
    layers = _layers(transform, vectors[:num_rows], others[:num_rows], torch.cat(positions))
    row = 0
    for part in chunk:
        _put_first_tokens(part.tail, part.first_token, row, layers)
        row += part.end_token - part.first_token
    return layers


def _multiply(
    transform: GroupTransform, values: torch.Tensor, num_exact: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of coefficients ``values`` fp32 ``[T, R]``, as two terms ``[T, D]``: fp32 of the mean and the
    exact ones, and of the others, in the type that these are multiplied in."""
    basis, decoder, memory = transform.basis, transform.decoder, transform.memory
    device, num_used = basis.mean.device, values.shape[1]
    num_exact = num_used if decoder.dtype is torch.float32 else num_exact
    values = values.to(device)
    vectors = memory.tensor("vectors", (len(values), len(basis.mean)), torch.float32, device)
    torch.addmm(basis.mean, values[:, :num_exact], basis.decoder[:num_exact], out=vectors)
    factors = memory.tensor("factors", (len(values), num_used - num_exact), decoder.dtype, device)
    factors.copy_(values[:, num_exact:])
    others = memory.tensor("others", vectors.shape, decoder.dtype, device)
    return vectors, torch.mm(factors, decoder[num_exact:num_used], out=others)


def _layers(
    transform: GroupTransform, vectors: torch.Tensor, others: torch.Tensor, positions: torch.Tensor
) -> list[LayerKV]:
    """The layers of the sum of both ``[T, D]``, with the rotary embedding of ``positions [T]``."""
    shape, rotary, memory = transform.shape, transform.rotary, transform.memory
    num_layers = len(transform.basis.layers)
    if Device.of(vectors).shares_cores and (rotary is None or rotary.is_neox):
        to_bf16 = shape.dtype is torch.bfloat16
        dtype, bits = (torch.bfloat16, torch.uint16) if to_bf16 else (torch.float32, torch.uint32)
        size = (num_layers, len(vectors), shape.num_kv_heads)
        k, v = (
            memory.tensor(name, (*size, head_dim), dtype)
            for name, head_dim in (("k", shape.k_head_dim), ("v", shape.v_head_dim))
        )
        angles = (torch.empty(len(vectors), 0),) * 2 if rotary is None else rotary.angles(positions)
        cos, sin, k_bits, v_bits = (x.numpy() for x in (*angles, k.view(bits), v.view(bits)))
        are_bf16 = others.dtype is torch.bfloat16
        put_layers(vectors.numpy(), elements(others), are_bf16, cos, sin, k_bits, v_bits, to_bf16)
        return [LayerKV(*of_layer) for of_layer in zip(k, v, strict=True)]
    layers = split_vectors(vectors.add_(others), shape, num_layers)
    if rotary is None:
        return layers
    # Rotating the keys of all layers at once is faster.
    keys = rotary.rotate(torch.cat([kv.k for kv in layers], dim=1), positions.to(vectors.device))
    of_layers = torch.split(keys, shape.num_kv_heads, dim=1)
    return [LayerKV(k, kv.v) for k, kv in zip(of_layers, layers, strict=True)]


def _put_first_tokens(tail: CodedTail, first_token: int, row: int, layers: Sequence[LayerKV]) -> None:
    """Write the first tokens' own KV over what was decoded for them; ``first_token`` is at ``row``."""
    num_first_tokens, dtype = tail.segment.num_first_tokens, tail.transform.shape.dtype
    num_rows = min(num_first_tokens, tail.end_token) - first_token
    if num_rows <= 0:
        return
    parts = [part for kv in layers for part in tensors_of(kv)]
    sizes = [part[0].numel() * dtype.itemsize * num_first_tokens for part in parts]
    for part, stored in zip(parts, torch.split(tail.block[: tail.num_raw_bytes], sizes), strict=True):
        # Copied, since bytes may begin anywhere.
        rows = stored.clone().view(dtype).view(num_first_tokens, *part.shape[1:])
        part[row : row + num_rows] = rows[first_token : first_token + num_rows].to(part.device)


def tensors_of(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, in the order in which they are stored."""
    return kv.k, kv.v


def _end_of(is_wanted: NDArray[np.bool_]) -> int:
    """The place after the last one that is wanted; 0 if none is."""
    return int(is_wanted.nonzero()[0].max(initial=-1)) + 1
