"""What computing and loading cost on this machine, as numbers that a planner can add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeCost:
    """Seconds for one layer: ``launch_s + token_s * n + context_s * n * (p + n / 2)``.

    ``n`` tokens are computed after ``p`` that are in the pool: a token sees ``p`` and, on average, half of
    the others. All three numbers are non-negative.
    """

    launch_s: float
    token_s: float
    context_s: float

    def layer_s(self, num_tokens: int, num_past: int) -> float:
        """Seconds for one layer; nothing for no tokens."""
        if num_tokens == 0:
            return 0.0
        context = num_tokens * (num_past + num_tokens / 2)
        return self.launch_s + self.token_s * num_tokens + self.context_s * context


@dataclass(frozen=True)
class TierCost:
    """Seconds to bring ``n > 0`` bytes of one layer of one segment: ``latency_s + byte_s * n``."""

    latency_s: float
    byte_s: float

    def load_s(self, num_bytes: float) -> float:
        """Seconds for one copy; nothing for no bytes."""
        return self.latency_s + self.byte_s * num_bytes if num_bytes > 0 else 0.0


@dataclass(frozen=True)
class RestoreCosts:
    """All that a plan depends on beside what is stored.

    ``head``: a layer of the separate forward that recomputes heads. ``own``: a layer of the engine's own
    forward, which computes the new tokens, and the whole prefix when nothing is restored. ``tiers``: by
    name. ``overhead_s``: seconds that a restore takes beyond its pipeline, whatever the plan: threads that
    start, streams that get in each other's way.
    """

    head: ComputeCost
    own: ComputeCost
    tiers: Mapping[str, TierCost]
    overhead_s: float = 0.0
