"""A budget that is checked: predicted damage chooses, a probe of the choice decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from krul_backend.strategy.budget import BudgetSelector
from krul_backend.strategy.interface import Evidence
from krul_backend.strategy.none import UnsharedSelector
from krul_backend.strategy.strategy import Strategy

Probe = Callable[[Strategy], float]
"""Runs a conversation's last tokens once more on its decoded history: KL in nats against the true logits."""

_STEP = 0.8
"""Aims below the limit, or the next probe would fail about every second time."""


@dataclass(frozen=True)
class VerifiedChoice:
    """``measured`` is each strategy that was probed with its KL, in order; probes to learn from."""

    strategy: Strategy
    measured: tuple[tuple[Strategy, float], ...]


def select_verified(
    limit: float, native_token_bytes: float, evidence: Evidence, probe: Probe, max_probes: int = 3
) -> VerifiedChoice:
    """The budget's choice whose *measured* KL is at most ``limit``.

    Conversations with equal errors differ in KL by a factor of three and more, and the search prefers what is
    predicted too low. So the limit of the prediction is lowered by the factor that a probe exceeds the limit,
    and the search repeated. If no choice passes within ``max_probes``, everything is stored natively.

    Raises:
        StrategyError: see ``BudgetSelector``.
    """
    measured: list[tuple[Strategy, float]] = []
    predicted_limit = limit
    while len(measured) < max_probes:
        strategy = BudgetSelector(predicted_limit, native_token_bytes).select(evidence)
        if strategy.is_lossless:
            return VerifiedChoice(strategy, tuple(measured))
        kl = probe(strategy)
        measured.append((strategy, kl))
        if kl <= limit:
            return VerifiedChoice(strategy, tuple(measured))
        # A KL that is not a number leads to a limit of 0, not to one that is none.
        predicted_limit *= _STEP * limit / kl if kl > limit else 0.0
    return VerifiedChoice(UnsharedSelector().select(evidence), tuple(measured))
