"""Measures on a conversation's own KV what storing a layer at some precision would cost it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krul_backend.attention.rows import QueryRows, attention_rows, default_block_bytes
from krul_backend.codec.interface import LayerKV, ReadLayer
from krul_backend.errors import StrategyError
from krul_backend.strategy.interface import LayerOption
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Precision

LayerAndPrecision = tuple[int, Precision]

RoundTrip = Callable[[int, Precision, LayerKV], tuple[LayerKV, float]]
"""Encodes and decodes one layer: ``(layer, precision, kv) -> (its KV afterwards, bytes per token)``.

Tokens that would not be stored come back as they are, and do not count among the bytes' tokens.
"""


@dataclass(frozen=True)
class MeasuredLayer:
    """One way to store a layer, with the relative squared error from which its damage was predicted."""

    option: LayerOption
    error: float


def attention_output(
    queries: Tensor, positions: Tensor, kv_heads: Tensor, scaling: float, kv: LayerKV
) -> Tensor:
    """The attention output ``[R, H, Dv]`` fp32 over the tokens of ``kv`` up to each row's position.

    ``queries [R, H, D]``, ``positions [R]`` absolute, below the number of tokens of ``kv``; ``kv_heads [H]``.
    Works through blocks of heads, so that the fp32 copies of a long history stay small.
    """
    num_rows, num_heads, _ = queries.shape
    num_tokens, _, head_dim = kv.k.shape
    head_bytes = 4 * num_tokens * (num_rows + head_dim + kv.v.shape[2])
    num_heads_at_once = max(1, default_block_bytes(kv.k.device) // head_bytes)
    outputs = []
    for first in range(0, num_heads, num_heads_at_once):
        heads = slice(first, first + num_heads_at_once)
        weights = attention_rows(queries[:, heads], kv.k, positions, kv_heads[heads], scaling)  # [h, R, T]
        values = kv.v[:, kv_heads[heads]].float().transpose(0, 1)  # [h, T, Dv]
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs, dim=1)


def relative_squared_error(true: Tensor, decoded: Tensor) -> Tensor:
    """``||true - decoded||^2 / ||true||^2`` over all elements, a scalar on their device."""
    return (true - decoded).square().sum() / true.square().sum().clamp_min(torch.finfo(true.dtype).tiny)


def attention_output_error(
    queries: Tensor, positions: Tensor, kv_heads: Tensor, scaling: float, true: LayerKV, decoded: LayerKV
) -> float:
    """``||out - out_decoded||^2 / ||out||^2`` of one layer, over rows and heads.

    Shapes as in ``attention_output``; all tensors on one device. Infinite if the decoded KV is not finite.
    """
    outputs = [attention_output(queries, positions, kv_heads, scaling, kv) for kv in (true, decoded)]
    return _finite_or_infinity(relative_squared_error(outputs[0], outputs[1]).item())


class DamageMeter:
    """Measures what storing layers at several precisions would cost a conversation.

    A layer's error is that of its attention output on the last ``max_rows`` query rows that were kept, after
    its keys and values went through the round trip. The rows' own tokens may be among the decoded ones,
    although a later turn has its own tokens exact: that overestimates the error. Every layer is measured on
    its true input, so errors do not add up along the layers; the sensitivities, learned from whole forward
    passes, account for that. All tokens take part in every softmax; the number of rows bounds the cost.

    ``table`` turns errors into nats, ``deviations`` standard deviations above the median conversation.

    Raises:
        StrategyError: fewer than one row.
    """

    def __init__(self, table: SensitivityTable, *, max_rows: int = 16, deviations: float = 1.0) -> None:
        if max_rows < 1:
            raise StrategyError(f"damage cannot be measured on {max_rows} rows")
        self.table = table
        self._max_rows = max_rows
        self._deviations = deviations

    @torch.no_grad()
    def measure(
        self, layers: Sequence[LayerAndPrecision], rows: QueryRows, read: ReadLayer, round_trip: RoundTrip
    ) -> list[MeasuredLayer]:
        """Measure each of ``layers`` at its precision; the results have their order.

        ``rows`` may lie on another device than the KV; positions are below the number of tokens that
        ``read`` returns. The KV of a layer is read once for all its precisions that follow each other, and
        held no longer. Waits for the device once, at the end.

        Raises:
            StrategyError: no rows, rows beyond the tokens, or another number of layers than the table has.
        """
        num_layers = self.table.num_layers
        if rows.queries.shape[0] != num_layers:
            raise StrategyError(f"query rows of {rows.queries.shape[0]} layers for {num_layers} layers")
        if rows.positions.numel() == 0:
            raise StrategyError("damage cannot be measured without query rows")
        token_bytes: list[float] = []
        errors: list[Tensor] = []
        for layer, of_layer in itertools.groupby(layers, key=lambda item: item[0]):
            kv = self._read(layer, rows, read)
            true_output = self._output(rows, layer, kv)
            for _, precision in of_layer:
                decoded, num_bytes = round_trip(layer, precision, kv)
                token_bytes.append(num_bytes)
                errors.append(relative_squared_error(true_output, self._output(rows, layer, decoded)))
        values = [_finite_or_infinity(error) for error in torch.stack(errors).tolist()] if errors else []
        return [
            MeasuredLayer(self.option(layer, precision, num_bytes, error), error)
            for (layer, precision), num_bytes, error in zip(layers, token_bytes, values, strict=True)
        ]

    def option(self, layer: int, precision: Precision, num_bytes: float, error: float) -> LayerOption:
        """A way to store a layer, with the damage that is expected of this error of its attention output."""
        damage = self.table.predict(LayerError(layer, DamageKind.of(precision), error), self._deviations)
        return LayerOption(layer, precision, num_bytes, damage)

    def _read(self, layer: int, rows: QueryRows, read: ReadLayer) -> LayerKV:
        kv = read(layer)
        if int(rows.positions.max()) >= kv.k.shape[0]:
            raise StrategyError(
                f"a query row at position {int(rows.positions.max())} of {kv.k.shape[0]} tokens"
            )
        return kv

    def _output(self, rows: QueryRows, layer: int, kv: LayerKV) -> Tensor:
        device = kv.k.device
        return attention_output(
            rows.queries[layer, -self._max_rows :].to(device),
            rows.positions[-self._max_rows :].to(device),
            rows.kv_heads.to(device),
            rows.scaling,
            kv,
        )


def _finite_or_infinity(value: float) -> float:
    return value if value < float("inf") else float("inf")
