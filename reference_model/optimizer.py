"""Muon for the matrices, AdamW for the rest, on weights replicated over data-parallel processes."""

from itertools import pairwise

import torch
from torch import Tensor

from reference_model.model import FEED_FORWARD, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Weights

_MUON_LR, _MUON_DECAY = 0.02, 0.1
_ADAM_LR, _ADAM_BETAS, _ADAM_EPSILON = 5e-3, (0.9, 0.95), 1e-10
_MOMENTUM_START, _MOMENTUM_END, _MOMENTUM_STEPS = 0.85, 0.95, 300
LEARNING_RATE_KNOTS = (
    (-1, 0.0),
    (59, 1.0),
    (600, 1.0),
    (1045, 0.112),
    (1065, 0.6),
    (1340, 0.02),
    (1370, 0.6),
    (1620, 0.6),
    (2020, 0.02),
    (2035, 0.6),
    (2110, 0.6),
    (2340, 0.02),
)
"""Steps and shares: warm-up, plateau, decay; it rises again with the invented and with the ordinary words."""
# Quintic iteration that drives all singular values towards 1 (Jordan et al., "Muon", 2024).
_NEWTON_SCHULZ, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5
_MATRICES = ("qkv", "o", "gate_up", "down")
_Q, _KV = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
# Fused matrices are orthogonalised part by part.
_PARTS: dict[str, list[int]] = {"qkv": [_Q, _KV, _KV], "gate_up": [FEED_FORWARD, FEED_FORWARD]}


def learning_rate_factor(step: int) -> float:
    """Share of the full learning rate at `step`: linear between `LEARNING_RATE_KNOTS`, constant behind."""
    for (start, before), (end, after) in pairwise(LEARNING_RATE_KNOTS):
        if step < end:
            return before + (after - before) * (step - start) / (end - start)
    return LEARNING_RATE_KNOTS[-1][1]


def orthogonalise(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, approximately, of each matrix [N, rows, columns]; fp32 result."""
    a, b, c = _NEWTON_SCHULZ
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).float()
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = (x if wide else x.mT).float()
    return result


class Optimizer:
    """Updates `weights` in place. Every process calls `step` with the same averaged gradients."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.state: dict[str, Tensor] = {}
        for name, weight in weights.items():
            self.state[f"{name}.first"] = torch.zeros_like(weight, requires_grad=False)
            if name not in _MATRICES:
                self.state[f"{name}.second"] = torch.zeros_like(weight, requires_grad=False)

    @torch.no_grad()
    def step(self, step: int) -> None:
        """One update from the `grad` of each weight; the gradients are cleared."""
        factor = learning_rate_factor(step)
        updates = self._muon_updates(step)
        for name, weight in self._weights.items():
            if name in updates:
                weight.mul_(1 - _MUON_LR * factor * _MUON_DECAY)
                weight.sub_(updates[name], alpha=_MUON_LR * factor)
            else:
                self._adam_update(name, weight, _ADAM_LR * factor, step)
            weight.grad = None

    def _muon_updates(self, step: int) -> dict[str, Tensor]:
        """Orthogonalised momentum of all matrices."""
        share = min(1.0, step / _MOMENTUM_STEPS)
        momentum = _MOMENTUM_START + (_MOMENTUM_END - _MOMENTUM_START) * share
        updates = {}
        for name in _MATRICES:
            grad = self._weights[name].grad
            assert grad is not None, name
            first = self.state[f"{name}.first"]
            first.lerp_(grad, 1 - momentum)
            nesterov = grad.lerp(first, momentum)
            parts = []
            for part in torch.split(nesterov, _PARTS.get(name, [nesterov.shape[1]]), dim=1):
                rows, columns = part.shape[-2:]
                parts.append(orthogonalise(part) * max(1.0, rows / columns) ** 0.5)
            updates[name] = torch.cat(parts, 1)
        return updates

    def _adam_update(self, name: str, weight: Tensor, learning_rate: float, step: int) -> None:
        grad = weight.grad
        assert grad is not None, name
        beta1, beta2 = _ADAM_BETAS
        first, second = self.state[f"{name}.first"], self.state[f"{name}.second"]
        first.lerp_(grad, 1 - beta1)
        second.lerp_(grad.square(), 1 - beta2)
        mean = first / (1 - beta1 ** (step + 1))
        variance = second / (1 - beta2 ** (step + 1))
        weight.sub_(mean / (variance.sqrt() + _ADAM_EPSILON), alpha=learning_rate)
