"""The tokens of a shared pair that keep their own vectors (MiniCache, section 4.3)."""

from __future__ import annotations

import torch

from krul_backend.codec.options import CodecOptions, RetentionRule
from krul_backend.device import Device

_ALWAYS = 2.0
"""A distance above every angular distance."""


def must_retain(
    num_tokens: int, start_token: int, options: CodecOptions, device: torch.device
) -> torch.Tensor:
    """bool ``[T]``: the conversation's first tokens, of a segment that starts at ``start_token``."""
    return start_token + torch.arange(num_tokens, device=device) < options.num_first_tokens


def retained_counts(distances: torch.Tensor, start_token: int, options: CodecOptions) -> tuple[int, ...]:
    """How many tokens each head retains, by angular distances ``[T, H]``; see ``RetentionRule``."""
    num_tokens, num_heads = distances.shape
    forced = must_retain(num_tokens, start_token, options, distances.device)
    if options.retention is RetentionRule.SHARE:
        num_forced = int(forced.sum())
        # Rounded up, but not because 0.1 * 30 is a little more than 3 in binary.
        wanted = -int(-options.retained_amount * (num_tokens - num_forced) * (1 - 1e-12) // 1)
        return (num_forced + wanted,) * num_heads
    low, high = torch.aminmax(distances, dim=0)
    is_far = distances > high - (high - low) * options.retained_amount
    counts: list[int] = (is_far | forced.unsqueeze(1)).sum(dim=0).tolist()
    return tuple(counts)


def retained_tokens(
    distances: torch.Tensor, counts: tuple[int, ...], start_token: int, options: CodecOptions
) -> torch.Tensor:
    """Tokens that are retained, int64 ``[sum(counts)]``: head after head, ascending within each.

    ``counts[h]`` tokens of head ``h``: those that must be, then those of the largest ``distances [T, H]``;
    of equals the earlier one.
    """
    forced = must_retain(distances.shape[0], start_token, options, distances.device)
    order = distances.masked_fill(forced.unsqueeze(1), _ALWAYS).argsort(dim=0, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(0, order, torch.arange(order.shape[0], device=order.device).unsqueeze(1).expand_as(order))
    is_retained = rank < Device.of(rank).from_list(counts)
    return is_retained.t().nonzero()[:, 1]
