"""What storing a unit at some precision does to one conversation, measured on its own KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krul_backend.attention.rows import QueryRows, attention_rows
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import LayerKV, ReadLayer
from krul_backend.errors import StrategyError
from krul_backend.strategy.initial_recent import pair_distances
from krul_backend.strategy.interface import UnitOption
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Pair, Precision

RoundTrip = Callable[[tuple[int, ...], Precision, Sequence[LayerKV]], tuple[Sequence[LayerKV], int]]
"""Encodes and decodes one unit: ``(unit, precision, its layers) -> (its layers decoded, bytes stored)``."""


@dataclass(frozen=True)
class MeasuredUnit:
    """An option of a unit, and the error of each of its layers that its damage was predicted from."""

    option: UnitOption
    errors: tuple[LayerError, ...]


def attention_output(
    queries: Tensor, positions: Tensor, kv_heads: Tensor, scaling: float, kv: LayerKV
) -> Tensor:
    """Outputs ``[R, H, Dv]`` fp32 of attention over the tokens of ``kv`` up to each row's position.

    ``queries [R, H, D]``, ``positions [R]`` absolute, below the number of tokens of ``kv``; ``kv_heads [H]``.
    """
    weights = attention_rows(queries, kv.k, positions, kv_heads, scaling)  # [H, R, T]
    values = kv.v.float()[:, kv_heads].transpose(0, 1)  # [H, T, Dv]
    return (weights @ values).transpose(0, 1)


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
    """Measures what a conversation's units would cost, alone and in pairs, at several precisions.

    A layer's error is that of its attention output on the last ``max_rows`` query rows that were kept, with
    the keys and values of *all* tokens decoded. The rows' own tokens are among them, although a later turn
    meets its own tokens exact: that is pessimistic, and needs no bookkeeping of what is stored. Every layer
    is measured on its true input, so errors do not add up along the layers; the sensitivities, learned from
    whole forward passes, account for that. All tokens take part, since leaving some out would change every
    softmax; the cost is bounded by the number of rows and of pairs.

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
        self._table = table
        self._single_precisions = tuple(single_precisions)
        self._pair_precisions = tuple(pair_precisions)
        self._max_rows = max_rows
        self._deviations = deviations

    @torch.no_grad()
    def measure(
        self, rows: QueryRows, read: ReadLayer, round_trip: RoundTrip, pairs: Sequence[Pair] = ()
    ) -> list[MeasuredUnit]:
        """Every layer alone, native included, and each of ``pairs``, at the meter's precisions.

        ``rows`` may lie on another device than the KV; positions are below the number of tokens that
        ``read`` returns. Layers are read once, then once more per pair; one layer's or pair's KV is held at
        a time. Waits for the device once, at the end.

        Raises:
            StrategyError: no rows, rows beyond the tokens, or another number of layers than the table has.
        """
        num_layers = self._table.num_layers
        if rows.queries.shape[0] != num_layers:
            raise StrategyError(f"query rows of {rows.queries.shape[0]} layers for {num_layers} layers")
        if rows.positions.numel() == 0:
            raise StrategyError("damage cannot be measured without query rows")
        units: list[tuple[tuple[int, ...], Precision, float]] = []
        errors: list[Tensor] = []
        true_outputs: list[Tensor] = []
        for layer in range(num_layers):
            kv = read(layer)
            if int(rows.positions.max()) >= kv.k.shape[0]:
                raise StrategyError(
                    f"a query row at position {int(rows.positions.max())} of {kv.k.shape[0]} tokens"
                )
            true_outputs.append(self._output(rows, layer, kv))
            units.append(((layer,), Precision.NATIVE, _token_bytes(kv)))
            errors.append(true_outputs[layer].new_zeros(1))
            for unit, precision, decoded, num_bytes in _trips(
                (layer,), self._single_precisions, [kv], round_trip
            ):
                units.append((unit, precision, num_bytes))
                errors.append(self._errors(rows, unit, decoded, true_outputs))
        for pair in pairs:
            layers = [read(layer) for layer in pair]
            for unit, precision, decoded, num_bytes in _trips(
                pair, self._pair_precisions, layers, round_trip
            ):
                units.append((unit, precision, num_bytes))
                errors.append(self._errors(rows, unit, decoded, true_outputs))
        values = iter(torch.cat(errors).tolist())
        return [
            self._measured(unit, precision, num_bytes, [next(values) for _ in unit])
            for unit, precision, num_bytes in units
        ]

    def _output(self, rows: QueryRows, layer: int, kv: LayerKV) -> Tensor:
        device = kv.k.device
        return attention_output(
            rows.queries[layer, -self._max_rows :].to(device),
            rows.positions[-self._max_rows :].to(device),
            rows.kv_heads.to(device),
            rows.scaling,
            kv,
        )

    def _errors(
        self, rows: QueryRows, unit: tuple[int, ...], decoded: Sequence[LayerKV], true_outputs: list[Tensor]
    ) -> Tensor:
        """The error of each layer of the unit, ``[len(unit)]``."""
        return torch.stack(
            [
                relative_squared_error(true_outputs[layer], self._output(rows, layer, kv))
                for layer, kv in zip(unit, decoded, strict=True)
            ]
        )

    def _measured(
        self, unit: tuple[int, ...], precision: Precision, num_bytes: float, values: list[float]
    ) -> MeasuredUnit:
        kind = DamageKind.of(unit, precision)
        errors = tuple(
            LayerError(layer, kind, _finite_or_infinity(value))
            for layer, value in zip(unit, values, strict=True)
        )
        damage = sum(self._table.predict(error, self._deviations) for error in errors)
        return MeasuredUnit(UnitOption(unit, precision, num_bytes, damage), errors)


def _trips(
    unit: tuple[int, ...], precisions: Sequence[Precision], layers: Sequence[LayerKV], round_trip: RoundTrip
) -> Iterator[tuple[tuple[int, ...], Precision, Sequence[LayerKV], float]]:
    """The unit decoded at each precision, with its bytes per token."""
    for precision in precisions:
        decoded, num_bytes = round_trip(unit, precision, layers)
        yield unit, precision, decoded, num_bytes / layers[0].k.shape[0]


def _token_bytes(kv: LayerKV) -> float:
    return float((kv.k.nbytes + kv.v.nbytes) / kv.k.shape[0])


def _finite_or_infinity(value: float) -> float:
    return value if value < float("inf") else float("inf")
