"""Fits costs to measurements, saves them, and corrects them by what restores really take.

A server measures them once per model and device.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from krul_backend.atomic_file import replacing
from krul_backend.errors import RestoreError
from krul_backend.planner.interface import ComputeCost, RestoreCosts, TierCost
from krul_backend.planner.timing import Floats

FORMAT = "krul restore costs 1"

MAX_OBSERVED_RATIO = 4.0
"""A measurement counts as at most so many times its prediction, or at least one over this."""
MAX_SCALE = 32.0
"""Costs are never scaled by more than this, or by less than one over this."""
NUM_OVERHEADS = 9
"""The last restores that say how long restores take beyond their plans."""
OVERHEAD_FADING = 0.02
"""Share of the overhead that each restore which is given up for recomputation takes off it."""
DEFAULT_HALF_LIFE = 8.0
"""Observations after which an old one counts half."""

_logger = logging.getLogger(__name__)

_Seconds = Annotated[float, Meta(ge=0)]
_Numbers = dict[str, _Seconds]


def fit_compute(samples: Sequence[tuple[int, int, float]]) -> ComputeCost:
    """The cost of one layer, from ``(num_tokens, num_past, seconds of one layer)``.

    Non-negative least squares of the relative errors, so that short measurements count as much as long ones.

    Raises:
        RestoreError: fewer than three different measurements or only one number of tokens; no tokens, a
            negative past, or seconds that are not a positive number.
    """
    for num_tokens, num_past, seconds in samples:
        if num_tokens < 1 or num_past < 0 or not 0 < seconds < math.inf:
            raise RestoreError(
                f"a measured layer of {num_tokens} tokens after {num_past} that took {seconds} s: at least "
                "one token, a past of at least 0 and a positive number of seconds are needed"
            )
    num_shapes = len({(num_tokens, num_past) for num_tokens, num_past, _ in samples})
    num_sizes = len({num_tokens for num_tokens, _, _ in samples})
    if num_shapes < 3 or num_sizes < 2:
        raise RestoreError(
            f"{len(samples)} measured layers of {num_shapes} shapes and {num_sizes} numbers of tokens: a "
            "compute cost needs three shapes with two numbers of tokens"
        )
    tokens, past, seconds_ = np.array(samples, np.float64).T
    return ComputeCost(*_fit([np.ones_like(tokens), tokens, tokens * (past + tokens / 2), past], seconds_))


def fit_tier(samples: Sequence[tuple[float, float]]) -> TierCost:
    """The cost of one copy, from ``(bytes, seconds)``; as ``fit_compute``.

    Raises:
        RestoreError: fewer than two different sizes; bytes or seconds that are not a positive number.
    """
    for num_bytes, seconds in samples:
        if not (0 < num_bytes < math.inf and 0 < seconds < math.inf):
            raise RestoreError(
                f"a measured copy of {num_bytes} bytes that took {seconds} s: both must be positive numbers"
            )
    num_sizes = len({num_bytes for num_bytes, _ in samples})
    if num_sizes < 2:
        raise RestoreError(
            f"{len(samples)} measured copies of {num_sizes} sizes: a tier's cost needs two sizes"
        )
    sizes, seconds_ = np.array(samples, np.float64).T
    latency_s, byte_s = _fit([np.ones_like(sizes), sizes], seconds_)
    return TierCost(latency_s, byte_s)


def _fit(features: list[Floats], seconds: Floats) -> list[float]:
    """Non-negative factors of ``features`` that sum to ``seconds`` with the least squared relative error.

    The best such factors are the least-squares solution over those features whose factor is not zero, and
    there are at most four features: all subsets are tried. A feature that is zero in all samples has none.
    """
    columns = np.stack(features, axis=1) / seconds[:, None]
    # Tokens and bytes differ by many powers of ten: equal sizes of the columns keep the solver exact.
    sizes = columns.max(axis=0)
    usable = np.flatnonzero(sizes)
    sizes = np.where(sizes > 0, sizes, 1.0)
    best, least_error = np.zeros(len(features)), math.inf
    for num_used in range(1, len(usable) + 1):
        for used in itertools.combinations(usable, num_used):
            factors = np.zeros(len(features))
            factors[list(used)] = np.linalg.lstsq(
                columns[:, used] / sizes[list(used)], np.ones_like(seconds), rcond=None
            )[0]
            error = float(np.square(columns / sizes @ factors - 1).sum())
            if (factors >= 0).all() and error < least_error:
                best, least_error = factors, error
    return [float(factor) for factor in best / sizes]


class OnlineCosts:
    """Costs that follow what restores take: a busy GPU or a slow disk shifts the next plan.

    One factor each for heads, for the own forward, for each tier and for decoding: the exponentially weighted
    mean of ``measured / predicted``, on the logarithmic scale. Predictions are those made with ``current()``.
    An observation is clipped to a factor of ``MAX_OBSERVED_RATIO`` either way, the whole to ``MAX_SCALE``;
    one that is not a positive number teaches nothing. Safe to use from several threads.

    And the overhead of a restore: the median of what the last ones took beyond their plans, so that the first
    one, which compiles kernels, or one beside a pause does not count. While it keeps restores from happening
    nothing is learned of it, so it fades (``fade_overhead``) until one is tried again.

    Raises:
        RestoreError: a half-life, in observations, that is not positive.
    """

    def __init__(self, costs: RestoreCosts, half_life: float = DEFAULT_HALF_LIFE) -> None:
        if not half_life > 0:
            raise RestoreError(f"a half-life of {half_life} observations: it must be positive")
        self._costs = costs
        self._gain = 1 - math.pow(0.5, 1 / half_life)
        self._lock = threading.Lock()
        self._head_log = 0.0
        self._own_log = 0.0
        self._decode_log = 0.0
        self._tier_logs = dict.fromkeys(costs.tiers, 0.0)
        self._overheads_s = deque([costs.overhead_s] if costs.overhead_s else (), maxlen=NUM_OVERHEADS)

    def observe_head(self, predicted_s: float, measured_s: float) -> None:
        """Heads were predicted to take ``predicted_s`` and took ``measured_s``."""
        with self._lock:
            self._head_log = self._moved(self._head_log, predicted_s, measured_s)

    def observe_own(self, predicted_s: float, measured_s: float) -> None:
        """The same of the request's own forward, without its waits."""
        with self._lock:
            self._own_log = self._moved(self._own_log, predicted_s, measured_s)

    def observe_decoding(self, predicted_s: float, measured_s: float) -> None:
        """The same of decoding what was loaded."""
        with self._lock:
            self._decode_log = self._moved(self._decode_log, predicted_s, measured_s)

    def observe_tier(self, tier: str, predicted_s: float, measured_s: float) -> None:
        """The same of copies from ``tier``. Raises RestoreError for a tier without costs."""
        with self._lock:
            if tier not in self._tier_logs:
                raise RestoreError(f"tier {tier!r} has no costs (known: {', '.join(self._tier_logs)})")
            self._tier_logs[tier] = self._moved(self._tier_logs[tier], predicted_s, measured_s)

    def set_tier(self, tier: str, cost: TierCost, *, through: str) -> None:
        """State what reading ``tier`` costs now, whose blocks pass ``through`` another tier on their way.

        A block goes on while the next one is read: the slower of both counts, and both latencies. What was
        observed of ``tier`` before still scales it.

        Raises:
            RestoreError: for a tier to pass through that has no costs.
        """
        with self._lock:
            if through not in self._costs.tiers:
                raise RestoreError(f"tier {through!r} has no costs (known: {', '.join(self._tier_logs)})")
            front = self._costs.tiers[through]
            whole = TierCost(front.latency_s + cost.latency_s, max(front.byte_s, cost.byte_s))
            self._costs = replace(self._costs, tiers={**self._costs.tiers, tier: whole})
            self._tier_logs.setdefault(tier, 0.0)

    def observe_overhead(self, predicted_s: float, measured_s: float) -> None:
        """A restore was planned to end after ``predicted_s`` and ended after ``measured_s``."""
        if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
            return
        limit_s = (MAX_OBSERVED_RATIO - 1) * predicted_s
        beyond_s = min(max(measured_s - predicted_s, -limit_s), limit_s)
        with self._lock:
            self._overheads_s.append(beyond_s)

    def fade_overhead(self) -> None:
        """A restore was given up for recomputation."""
        with self._lock:
            for index in range(len(self._overheads_s)):
                self._overheads_s[index] *= 1 - OVERHEAD_FADING

    def current(self) -> RestoreCosts:
        """The costs by which to plan now."""
        with self._lock:
            return RestoreCosts(
                head=_scaled_compute(self._costs.head, math.exp(self._head_log)),
                own=_scaled_compute(self._costs.own, math.exp(self._own_log)),
                tiers=self._scaled_tiers(),
                overhead_s=max(0.0, statistics.median(self._overheads_s or [0.0])),
                serial_tiers=self._costs.serial_tiers,
                decode_scale=math.exp(self._decode_log),
            )

    def _scaled_tiers(self) -> Mapping[str, TierCost]:
        tiers = {}
        for name, cost in self._costs.tiers.items():
            scale = math.exp(self._tier_logs[name])
            tiers[name] = replace(cost, latency_s=scale * cost.latency_s, byte_s=scale * cost.byte_s)
        return tiers

    def _moved(self, log_scale: float, predicted_s: float, measured_s: float) -> float:
        if not (0 < predicted_s < math.inf and 0 < measured_s < math.inf):
            return log_scale
        surprise = math.log(measured_s) - math.log(predicted_s)
        limit, bound = math.log(MAX_OBSERVED_RATIO), math.log(MAX_SCALE)
        moved = log_scale + self._gain * min(max(surprise, -limit), limit)
        return min(max(moved, -bound), bound)


def _scaled_compute(cost: ComputeCost, scale: float) -> ComputeCost:
    return ComputeCost(**{name: scale * seconds for name, seconds in asdict(cost).items()})


class _Compute(Struct, forbid_unknown_fields=True):
    """The numbers of a ``ComputeCost``."""

    launch_s: _Seconds
    token_s: _Seconds
    context_s: _Seconds
    past_s: _Seconds


class _Entry(Struct):
    """The costs of one model on one device; each set of numbers by the names of its dataclass."""

    head: _Compute
    own: _Compute
    tiers: dict[str, _Numbers]


class _File(Struct):
    """Entries by fingerprint and device. Those of others are kept as they are."""

    costs: dict[str, Raw]
    format: Literal["krul restore costs 1"] = "krul restore costs 1"


def load_costs(path: Path, fingerprint: str, device: str) -> RestoreCosts | None:
    """Read the costs that were saved for this model and device; None if there are none.

    A file that is damaged or not one of these counts as empty, with one warning.
    """
    try:
        raw = _read(path).get(_key(fingerprint, device), Raw(b"null"))
        entry = msgspec.json.decode(raw, type=_Entry | None)
        if entry is None:
            return None
        tiers = {name: TierCost(**cost) for name, cost in entry.tiers.items()}
        return RestoreCosts(_compute_cost(entry.head), _compute_cost(entry.own), tiers)
    except (RestoreError, TypeError, ValueError) as error:
        _logger.warning("costs are measured again, those in %s cannot be used: %s", path, error)
        return None


def save_costs(path: Path, fingerprint: str, device: str, costs: RestoreCosts) -> None:
    """Add these costs to the file, in one step: readers see the old file or the new one.

    Entries of other models and devices stay. A file that is damaged or not one of these is left as it is,
    with one warning: it may be somebody else's. Of two writers at the same time one entry may be lost.

    Raises:
        OSError: the folder cannot be written to.
    """
    try:
        entries = _read(path)
    except RestoreError as error:
        _logger.warning("measured costs are not saved: %s", error)
        return
    tiers = {name: asdict(cost) for name, cost in costs.tiers.items()}
    head, own = (_Compute(**asdict(cost)) for cost in (costs.head, costs.own))
    entry = msgspec.json.encode(_Entry(head, own, tiers))
    content = msgspec.json.encode(_File({**entries, _key(fingerprint, device): Raw(entry)}))
    with replacing(path) as file:
        file.write(msgspec.json.format(content, indent=2) + b"\n")


def _compute_cost(numbers: _Compute) -> ComputeCost:
    return ComputeCost(**msgspec.structs.asdict(numbers))


def _key(fingerprint: str, device: str) -> str:
    return f"{fingerprint} {device}"


def _read(path: Path) -> dict[str, Raw]:
    """All entries of the file; none if there is no file. Raises RestoreError for a file of another kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).costs
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RestoreError(f"{path} is not a file of format {FORMAT!r} ({error}): remove it") from None
