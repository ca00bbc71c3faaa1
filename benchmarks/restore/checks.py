"""Whether restores give what they have to, judged by the logits of the first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.restore.configuration import WrongRestoreError
from benchmarks.restore.loader import LayerLoader
from benchmarks.restore.restorer import Measured, Restorer, Turn
from benchmarks.restore.stored import StoredConversation
from benchmarks.restore.tiers import Tier
from krul_backend.codec.layout import LayerKV

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Largest relative error of the logits, by the model's dtype: products of other shapes round in another
way, and layers of random weights carry that on. A restore without its head misses by far more."""

_CONTROL_FACTOR = 2
"""The negative control has to differ by so many times the tolerance."""


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """``|logits - expected| / |expected|``; NaN if there is one in either."""
    difference = (logits.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


@dataclass(frozen=True, eq=False)
class Checks:
    """``history[l]`` is the KV of the turn's history as a prompt without restoring computes it."""

    restorer: Restorer
    turn: Turn
    history: Sequence[LayerKV]
    tolerance: float

    @torch.inference_mode()
    def expected(self, stored: StoredConversation, head_ends: Sequence[int]) -> torch.Tensor:
        """Logits after a restore without loss of its own: heads as computed, tails as the codec decodes them.

        For natively stored KV they are those of full recompute, but for rounding.
        """
        pool, slots = self.restorer.pool, self.turn.slots
        for layer, kv in enumerate(self.history):
            pool.write(layer, slots[: self.turn.history_tokens], kv)
        stored.decode_tails(head_ends, pool, slots)
        return self.restorer.own_forward(self.turn, self.turn.history_tokens)[0].clone()

    def check(self, what: str, measured: Measured, expected: torch.Tensor) -> float:
        """The relative error of one restore. Raises WrongRestoreError if it is above the tolerance."""
        error = relative_error(measured.logits, expected)
        if not error <= self.tolerance:
            raise WrongRestoreError(
                f"{what}: logits differ by {error:.3g} of their size (tolerance {self.tolerance:.3g})"
            )
        return error

    @torch.inference_mode()
    def without_head(
        self, loader: LayerLoader, stored: StoredConversation, tier: Tier, expected: torch.Tensor
    ) -> float:
        """The relative error when half of the history is loaded and its head is left at zero.

        Raises:
            WrongRestoreError: it is so small that ``check`` could not tell a wrong restore from a right one.
        """
        self.restorer.pool.fill(0.0)
        head_ends = [self.turn.history_tokens // 2] * stored.num_layers
        loader.start(stored, tier, head_ends, self.turn.slots).finish()
        self.restorer.device.synchronize()
        logits, _ = self.restorer.own_forward(self.turn, self.turn.history_tokens)
        error = relative_error(logits, expected)
        if not error > _CONTROL_FACTOR * self.tolerance:
            raise WrongRestoreError(
                f"a restore without its head differs by {error:.3g} only (tolerance {self.tolerance:.3g})"
            )
        return error
