"""Sums up the errors of a group of layers, and says what they are expected to cost."""

from __future__ import annotations

import torch

from krul_backend.codec.subspace.bases import GroupBasis


class GroupErrors:
    """The errors of some tokens' KV in one group, added part by part.

    Errors that differ from token to token cost each for itself, the more the more attention the token draws.
    What all tokens are off by together costs on top: attention averages everything else away, but not that.
    It is how text that is unlike the one learned from is lost, since its KV lies elsewhere.
    """

    def __init__(self, basis: GroupBasis) -> None:
        self._basis = basis
        self._num_tokens = 0
        self._own = 0.0
        self._shift = torch.zeros_like(basis.mean)

    def add(
        self,
        vectors: torch.Tensor,
        coefficients: torch.Tensor,
        restored: torch.Tensor,
        worth: torch.Tensor,
    ) -> None:
        """Add tokens whose ``vectors [T, D]``, less the mean, have these ``coefficients [T, R]``, and come
        back with those that are ``restored``. ``worth [T]``: see ``GroupBasis.token_worth``."""
        basis = self._basis
        costs = (restored - coefficients).square_().sum(1) + (vectors @ basis.outside).square_().sum(1)
        self._own += float(costs @ worth) / 2
        self._shift += restored.sum(0) @ basis.decoder - vectors.sum(0)
        self._num_tokens += len(vectors)

    @property
    def own_damage(self) -> float:
        """What the tokens' own errors are expected to cost, in nats, before the model's factor."""
        return self._own

    @property
    def shift_damage(self) -> float:
        """What the tokens' mean error is expected to cost, in nats, if a whole conversation is like them."""
        mean = self._shift / max(1, self._num_tokens)
        return float(mean.square() @ self._basis.shift_costs) / 2
