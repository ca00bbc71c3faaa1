"""Torch versions of the kernels that Mamba-2 layers need, such as Nemotron-H's, for servers without an
accelerator.

SGLang's own are Triton kernels. The functions here have their contracts: what is written, and where. The
recurrence is that of Mamba-2 (arXiv 2405.21060), section 2.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from krul_sglang.adapter.platforms.cpu_convolution import (
    PAD_SLOT,
    DraftStates,
    convolve_next,
    convolve_prompts,
)
from krul_sglang.adapter.platforms.cpu_delta_rule import find_decays, read_and_write


def install() -> None:
    """Have SGLang take these functions where it would take its Triton kernels. Safe to call again."""
    from sglang.srt.layers.attention.mamba import mamba

    mamba.__dict__.update(
        causal_conv1d_fn=convolve_prompts,
        causal_conv1d_fn_triton=convolve_prompts,
        causal_conv1d_update=convolve_next,
        causal_conv1d_update_triton=convolve_next,
        mamba_chunk_scan_combined=scan_prompts,
        selective_state_update=scan_next,
    )


def scan(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    *,
    rate: torch.Tensor,
    skip: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Change a state, and read it, token by token: all ``T`` tokens in a few products.

    With token ``t``, whose step is ``d = softplus(dt[t] + dt_bias)``, and the state ``S``::

        S = exp(d * rate) * S + d * x[t] b[t]^T;  y[t] = S c[t] + skip * x[t]

    Args:
        state: ``[..., H, P, N]``, float32.
        x: ``[..., H, T, P]``; dt: ``[..., H, T]``.
        b, c: ``[..., G, T, N]``, of groups of heads.
        rate: ``[H]``, negative; skip, dt_bias: ``[H]``.

    Returns:
        ``y`` (``[..., H, T, P]``), and the state after the last token.
    """
    repeats = x.shape[-3] // b.shape[-3]
    b, c = (each.float().repeat_interleave(repeats, dim=-3) for each in (b, c))
    x, steps = x.float(), F.softplus(dt.float() + dt_bias.float()[:, None])
    decay, since_start = find_decays((steps * rate.float()[:, None])[..., None])
    y, state = read_and_write(state, c, b, steps[..., None] * x, decay, since_start)
    return y + skip.float()[:, None, None] * x, state


def scan_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    *,
    chunk_size: int,
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    track_end_locs: torch.Tensor | None,
    out: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Scan new tokens of several requests, which lie one after another.

    Args:
        x: ``[1, T, H, P]``; dt: ``[1, T, H]``; B, C: ``[1, T, G, N]``; A, D, dt_bias: ``[H]``.
        chunk_size: of how many tokens, counted over the whole batch, states are returned.
        cu_seqlens: ``[batch + 1]``, where each request begins.
        initial_states: ``[batch, H, P, N]``. None: all requests begin with zeros.
        track_end_locs: before which other tokens, counted so, states are returned.
        out: ``[1, T, H, P]``, is written.

    Returns:
        The states before each chunk, ``[1, chunks, H, P, N]``, after each request, ``[batch, H, P, N]``, and
        before the tokens of ``track_end_locs``, ``[1, tracked, H, P, N]``; None if there are none.
    """
    bounds = cu_seqlens.tolist()
    chunks = range(0, bounds[-1], chunk_size)
    tracked = [] if track_end_locs is None else track_end_locs.tolist()
    # [1, T, H, ...] -> [H, T, ...]
    inputs = [each[0].transpose(0, 1) for each in (x, dt, B, C)]
    before, after = dict[int, torch.Tensor](), list[torch.Tensor]()
    for number, (start, end) in enumerate(pairwise(bounds)):
        state = x.new_zeros(*x.shape[2:], B.shape[-1], dtype=torch.float32)
        if initial_states is not None:
            state = initial_states[number].float()
        cuts = {start, end} | {cut for cut in (*chunks, *tracked) if start < cut < end}
        for first, last in pairwise(sorted(cuts)):
            before[first] = state
            part = (each[:, first:last] for each in inputs)
            y, state = scan(state, *part, rate=A, skip=D, dt_bias=dt_bias)
            out[0, first:last] = y.transpose(0, 1).to(out.dtype)
        after.append(state)
    of_tracked = torch.stack([before[at] for at in tracked])[None] if tracked else None
    return torch.stack([before[at] for at in chunks])[None], torch.stack(after), of_tracked


def scan_next(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    *,
    z: None,
    dt_bias: torch.Tensor,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Scan the next token of each request, or ``n`` drafted ones, each behind those on its path.

    ``state`` (``[slots, H, P, N]``) is written, and ``out`` (``[batch, H, P]``); ``state_batch_indices``
    (``[batch]``) are the slots. ``x`` is ``[batch, H, P]``, ``B`` and ``C`` are ``[batch, G, N]``. The others
    repeat what a head has: ``dt`` ``[batch, H, P]``, ``A`` ``[H, P, N]``, ``D`` and ``dt_bias`` ``[H, P]``.

    What is of tokens is ``[batch, n, ...]`` for drafted ones. Then ``state`` stays; the others are as for
    ``cpu_delta_rule.verify_drafts``.
    """
    assert dt_softplus
    rows = (state_batch_indices != PAD_SLOT).nonzero()[:, 0]
    slots = state_batch_indices[rows].long()
    of_heads = {"rate": A[:, 0, 0], "skip": D[:, 0], "dt_bias": dt_bias[:, 0]}
    # [batch, H, ...] or [batch, n, H, ...] -> [batch, n, H, 1, ...]
    x, dt, B, C = (  # noqa: N806
        each[rows].view(len(rows), -1, *each.shape[-2:]).unsqueeze(3) for each in (x, dt[..., :1], B, C)
    )
    drafted, outputs = DraftStates(state[slots].float(), retrieve_parent_token), list[torch.Tensor]()
    for number in range(x.shape[1]):
        of_token = x[:, number], dt[:, number, ..., 0], B[:, number], C[:, number]
        y, after = scan(drafted.before_next(), *of_token, **of_heads)
        drafted.add(after)
        outputs.append(y[:, :, 0])
    if intermediate_states_buffer is None:
        state[slots] = after.to(state.dtype)
    else:
        assert intermediate_state_indices is not None
        drafted.write(intermediate_states_buffer, intermediate_state_indices)
    out.zero_()
    out[rows] = torch.stack(outputs, dim=1).view_as(out[rows]).to(out.dtype)
