"""Search over all head ends on given levels, layer by layer, with the dual's weighted sums as bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.simulate.oracle.dual import DualTables, Weights
from benchmarks.simulate.oracle.staircase import BestHeads
from krul_backend.planner.timing import Floats, Tokens


class LayerSearch:
    """Partial head ends of layers ``0..l``, all kept that could still lead to a better end.

    For each of the weights ``u``: a partial plan costs the weighted sum of its layers, the rest at least the
    cheapest non-increasing continuation; the largest over ``u`` bounds its end from below.
    """

    def __init__(self, tables: DualTables, weights: Sequence[Weights]) -> None:
        self._tables = tables
        lowest = tables.timing.lowest[:, None] > tables.levels  # [L, V]: less than what is stored
        sums = [self._weighted(each) for each in weights]
        self._base_s = np.array([base_s for base_s, _ in sums])  # [U]
        self._layer_s = np.where(lowest, np.inf, np.stack([layer_s for _, layer_s in sums]))  # [U, L, V]
        num_weights, num_layers, num_levels = self._layer_s.shape
        # [U, l, V]: the cheapest layers l.. with head ends up to a level
        self._rest_s = np.zeros((num_weights, num_layers + 1, num_levels))
        for layer in range(num_layers - 1, -1, -1):
            costs = self._layer_s[:, layer] + self._rest_s[:, layer + 1]
            self._rest_s[:, layer] = np.minimum.accumulate(costs, axis=1)

    def run(self, best: BestHeads, tolerance: float, max_nodes: int) -> float:
        """Improve ``best``; no head ends on the levels end before what is returned.

        Partial plans that cannot improve ``best`` by more than ``tolerance``, relative, are given up; of more
        than ``max_nodes`` of equal length those with the largest bounds are, too.
        """
        num_levels = len(self._tables.levels)
        max_lengths = best.timing.problem.max_lengths
        given_up_s = np.inf
        paths = np.empty((1, 0), np.int64)  # [F, l]: level per layer
        last = np.array([num_levels - 1])
        lengths = np.array([0])
        spent_s = self._base_s[None]  # [F, U]
        for layer in range(self._tables.num_layers):
            costs_s = spent_s[:, :, None] + self._layer_s[:, layer]  # [F, U, V]
            bounds_s = (costs_s + self._rest_s[:, layer + 1]).max(axis=1)  # [F, V]
            levels = np.arange(num_levels)
            is_new = (levels > 0) & ((levels != last[:, None]) if layer else True)
            new_lengths = lengths[:, None] + is_new
            is_allowed = (levels <= last[:, None]) & (new_lengths <= max_lengths)
            bounds_s = np.where(is_allowed, bounds_s, np.inf)
            is_open = bounds_s < best.end_s * (1 - tolerance) - 1e-12 * best.end_s
            given_up_s = min(given_up_s, float(bounds_s[~is_open].min(initial=np.inf)))
            states, chosen = np.nonzero(is_open)
            if len(states) == 0:
                return min(given_up_s, best.end_s)
            if len(states) > max_nodes:
                order = np.argsort(bounds_s[states, chosen], kind="stable")
                given_up_s = min(given_up_s, float(bounds_s[states, chosen][order[max_nodes]]))
                kept = np.sort(order[:max_nodes])
                states, chosen = states[kept], chosen[kept]
            paths = np.concatenate([paths[states], chosen[:, None]], axis=1)
            last, lengths, spent_s = chosen, new_lengths[states, chosen], costs_s[states, :, chosen]
        best.offer(self._tables.levels[paths])
        return min(given_up_s, best.end_s)

    def _weighted(self, weights: Weights) -> tuple[float, Floats]:
        """The weighted sum with no heads, without compute of heads, and [L, V] what a layer's head adds."""
        table, base_s = self._tables.load_table(weights.prefixes)
        saved_s = np.diff(table, axis=0).cumsum(axis=1)  # [L, G]
        load_s = np.concatenate([np.zeros((len(saved_s), 1)), saved_s], axis=1)
        compute = weights.compute
        base_s = compute * self._tables.own_s + (1 - compute) * base_s
        return base_s, compute * self._tables.head_s + (1 - compute) * load_s


def search_weights(best: Weights, num_layers: int) -> list[Weights]:
    """Weights whose bounds prune well together: the dual's own, some beside it, and each stream alone."""
    ends: Tokens = np.unique(np.array([0, num_layers - 1, int(best.prefixes.argmax())]))
    pure = [np.eye(1, num_layers, int(end))[0] for end in ends]
    beside = [min(max(best.compute * factor, 0.0), 1.0) for factor in (0.7, 1.0, 1.3)]
    return [
        *(Weights(compute, best.prefixes) for compute in beside),
        Weights(1.0, best.prefixes),
        *(Weights(0.0, prefixes) for prefixes in pure),
    ]
