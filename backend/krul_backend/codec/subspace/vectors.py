"""Makes the vectors that are multiplied with a basis from the KV of its layers, and KV of vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from krul_backend.codec.coefficients.scales import Integers, Values
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.unit_restore import NativeTails
from krul_backend.device import Device
from krul_backend.machine_code import bits_of, compiled, elements, number_of


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Some tokens of a segment whose vectors are made.

    ``index`` int64 ``[n]`` on the CPU: counted from the segment's first token, which is at position
    ``start_token``. ``rotary``: None for a model without it.
    """

    index: torch.Tensor
    start_token: int
    rotary: RotaryTable | None

    @cached_property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosine and sine ``[n, rotary_dim / 2]`` of the turns that take the embedding off their keys."""
        return None if self.rotary is None else self.rotary.inverse(self.index + self.start_token)


class BlockReads(ABC):
    """Reads layers of a segment that lies in host memory in native blocks; called, it is a ``ReadLayer``.

    ``rows``: where the tokens lie in a layer's bytes on the device, which are those of ``blocks`` back to
    back.
    """

    @property
    @abstractmethod
    def rows(self) -> NativeTails: ...

    @abstractmethod
    def __call__(self, layer: int) -> LayerKV: ...

    @abstractmethod
    def blocks(self, layer: int) -> list[NDArray[np.uint8]]:
        """The bytes of a layer, checked, in page-locked memory."""

    @abstractmethod
    def first_tokens(self, layer: int, num_tokens: int) -> LayerKV:
        """The KV of the first tokens, on the CPU."""


def put_vectors(layers: Sequence[LayerKV], rows: TokenRows, mean: torch.Tensor, out: torch.Tensor) -> None:
    """Write the vectors of some tokens of a segment in a group of layers, less ``mean [D]``, to ``out`` fp32
    ``[n, D]``, both on one device. See ``GroupBasis``. ``layers``: the segment's KV in each layer of the
    group."""
    rotary, num_rows, num_layers = rows.rotary, len(rows.index), len(layers)
    if Device.of(mean).shares_cores and (rotary is None or rotary.is_neox):
        angles = rows.angles or (torch.empty(num_rows, 0),) * 2
        index, cos, sin, means, vectors = (each.numpy() for each in (rows.index, *angles, mean, out))
        first = 0
        for kv in layers:
            k, v, is_bf16 = elements(kv.k), elements(kv.v), kv.k.dtype is torch.bfloat16
            _put_layer(k, v, is_bf16, index, cos, sin, means, first, vectors)
            first += k[0].size + v[0].size
        return
    picked = rows.index.to(mean.device)
    # [n, layers * Hkv, k_head_dim]: rotating the keys of all layers at once is faster.
    keys = torch.cat([kv.k.index_select(0, picked) for kv in layers], dim=1).float()
    if rotary is not None and rows.angles is not None:
        rotary.turn_in_place(keys, *rows.angles)
    keys = keys.view(num_rows, num_layers, -1)
    values = torch.stack([kv.v.index_select(0, picked).flatten(1) for kv in layers], dim=1)
    torch.sub(torch.cat([keys, values.float()], dim=2).view_as(out), mean, out=out)


@compiled
def put_layers(
    vectors: Values,
    others: NDArray[Any],
    are_bf16: bool,
    cos: Values,
    sin: Values,
    keys: NDArray[Any],
    values: NDArray[Any],
    to_bf16: bool,
) -> None:
    """Add ``others [T, D]``, elements, to ``vectors [T, D]``, and write the layers of the sums, as bits, to
    ``keys`` and ``values [layers, T, Hkv, head_dim]``, keys turned by ``cos, sin [T, rotary_dim / 2]``."""
    num_layers, _, num_heads, head_dim = keys.shape
    half, value_dim = cos.shape[1], values.shape[3]
    for token in range(len(vectors)):
        row, other, c, s = vectors[token], others[token], cos[token], sin[token]
        for index in range(len(row)):
            row[index] += number_of(other[index], are_bf16)
        begin = 0
        for layer in range(num_layers):
            for head in range(num_heads):
                key = keys[layer, token, head]
                x, x_out = row[begin : begin + half], key[:half]
                y, y_out = row[begin + half : begin + 2 * half], key[half : 2 * half]
                for index in range(half):
                    x_out[index] = bits_of(x[index] * c[index] - y[index] * s[index], to_bf16)
                    y_out[index] = bits_of(y[index] * c[index] + x[index] * s[index], to_bf16)
                for index in range(2 * half, head_dim):
                    key[index] = bits_of(row[begin + index], to_bf16)
                begin += head_dim
            for head in range(num_heads):
                value, x = values[layer, token, head], row[begin : begin + value_dim]
                for index in range(value_dim):
                    value[index] = bits_of(x[index], to_bf16)
                begin += value_dim


@compiled
def _put_layer(
    keys: NDArray[Any],
    values: NDArray[Any],
    is_bf16: bool,
    rows: Integers,
    cos: Values,
    sin: Values,
    mean: Values,
    first: int,
    vectors: Values,
) -> None:
    """Write one layer's part of ``vectors [n, D]``, from column ``first`` on."""
    num_heads, head_dim, half = keys.shape[1], keys.shape[2], cos.shape[1]
    # Rows and parts of rows are arrays of their own: their indices are known to be in order, and loops over
    # them become vector instructions.
    for token in range(len(rows)):
        row, c, s = vectors[token], cos[token], sin[token]
        for head in range(num_heads):
            begin, key = first + head * head_dim, keys[rows[token], head]
            out, means = row[begin : begin + head_dim], mean[begin : begin + head_dim]
            x, x_out, x_means = key[:half], out[:half], means[:half]
            y, y_out, y_means = key[half : 2 * half], out[half : 2 * half], means[half : 2 * half]
            for index in range(half):
                a, b = number_of(x[index], is_bf16), number_of(y[index], is_bf16)
                x_out[index] = a * c[index] - b * s[index] - x_means[index]
                y_out[index] = b * c[index] + a * s[index] - y_means[index]
            for index in range(2 * half, head_dim):
                out[index] = number_of(key[index], is_bf16) - means[index]
        for head in range(num_heads):
            value = values[rows[token], head]
            begin = first + num_heads * head_dim + head * len(value)
            out, means = row[begin : begin + len(value)], mean[begin : begin + len(value)]
            for index in range(len(value)):
                out[index] = number_of(value[index], is_bf16) - means[index]
