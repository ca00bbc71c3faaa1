"""The interface of planners, and what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from krul_backend.planner.problem import RestoreProblem


@dataclass(frozen=True)
class RestorePlan:
    """``head_ends[l]``: the token before which layer ``l`` is recomputed and from which on it is loaded.

    Never growing from layer to layer, because a token's hidden state in a layer needs the layer before it;
    multiples of the page size, between ``device_tokens`` and ``total_tokens``, and never before the first
    token that is stored. ``end_s``: predicted seconds from the start to the end of the request's last layer.
    ``is_recompute``: nothing is loaded and no head is recomputed; the engine computes the whole prefix
    itself, with the new tokens (``head_ends`` are then all ``total_tokens``).
    """

    head_ends: tuple[int, ...]
    end_s: float
    is_recompute: bool = False

    @classmethod
    def recompute(cls, problem: RestoreProblem) -> RestorePlan:
        """Nothing is restored."""
        return cls((problem.total_tokens,) * problem.num_layers, problem.recompute_s, is_recompute=True)


class RestorePlanner(ABC):
    """Splits each layer of a prefix into a head and a tail. Deterministic: equal problems, equal plans."""

    name: ClassVar[str]

    @abstractmethod
    def plan(self, problem: RestoreProblem) -> RestorePlan:
        """The plan of this kind for ``problem``; recompute if it has no other that is allowed."""
