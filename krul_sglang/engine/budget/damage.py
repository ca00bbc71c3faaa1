"""Measures on a conversation's own KV what storing a unit at some precision would cost it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krul_backend.attention.rows import QueryRows, attention_rows, default_block_bytes
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import LayerKV, ReadLayer
from krul_backend.errors import StrategyError
from krul_backend.strategy.interface import UnitOption
from krul_backend.strategy.krul import pair_distances
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Pair, Precision

Unit = tuple[int, ...]
"""A layer alone ``(i,)``, or a pair ``(i, j)``."""

UnitAndPrecision = tuple[Unit, Precision]

RoundTrip = Callable[[Unit, Precision, Sequence[LayerKV]], tuple[Sequence[LayerKV], float]]
"""Encodes and decodes one unit: ``(unit, precision, layers) -> (its layers afterwards, bytes per token)``.

Tokens that would not be stored come back as they are, and do not count among the bytes' tokens.
"""


@dataclass(frozen=True)
class MeasuredUnit:
    """One way to store a unit, with the errors of its layers from which its damage was predicted."""

    option: UnitOption
    errors: tuple[LayerError, ...]


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


def nearest_pairs(statistics: AttentionStatistics, max_pairs: int) -> list[Pair]:
    """The ``max_pairs`` pairs of layers with the most similar attention, nearest first."""
    layers = list(range(statistics.num_layers))
    return [pair for _, pair in pair_distances(statistics, layers)[:max_pairs]]


class DamageMeter:
    """Measures what storing layers alone or in pairs, at several precisions, would cost a conversation.

    A layer's error is that of its attention output on the last ``max_rows`` query rows that were kept, after
    its keys and values went through the round trip. The rows' own tokens may be among the decoded ones,
    although a later turn has its own tokens exact: that overestimates the error. Every layer is measured on
    its true input, so errors do not add up along the layers; the sensitivities, learned from whole forward
    passes, account for that. All tokens take part in every softmax; the number of rows and of pairs bounds
    the cost.

    ``table`` turns errors into nats, ``deviations`` standard deviations above the median conversation.

    Raises:
        StrategyError: fewer than one row.
    """

    def __init__(
        self,
        table: SensitivityTable,
        *,
        single_precisions: Sequence[Precision] = (Precision.INT8, Precision.INT4, Precision.INT2),
        pair_precisions: Sequence[Precision] = (Precision.INT8, Precision.INT4, Precision.INT2),
        max_rows: int = 16,
        deviations: float = 1.0,
    ) -> None:
        if max_rows < 1:
            raise StrategyError(f"damage cannot be measured on {max_rows} rows")
        self.table = table
        self._single_precisions = tuple(single_precisions)
        self._pair_precisions = tuple(pair_precisions)
        self._max_rows = max_rows
        self._deviations = deviations

    def units_of(self, num_layers: int, pairs: Sequence[Pair]) -> list[UnitAndPrecision]:
        """Every layer alone and each of ``pairs``, at the precisions of this meter; native alone left out."""
        units: list[UnitAndPrecision] = []
        for layer in range(num_layers):
            units += [((layer,), precision) for precision in self._single_precisions]
        for pair in pairs:
            units += [(pair, precision) for precision in self._pair_precisions]
        return units

    @torch.no_grad()
    def measure(
        self, units: Sequence[UnitAndPrecision], rows: QueryRows, read: ReadLayer, round_trip: RoundTrip
    ) -> list[MeasuredUnit]:
        """Measure each of ``units``; the results have their order.

        ``rows`` may lie on another device than the KV; positions are below the number of tokens that
        ``read`` returns. The KV of a unit is read once for all its precisions that follow each other, and
        held no longer; true outputs are computed once per layer. Waits for the device once, at the end.

        Raises:
            StrategyError: no rows, rows beyond the tokens, or another number of layers than the table has.
        """
        num_layers = self.table.num_layers
        if rows.queries.shape[0] != num_layers:
            raise StrategyError(f"query rows of {rows.queries.shape[0]} layers for {num_layers} layers")
        if rows.positions.numel() == 0:
            raise StrategyError("damage cannot be measured without query rows")
        true_outputs: dict[int, Tensor] = {}
        found: list[tuple[UnitAndPrecision, float]] = []
        errors: list[Tensor] = []
        for unit, of_unit in itertools.groupby(units, key=lambda item: item[0]):
            layers = [self._read(layer, rows, read) for layer in unit]
            for layer, kv in zip(unit, layers, strict=True):
                if layer not in true_outputs:
                    true_outputs[layer] = self._output(rows, layer, kv)
            for _, precision in of_unit:
                decoded, num_bytes = round_trip(unit, precision, layers)
                found.append(((unit, precision), num_bytes))
                errors += [
                    relative_squared_error(true_outputs[layer], self._output(rows, layer, kv))
                    for layer, kv in zip(unit, decoded, strict=True)
                ]
        values = iter(torch.stack(errors).tolist() if errors else [])
        return [
            self._measured(unit, precision, num_bytes, [_finite_or_infinity(next(values)) for _ in unit])
            for (unit, precision), num_bytes in found
        ]

    def with_errors(self, measured: MeasuredUnit, errors: Sequence[float]) -> MeasuredUnit:
        """The same unit with other errors of its layers, such as the mean over ranks."""
        option = measured.option
        return self._measured(option.unit, option.precision, option.num_bytes, errors)

    def layer_errors(
        self, unit: Unit, precision: Precision, errors: Sequence[float]
    ) -> tuple[LayerError, ...]:
        """The ``errors`` of a unit's layers, each with its kind of damage."""
        kind = DamageKind.of(unit, precision)
        return tuple(LayerError(layer, kind, error) for layer, error in zip(unit, errors, strict=True))

    def damage_of(self, unit: Unit, precision: Precision, errors: Sequence[float]) -> float:
        """Predicted KL in nats of a unit whose layers have these errors."""
        return sum(
            self.table.predict(error, self._deviations)
            for error in self.layer_errors(unit, precision, errors)
        )

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

    def _measured(
        self, unit: Unit, precision: Precision, num_bytes: float, errors: Sequence[float]
    ) -> MeasuredUnit:
        option = UnitOption(unit, precision, num_bytes, self.damage_of(unit, precision, errors))
        return MeasuredUnit(option, self.layer_errors(unit, precision, errors))


def _finite_or_infinity(value: float) -> float:
    return value if value < float("inf") else float("inf")
