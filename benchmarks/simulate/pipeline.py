"""The pipeline of a restore, step by step: when each head, each load and each own layer begins and ends.

The model is that of ``krul_backend.planner.timing``, whose times planners search with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from krul_backend.errors import RestoreError
from krul_backend.planner.interface import RestoreProblem
from krul_backend.planner.timing import Floats, RestoreTiming, Tokens


@dataclass(frozen=True, eq=False)
class Stage:
    """``start_s``, ``end_s`` [L]: when each layer's step starts and ends, from the start of the restore."""

    start_s: Floats
    end_s: Floats


@dataclass(frozen=True, eq=False)
class Pipeline:
    """What a plan does when. ``compute_s`` and ``load_s`` are work without waits, ``bytes_loaded`` is exact.

    ``head_tokens``: tokens recomputed, summed over layers.
    """

    head: Stage
    load: Stage
    own: Stage
    compute_s: float
    load_s: float
    bytes_loaded: float
    head_tokens: int

    @property
    def end_s(self) -> float:
        """When the last layer of the request's own forward ends."""
        return float(self.own.end_s[-1])

    @property
    def ideal_s(self) -> float:
        """The end if neither stream ever waited for the other."""
        return max(self.compute_s, self.load_s)

    @property
    def compute_busy(self) -> float:
        """Share of the time in which the compute stream works."""
        return self.compute_s / self.end_s if self.end_s > 0 else 0.0

    @property
    def load_busy(self) -> float:
        """Share of the time in which the load stream works."""
        return self.load_s / self.end_s if self.end_s > 0 else 0.0


def simulate(problem: RestoreProblem, head_ends: Sequence[int]) -> Pipeline:
    """The pipeline of ``head_ends``, one per layer. Whether they are allowed is not checked.

    Raises:
        RestoreError: not one head end per layer.
    """
    timing = RestoreTiming(problem)
    ends = _row(problem, head_ends)
    heads_s, loads_s = timing.head_s(ends)[0], timing.load_layer_s(ends)[0]
    head_end_s, load_end_s = heads_s.cumsum(), loads_s.cumsum()
    heads_total_s = head_end_s[-1]
    if problem.is_serial:
        # Loads follow the heads, and the own forward follows all loads.
        load_end_s = load_end_s + heads_total_s
        heads_total_s = load_end_s[-1]
    # Own layer l ends (l + 1) own layers after the last thing that held up any layer up to l.
    own_s, steps = timing.own_layer_s, np.arange(problem.num_layers)
    held_s = np.maximum(np.maximum.accumulate(load_end_s - steps * own_s), heads_total_s)
    own_end_s = held_s + (steps + 1) * own_s
    copied = np.maximum(timing.end[:, None] - np.maximum(timing.first[:, None], ends[0][timing.last_use]), 0)
    return Pipeline(
        head=Stage(head_end_s - heads_s, head_end_s),
        load=Stage(load_end_s - loads_s, load_end_s),
        own=Stage(own_end_s - own_s, own_end_s),
        compute_s=float(heads_s.sum() + problem.num_layers * own_s),
        load_s=float(loads_s.sum()),
        bytes_loaded=float((copied * timing.token_bytes).sum()),
        head_tokens=int((ends - problem.device_tokens).sum()),
    )


def _row(problem: RestoreProblem, head_ends: Sequence[int]) -> Tokens:
    if len(head_ends) != problem.num_layers:
        raise RestoreError(f"{len(head_ends)} head ends for {problem.num_layers} layers")
    return np.array(head_ends, np.int64)[None]
