"""Sums up the errors of a group of layers, and says what they are expected to cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from krul_backend.codec.subspace.bases import GroupBasis


@dataclass(frozen=True, eq=False)
class GroupErrors:
    """The errors that were made in the KV of some tokens in one group.

    Errors that differ from token to token cost each for itself, the more the more attention its token draws:
    ``own_damage`` is their cost in nats, before the model's factor. What all tokens are off by together costs
    on top, since attention does not average it away. It is most of what text loses that is unlike the text
    learned from, because its KV lies elsewhere. ``total [D]`` is the sum of the errors of ``num_tokens``.
    """

    basis: GroupBasis
    own_damage: float
    total: torch.Tensor
    num_tokens: int

    @classmethod
    def none(cls, basis: GroupBasis) -> GroupErrors:
        return cls(basis, 0.0, torch.zeros_like(basis.mean), 0)

    def with_tokens(
        self, vectors: torch.Tensor, coefficients: torch.Tensor, worth: torch.Tensor
    ) -> GroupErrors:
        """These and those of tokens whose ``vectors [T, D]``, less the mean, come back as exactly these
        ``coefficients [T, R]`` say. ``worth [T]``: see ``GroupBasis.token_worth``."""
        own = (vectors @ self.basis.outside).square_().sum(1) @ worth
        total = coefficients.sum(0) @ self.basis.decoder - vectors.sum(0)
        return GroupErrors(
            self.basis, self.own_damage + float(own) / 2, self.total + total, self.num_tokens + len(vectors)
        )

    def with_rounding(self, errors: torch.Tensor, worth: torch.Tensor) -> GroupErrors:
        """These and ``errors [T, R]`` of coefficients, of tokens that count already."""
        own = errors.square().sum(1) @ worth
        total = errors.sum(0) @ self.basis.decoder
        return GroupErrors(self.basis, self.own_damage + float(own) / 2, self.total + total, self.num_tokens)

    @property
    def shift_damage(self) -> float:
        """What the tokens' mean error is expected to cost, in nats, if a whole conversation is like them."""
        mean = self.total / max(1, self.num_tokens)
        return float(mean.square() @ self.basis.shift_costs) / 2
