"""Learns the bases of a model from the KV of some text, and from what errors in it cost the model's
output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.subspace.bases import (
    LEAST_ATTENTION,
    GroupBasis,
    ModelBases,
    group_vectors,
    vector_size,
)
from krul_backend.errors import CodecError

LEAST_TOKENS = 1024
"""Fewer tokens than this make no basis."""

DIAGONAL_SHARE = 0.1
"""The share of the metric that is replaced by its diagonal. Without it, errors in directions that no gradient
has pointed to would cost nothing."""

LOST_NATS = 5e-5
"""Coefficients are left out of the bases as long as that is expected to cost no more than this many nats per
predicted token, in a text as long as those that the bases were learned from."""

_OUTSIDE_COLUMNS = 64
"""What lies outside of a basis is measured in so many random directions. The cost of one token is off by
about a sixth, that of many unlike ones by less."""

_LARGEST_SLOPE = 2.0
_LEAST = 1e-14


@dataclass(frozen=True, eq=False)
class LearningText:
    """One text that bases are learned from: ``T`` tokens that a model has read, with what it then predicted.

    ``layers``: KV of the ``T`` tokens, keys without rotary embedding. ``gradients``: in the same shapes,
    those of ``log p(x) / sqrt(N)`` with respect to ``layers``, where ``x`` are ``N`` tokens drawn from the
    model's own predictions after the ``T`` tokens. The mean of their outer products is the Fisher
    information: half of ``e^T F e`` is the divergence in nats per token that an error ``e`` causes.
    ``attention [L, Hkv, T]``: see ``GroupBasis.token_worth``.
    """

    layers: Sequence[LayerKV]
    gradients: Sequence[LayerKV]
    attention: torch.Tensor


@dataclass
class _GroupSums:
    """Sums of vectors ``[D]`` and of outer products ``[D, D]`` over tokens, in fp64 on the CPU.

    ``squared_shifts [D]``: over texts, the squares of the sums of all tokens' gradients. See
    ``GroupBasis.shift_costs``.
    """

    values: torch.Tensor
    products: torch.Tensor
    gradient_products: torch.Tensor
    squared_shifts: torch.Tensor

    @classmethod
    def zero(cls, dim: int) -> _GroupSums:
        sizes = ((dim,), (dim, dim), (dim, dim), (dim,))
        return cls(*(torch.zeros(size, dtype=torch.float64) for size in sizes))


@dataclass
class BasisLearner:
    """Collects the statistics of some texts, then fits the bases of all groups to them.

    ``group_ends``: the last layer of each group, plus one. ``first_tokens``: so many tokens of each text
    are left out, since the first ones of a conversation are unlike all others.

    Memory: ``16 D^2`` bytes per group, where ``D`` is the number of layers of the group times the elements
    of a token's KV in one layer; and 8 bytes for each token, layer and KV head.
    """

    shape: LayerShape
    group_ends: Sequence[int]
    first_tokens: int = 4
    num_tokens: int = 0
    num_texts: int = 0
    _sums: list[_GroupSums] = field(init=False, repr=False)
    _attention: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)
    _gradient_energy: list[torch.Tensor] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if (
            list(self.group_ends) != sorted({*self.group_ends})
            or not self.group_ends
            or self.group_ends[0] < 1
        ):
            raise CodecError(f"groups end at rising layers, not at {list(self.group_ends)}")
        self._sums = [_GroupSums.zero(len(layers) * vector_size(self.shape)) for layers in self._groups()]

    def _groups(self) -> list[range]:
        starts = [0, *self.group_ends[:-1]]
        return [range(start, end) for start, end in zip(starts, self.group_ends, strict=True)]

    def add(self, text: LearningText) -> None:
        """Take one text into account.

        Raises:
            CodecError: another number of layers, attention of another shape, or no more tokens than are left
            out.
        """
        num_layers = self.group_ends[-1]
        if len(text.layers) != num_layers or len(text.gradients) != num_layers:
            raise CodecError(f"a text with the KV of {len(text.layers)} layers for a model of {num_layers}")
        attention_shape = (num_layers, self.shape.num_kv_heads, len(text.layers[0].k))
        if text.attention.shape != attention_shape:
            raise CodecError(
                f"attention on all layers, KV heads and tokens is {attention_shape}, got "
                f"{tuple(text.attention.shape)}"
            )
        num_tokens = len(text.layers[0].k) - self.first_tokens
        if num_tokens < 1:
            raise CodecError(f"a text of {len(text.layers[0].k)} tokens is too short to learn from")
        for layers, sums in zip(self._groups(), self._sums, strict=True):
            vectors = group_vectors([text.layers[layer] for layer in layers])[self.first_tokens :].cpu()
            gradients = group_vectors([text.gradients[layer] for layer in layers])[self.first_tokens :].cpu()
            sums.values += vectors.double().sum(0)
            sums.products += (vectors.T @ vectors).double()
            sums.gradient_products += (gradients.T @ gradients).double()
            sums.squared_shifts += gradients.double().sum(0).square()
        energy = [
            _head_energy(gradients, kv)[:, self.first_tokens :]
            for gradients, kv in zip(text.gradients, text.layers, strict=True)
        ]
        self._gradient_energy.append(torch.stack(energy).cpu())
        self._attention.append(text.attention[..., self.first_tokens :].float().cpu())
        self.num_tokens += num_tokens
        self.num_texts += 1

    def fit(self) -> ModelBases:
        """Fit the bases, on the CPU.

        Raises:
            CodecError: fewer than ``LEAST_TOKENS`` tokens.
        """
        if self.num_tokens < LEAST_TOKENS:
            raise CodecError(f"{self.num_tokens} tokens are too few to learn from (at least {LEAST_TOKENS})")
        fits = [self._fit_group(sums) for sums in self._sums]
        num_kept = self._ranks([variances for _, _, _, variances in fits])
        groups = []
        for layers, sums, (mean, encoder, decoder, variances), rank in zip(
            self._groups(), self._sums, fits, num_kept, strict=True
        ):
            means, slopes, levels = self._fit_attention(layers)
            groups.append(
                GroupBasis(
                    layers.start,
                    layers.stop,
                    mean.float(),
                    encoder[:, :rank].float().contiguous(),
                    decoder[:rank].float().contiguous(),
                    _outside(encoder, rank),
                    (sums.squared_shifts / self.num_texts).float(),
                    # Of a Laplace distribution with this variance.
                    (variances[:rank] / 2).sqrt().float(),
                    means,
                    slopes,
                    levels,
                )
            )
        return ModelBases(self.shape, tuple(groups))

    def _fit_group(self, sums: _GroupSums) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean ``[D]``, encoder ``[D, D]``, decoder ``[D, D]`` and variances ``[D]``, falling; fp64."""
        mean = sums.values / self.num_tokens
        covariance = sums.products / self.num_tokens - torch.outer(mean, mean)
        metric = sums.gradient_products / self.num_tokens * (1 - DIAGONAL_SHARE)
        diagonal = sums.gradient_products.diagonal() / self.num_tokens
        metric += torch.diag(diagonal * DIAGONAL_SHARE + diagonal.mean() * 1e-3 + 1e-30)
        # metric = root @ root.T: an error e costs |root.T @ e|^2 / 2 nats.
        root = torch.linalg.cholesky(metric)
        variances, directions = torch.linalg.eigh(root.T @ covariance @ root)
        variances, directions = variances.flip(0).clamp_min(0), directions.flip(1)
        encoder = root @ directions
        decoder = torch.linalg.solve_triangular(root.T, directions, upper=True).T
        return mean, encoder, decoder, variances

    def _ranks(self, variances: Sequence[torch.Tensor]) -> list[int]:
        """Choose how many coefficients to keep of each group, given their ``variances``.

        The coefficients with the smallest variances over all groups are left out, as many as cost
        ``LOST_NATS`` together.
        """
        falling = torch.cat(list(variances)).sort(descending=True).values
        tokens_per_text = self.num_tokens / self.num_texts
        # lost[n]: what leaving out all but the n largest costs.
        lost = falling.flip(0).cumsum(0).flip(0) * tokens_per_text / 2
        num_kept = int((lost > LOST_NATS).sum())
        least = float(falling[max(0, num_kept - 1)])
        return [max(1, int((group >= least).sum())) for group in variances]

    def _fit_attention(self, layers: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``attention_means``, ``attention_slopes`` and ``attention_levels`` of a group: fp32 ``[layers,
        Hkv]``.

        Fits a line to ``log(gradient energy)`` over ``log(attention)`` in each layer and head. Then the
        levels are set so that the mean worth of a layer and head is its share of the group's energy.
        """
        # [layers, Hkv, tokens]
        attention = torch.cat([text[layers.start : layers.stop] for text in self._attention], dim=-1)
        energy = torch.cat([text[layers.start : layers.stop] for text in self._gradient_energy], dim=-1)
        x = attention.clamp_min(LEAST_ATTENTION).log()
        y = energy.clamp_min(_LEAST).log()
        means = x.mean(-1)
        centred = x - means[..., None]
        slopes = (centred * (y - y.mean(-1, keepdim=True))).sum(-1) / centred.square().sum(-1).clamp_min(
            _LEAST
        )
        slopes = slopes.clamp(0, _LARGEST_SLOPE)
        predicted = (centred * slopes[..., None]).exp().mean(-1)
        share = energy.mean(-1) / energy.mean(-1).sum().clamp_min(_LEAST)
        return means, slopes, share / predicted


def _outside(encoder: torch.Tensor, rank: int) -> torch.Tensor:
    """``GroupBasis.outside``, fp32 ``[D, columns]``, of a group that keeps ``rank`` columns of ``encoder [D,
    D]``.

    Its cost is the sum of the squares of all other coefficients. Their sums with random signs have the same
    mean square, and a few of them are enough.
    """
    left_out = encoder[:, rank:]
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (left_out.shape[1], _OUTSIDE_COLUMNS), generator=generator).double() * 2 - 1
    columns: torch.Tensor = left_out @ signs / _OUTSIDE_COLUMNS**0.5
    return columns.float()


def _head_energy(gradients: LayerKV, kv: LayerKV) -> torch.Tensor:
    """Estimate what errors cost at each token if those of each channel are in proportion to its standard
    deviation: ``[Hkv, T]``, up to a common factor."""
    parts = (
        (gradient.float().square() * values.float().var(0)).sum(-1)
        for gradient, values in ((gradients.k, kv.k), (gradients.v, kv.v))
    )
    return torch.stack(list(parts)).sum(0).T
