"""Learns the bases of a model from the KV of some text, and from what errors in it cost the model's
output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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

LOST_NATS = 1e-5
"""Coefficients are left out of the bases as long as that is expected to cost no more than this many nats per
predicted token, in a text as long as those that the bases were learned from."""

_OUTSIDE_COLUMNS = 64
"""What lies outside of a basis is measured in so many random directions. The cost of one token is off by
about a sixth, that of many unlike ones by less."""

_LARGEST_SLOPE = 2.0
_LEAST = 1e-14


@dataclass(frozen=True, eq=False)
class LearningText:
    """Some layers of a text that bases are learned from: ``T`` tokens that a model has read, with what it
    then predicted.

    ``layers``: KV of the ``T`` tokens, keys without rotary embedding. ``gradients``: in the same shapes,
    those of ``log p(x) / sqrt(N)`` with respect to ``layers``, where ``x`` are ``N`` tokens drawn from the
    model's own predictions after the ``T`` tokens. The mean of their outer products is the Fisher
    information: half of ``e^T F e`` is the divergence in nats per token that an error ``e`` causes.
    ``attention [layers, Hkv, T]``: see ``GroupBasis.token_worth``.
    """

    layers: Sequence[LayerKV]
    gradients: Sequence[LayerKV]
    attention: torch.Tensor


@dataclass
class BasisLearner:
    """Fits the bases of a model's groups to some texts, one group after the other in any order.

    ``group_ends``: the last layer of each group, plus one. ``first_tokens``: so many tokens of each text
    are left out, since the first ones of a conversation are unlike all others.

    Memory: ``8 D^2`` bytes for each group that was learned, where ``D`` is the number of layers of the group
    times the elements of a token's KV in one layer, and ten times that while one is.
    """

    shape: LayerShape
    group_ends: Sequence[int]
    first_tokens: int = 4
    # With all coefficients, and their variances.
    _fits: dict[int, tuple[GroupBasis, torch.Tensor]] = field(default_factory=dict, init=False, repr=False)
    _tokens_per_text: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        if (
            list(self.group_ends) != sorted({*self.group_ends})
            or not self.group_ends
            or self.group_ends[0] < 1
        ):
            raise CodecError(f"groups end at rising layers, not at {list(self.group_ends)}")

    @property
    def groups(self) -> list[range]:
        """The layers of each group."""
        starts = [0, *self.group_ends[:-1]]
        return [range(start, end) for start, end in zip(starts, self.group_ends, strict=True)]

    def learn_group(self, number: int, texts: Sequence[LearningText]) -> None:
        """Fit the bases of one group, on the CPU, to its layers of all texts, the same ones for each group.

        Raises:
            CodecError: another number of layers, attention of another shape, no more tokens of a text than
                are left out, or fewer than ``LEAST_TOKENS`` of all.
        """
        layers = self.groups[number]
        num_tokens = sum(self._num_tokens(text, layers) for text in texts)
        if num_tokens < LEAST_TOKENS:
            raise CodecError(f"{num_tokens} tokens are too few to learn from (at least {LEAST_TOKENS})")
        dim = len(layers) * vector_size(self.shape)
        total, squared_shifts = torch.zeros(2, dim, dtype=torch.float64)
        products, metric = torch.zeros(2, dim, dim, dtype=torch.float64)
        energies = []
        for text in texts:
            vectors = group_vectors(text.layers)[self.first_tokens :].cpu()
            gradients = group_vectors(text.gradients)[self.first_tokens :].cpu()
            total += vectors.double().sum(0)
            products += (vectors.T @ vectors).double()
            metric += (gradients.T @ gradients).double()
            squared_shifts += gradients.double().sum(0).square()
            energy = [
                _head_energy(of_layer, kv)[:, self.first_tokens :]
                for of_layer, kv in zip(text.gradients, text.layers, strict=True)
            ]
            energies.append(torch.stack(energy).cpu())
        mean = total / num_tokens
        covariance = products.div_(num_tokens).sub_(torch.outer(mean, mean))
        # [layers, Hkv, tokens]
        attention = torch.cat([text.attention[..., self.first_tokens :].float().cpu() for text in texts], -1)
        encoder, decoder, variances = _fitted(covariance, metric.div_(num_tokens))
        # Of Laplace distributions with these variances.
        magnitudes = (variances / 2).sqrt().float()
        shift_costs = (squared_shifts / len(texts)).float()
        whole = mean.float(), encoder, decoder, encoder[:, :0], shift_costs, magnitudes
        lines = _fitted_attention(attention, torch.cat(energies, -1))
        self._fits[number] = GroupBasis(layers.start, layers.stop, *whole, *lines), variances
        self._tokens_per_text = num_tokens / len(texts)

    def _num_tokens(self, text: LearningText, layers: range) -> int:
        """So many tokens are learned from. Raises CodecError: see ``learn_group``."""
        if len(text.layers) != len(layers) or len(text.gradients) != len(layers):
            raise CodecError(f"a text with the KV of {len(text.layers)} layers for a group of {len(layers)}")
        attention_shape = (len(layers), self.shape.num_kv_heads, len(text.layers[0].k))
        if text.attention.shape != attention_shape:
            raise CodecError(
                f"attention on all layers, KV heads and tokens is {attention_shape}, got "
                f"{tuple(text.attention.shape)}"
            )
        num_tokens = len(text.layers[0].k) - self.first_tokens
        if num_tokens < 1:
            raise CodecError(f"a text of {len(text.layers[0].k)} tokens is too short to learn from")
        return num_tokens

    def bases(self) -> ModelBases:
        """The bases, once every group was learned.

        Raises:
            CodecError: a group was not.
        """
        if sorted(self._fits) != [*range(len(self.group_ends))]:
            raise CodecError(f"{len(self._fits)} of {len(self.group_ends)} groups were learned")
        fits = [self._fits[number] for number in range(len(self.group_ends))]
        groups = [
            replace(
                whole,
                encoder=whole.encoder[:, :rank].contiguous(),
                decoder=whole.decoder[:rank].contiguous(),
                outside=_outside(whole.encoder, rank),
                magnitudes=whole.magnitudes[:rank].contiguous(),
            )
            for (whole, _), rank in zip(fits, self._ranks([each for _, each in fits]), strict=True)
        ]
        return ModelBases(self.shape, tuple(groups))

    def _ranks(self, variances: Sequence[torch.Tensor]) -> list[int]:
        """Choose how many coefficients to keep of each group, given their ``variances``.

        The coefficients with the smallest variances over all groups are left out, as many as cost
        ``LOST_NATS`` together.
        """
        falling = torch.cat(list(variances)).sort(descending=True).values
        # lost[n]: what leaving out all but the n largest costs.
        lost = falling.flip(0).cumsum(0).flip(0) * self._tokens_per_text / 2
        num_kept = int((lost > LOST_NATS).sum())
        least = float(falling[max(0, num_kept - 1)])
        return [max(1, int((group >= least).sum())) for group in variances]


def _fitted(covariance: torch.Tensor, squares: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Encoder and decoder fp32 ``[D, D]``, and variances fp64 ``[D]``, falling. ``squares [D, D]``, which is
    overwritten: the mean outer product of gradients."""
    diagonal = squares.diagonal().clone()
    metric = squares.mul_(1 - DIAGONAL_SHARE)
    metric += torch.diag(diagonal * DIAGONAL_SHARE + diagonal.mean() * 1e-3 + 1e-30)
    # metric = root @ root.T: an error e costs |root.T @ e|^2 / 2 nats.
    root = torch.linalg.cholesky(metric)
    variances, directions = torch.linalg.eigh(root.T @ covariance @ root)
    variances, directions = variances.flip(0).clamp_min(0), directions.flip(1)
    encoder = root @ directions
    decoder = torch.linalg.solve_triangular(root.T, directions, upper=True).T
    return encoder.float(), decoder.float(), variances


def _fitted_attention(
    attention: torch.Tensor, energy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``attention_means``, ``attention_slopes`` and ``attention_levels`` of a group: fp32 ``[layers, Hkv]``.
    ``attention`` and gradient ``energy``: ``[layers, Hkv, tokens]``.

    Fits a line to ``log(energy)`` over ``log(attention)`` in each layer and head. Then the levels are set so
    that the mean worth of a layer and head is its share of the group's energy.
    """
    x = attention.clamp_min(LEAST_ATTENTION).log()
    y = energy.clamp_min(_LEAST).log()
    means = x.mean(-1)
    centred = x - means[..., None]
    slopes = (centred * (y - y.mean(-1, keepdim=True))).sum(-1) / centred.square().sum(-1).clamp_min(_LEAST)
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
    signs = torch.randint(2, (left_out.shape[1], _OUTSIDE_COLUMNS), generator=generator).float() * 2 - 1
    columns: torch.Tensor = left_out @ signs / _OUTSIDE_COLUMNS**0.5
    return columns


def _head_energy(gradients: LayerKV, kv: LayerKV) -> torch.Tensor:
    """Estimate what errors cost at each token if those of each channel are in proportion to its standard
    deviation: ``[Hkv, T]``, up to a common factor."""
    parts = (
        (gradient.float().square() * values.float().var(0)).sum(-1)
        for gradient, values in ((gradients.k, kv.k), (gradients.v, kv.v))
    )
    return torch.stack(list(parts)).sum(0).T
