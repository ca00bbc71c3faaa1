"""Learns from probes what an error of the attention output costs in nats, per model and layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import orjson

from krul_backend.atomic_file import replacing
from krul_backend.errors import SensitivityError, StrategyError
from krul_backend.strategy.strategy import Precision

FORMAT = "krul sensitivity 1"

START_SENSITIVITY = 1.0
"""Nats per unit of relative squared error of a layer that no probe has touched.

Far above what was measured on the reference model (0.002 to 0.2), so that a layer
that is not known yet is stored with more care, not with less.
"""
START_VARIANCE = 4.0
"""Of the logarithm, so a standard deviation is a factor of e^2: layers differ that much."""
MIN_VARIANCE = 0.01
MAX_LOG_SENSITIVITY = 20.0
"""Bound of the logarithm, either way: absurd probes must not lead to numbers beyond the range of floats."""
START_SPREAD_VARIANCE = 1.0
"""Conversations with equal errors differ in KL by a factor of e, as measured on the reference model."""
SPREAD_RATE = 0.05
MAX_VARIANCE = 9.0
KL_FLOOR_NATS = 1e-6
"""Below this a measured KL is rounding noise of the model's own arithmetic."""
KL_SATURATED_NATS = 0.5
"""Above this KL no longer grows with the error: it only says that the damage is at least so large."""
PROBE_TARGET_NATS = 0.01
"""Where probes teach best: the size of a budget, and far from the floor even if predicted far too high."""


class DamageKind(Enum):
    """The kind of change that caused an error.

    ``ROUNDING`` is independent from token to token and averages out in attention's sum. ``MERGING``, a mean
    over tokens, removes what tells tokens apart; the same error of the attention output then costs two to
    four times as much (measured on the reference model).
    """

    ROUNDING = "rounding"
    MERGING = "merging"

    @classmethod
    def of(cls, precision: Precision) -> DamageKind:
        return cls.MERGING if precision is Precision.INT0 else cls.ROUNDING


@dataclass(frozen=True)
class LayerError:
    """The relative squared error of one layer's attention output; see ``attention_output_error``."""

    layer: int
    kind: DamageKind
    error: float


@dataclass
class _Belief:
    """Natural logarithm of a sensitivity, as a normal distribution.

    ``num_probes`` counts shares of probes.
    """

    mean: float = math.log(START_SENSITIVITY)
    variance: float = START_VARIANCE
    num_probes: float = 0.0


class SensitivityTable:
    """Holds the KL divergence in nats per unit of attention-output error, by layer and kind of damage.

    The expected KL of a strategy is ``sum over layers of sensitivity * error``: KL is quadratic in a small
    change of the logits, the change is linear in that of an attention output, and ``error`` is a square; in
    the sum, errors of different layers are taken as uncorrelated. ``predict`` is linear at any size; the true
    KL levels off (``KL_SATURATED_NATS``), so large predictions are too high.

    One owner at a time: the table does not lock.

    Raises:
        StrategyError: fewer than one layer.
    """

    def __init__(self, model: str, num_layers: int) -> None:
        if num_layers < 1:
            raise StrategyError(f"a sensitivity table of {num_layers} layers")
        self.model = model
        self.num_layers = num_layers
        self._beliefs = {(layer, kind): _Belief() for kind in DamageKind for layer in range(num_layers)}
        self._spread_variance = START_SPREAD_VARIANCE

    @property
    def spread(self) -> float:
        """Standard deviation of ``log(true KL / predicted KL)`` between conversations, as far as known."""
        return math.sqrt(self._spread_variance)

    def predict(self, error: LayerError, deviations: float = 0.0) -> float:
        """KL in nats that this error is expected to cost: at least 0, and infinite for an infinite error.

        With ``deviations`` 0 it is the median over conversations; else that many standard deviations (of the
        spread and of what is unknown about the layer) above it, on the logarithmic scale.

        Raises:
            StrategyError: a layer out of range or an error below 0.
        """
        belief = self._belief(error)
        margin = deviations * math.sqrt(belief.variance + self._spread_variance)
        return math.exp(belief.mean + margin) * error.error

    def confidence(self, layer: int, kind: DamageKind) -> float:
        """Number of probes behind a sensitivity; a probe of many layers counts by each one's share."""
        return self._belief(LayerError(layer, kind, 0.0)).num_probes

    def update(self, errors: Sequence[LayerError], kl: float) -> None:
        """Learn from a probe in which these layers had these errors, and all others none.

        ``kl`` in nats, measured. A Kalman filter with one observation, the logarithm of ``kl``, linear in
        the logarithms of the sensitivities to first order: layers take part by their share of the
        prediction, and those that are little known move most. Outliers beyond three standard deviations are
        cut. Nothing is learned where measurement and prediction are both noise, nor from a saturated
        measurement that was predicted to be larger.

        Raises:
            StrategyError: a layer out of range or named twice, an error or a KL that is not a number of at
                least 0 (a KL a little below 0 is rounding, and accepted).
        """
        beliefs = [self._belief(error) for error in errors]
        if len({error.layer for error in errors}) != len(errors):
            raise StrategyError("a probe names a layer twice")
        if not -KL_FLOOR_NATS <= kl < math.inf or any(math.isinf(error.error) for error in errors):
            raise StrategyError(f"a probe with a KL of {kl} nats and errors {[e.error for e in errors]}")
        parts = [self.predict(error) for error in errors]
        predicted = sum(parts)
        if max(kl, predicted) < KL_FLOOR_NATS or predicted > kl > KL_SATURATED_NATS or predicted == 0:
            return
        surprise = math.log(max(kl, KL_FLOOR_NATS) / max(predicted, KL_FLOOR_NATS))
        shares = [part / predicted for part in parts]
        known = sum(b.variance * share * share for b, share in zip(beliefs, shares, strict=True))
        total_variance = known + self._spread_variance
        surprise = _bounded(surprise, 3 * math.sqrt(total_variance))
        for belief, share in zip(beliefs, shares, strict=True):
            gain = belief.variance * share / total_variance
            belief.mean = _bounded(belief.mean + gain * surprise, MAX_LOG_SENSITIVITY)
            # The floor keeps an old table able to follow a change of traffic.
            belief.variance = max(belief.variance * (1 - gain * share), MIN_VARIANCE)
            belief.num_probes += share
        # A surprise is expected to be as large as what was unknown; only the rest is spread.
        excess = max(surprise * surprise - known, 0.0)
        excess = min(excess, MAX_VARIANCE)
        self._spread_variance += SPREAD_RATE * (excess - self._spread_variance)

    def next_probe(self, candidates: Sequence[Sequence[LayerError]]) -> int | None:
        """Which candidate, by index, teaches most: the one whose layers are least known first.

        A candidate is what one probe would damage: the errors of one layer at one precision, or of a whole
        strategy. Those whose KL is expected to be unmeasurably small or saturated are left out; among equals
        the one closest to ``PROBE_TARGET_NATS`` wins. None if no candidate is left.
        """
        best: tuple[float, float, int] | None = None
        for index, errors in enumerate(candidates):
            parts = [self.predict(error) for error in errors]
            predicted = sum(parts)
            if not KL_FLOOR_NATS <= predicted <= self._upper_bound_of_probes(errors):
                continue
            unknown = sum(
                self._belief(error).variance * (part / predicted) ** 2
                for error, part in zip(errors, parts, strict=True)
            )
            rank = (-unknown, abs(math.log(predicted / PROBE_TARGET_NATS)), index)
            if best is None or rank < best:
                best = rank
        return None if best is None else best[2]

    def _upper_bound_of_probes(self, errors: Sequence[LayerError]) -> float:
        # An untouched layer starts far too high: its predictions do not say that a probe would saturate.
        is_untouched = any(self._belief(error).num_probes == 0 for error in errors)
        return math.inf if is_untouched else KL_SATURATED_NATS

    def _belief(self, error: LayerError) -> _Belief:
        if not 0 <= error.layer < self.num_layers:
            raise StrategyError(f"layer {error.layer} of a table of {self.num_layers} layers")
        if not error.error >= 0:
            raise StrategyError(f"layer {error.layer} has an error of {error.error}: at least 0 is needed")
        return self._beliefs[error.layer, error.kind]

    def save(self, path: Path) -> None:
        """Write the table as JSON in one step: readers see the old file or the new one."""
        content = {
            "format": FORMAT,
            "model": self.model,
            "spread_variance": self._spread_variance,
            "sensitivities": {
                kind.value: [vars(self._beliefs[layer, kind]) for layer in range(self.num_layers)]
                for kind in DamageKind
            },
        }
        with replacing(path) as file:
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2))

    @classmethod
    def parse(cls, text: bytes, model: str, num_layers: int) -> SensitivityTable:
        """The table that ``save`` wrote, from the content of its file.

        Raises:
            SensitivityError: not such a file, another format, or learned on another model.
        """
        path = "the sensitivity table"
        try:
            content = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise SensitivityError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise SensitivityError(f"{path} is not a file of format {FORMAT!r}: remove it to learn again")
        if content.get("model") != model:
            raise SensitivityError(f"{path} was learned on model {content.get('model')!r}, not on {model!r}")
        table = cls(model, num_layers)
        try:
            table._spread_variance = _variance(content["spread_variance"])
            for kind in DamageKind:
                rows = content["sensitivities"][kind.value]
                if len(rows) != num_layers:
                    raise SensitivityError(f"{path} has {len(rows)} layers, the model has {num_layers}")
                for layer, row in enumerate(rows):
                    table._beliefs[layer, kind] = _Belief(
                        _bounded(_finite(row["mean"]), MAX_LOG_SENSITIVITY),
                        _variance(row["variance"]),
                        _finite(row["num_probes"]),
                    )
        except (KeyError, TypeError, ValueError) as error:
            raise SensitivityError(f"{path} is damaged ({error!r}): remove it to learn again") from None
        return table


def _bounded(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _variance(value: Any) -> float:
    number = _finite(value)
    if not 0 < number <= MAX_VARIANCE:
        raise ValueError(f"{value!r} is not a variance of this table")
    return number
