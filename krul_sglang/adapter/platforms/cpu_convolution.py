"""Torch versions of the causal convolutions that Mamba and hybrid models need, for servers without an
accelerator.

SGLang's own are Triton kernels. The functions here have their contracts: what is written, and where.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

PAD_SLOT = -1
"""SGLang's index of a request that only fills up a batch."""


def install() -> None:
    """Have SGLang take these functions where it would take its Triton kernels. Safe to call again."""
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.srt.layers.attention.mamba import causal_conv1d

    # Layers with a gated delta rule take Triton's by name.
    causal_conv1d_triton.__dict__.update(
        causal_conv1d_fn=convolve_prompts, causal_conv1d_update=convolve_next
    )
    causal_conv1d.__dict__.update(
        _causal_conv1d_fn_triton=convolve_prompts, _causal_conv1d_update_triton=convolve_next
    )


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: list[int],
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT,
    **kwargs: Any,
) -> torch.Tensor:
    """Convolve new tokens of several requests, which lie one after another.

    Args:
        x: ``[channels, tokens]``.
        weight: ``[channels, width]``; ``bias``: ``[channels]``.
        conv_states: ``[slots, channels, width - 1]``: the inputs of the last tokens of each slot, oldest
            first. Those of the requests are written.
        query_start_loc: ``[batch + 1]``, where each request begins in ``x``.
        seq_lens_cpu: not read.
        cache_indices: ``[batch]``, the requests' slots.
        has_initial_state: bool ``[batch]``; without a state a request begins with zeros. None: all have none.

    Returns:
        ``[channels, tokens]``.
    """
    output = torch.empty_like(x)
    starts, slots = query_start_loc.tolist(), cache_indices.tolist()
    are_resumed = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    for slot, is_resumed, start, end in zip(slots, are_resumed, starts, starts[1:], strict=False):
        if slot == pad_slot_id or start == end:
            continue
        state = conv_states[slot]
        before = state.to(x.dtype) if is_resumed else x.new_zeros(state.shape)
        inputs = torch.cat([before, x[:, start:end]], dim=1)
        output[:, start:end] = _convolve(inputs[None], weight, bias, activation)[0]
        state.copy_(inputs[:, -state.shape[1] :])
    return output


def convolve_next(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT,
    **of_drafts: Any,
) -> torch.Tensor:
    """Convolve the next token of each request: ``x`` ``[batch, channels]``, and so the result.

    ``conv_state`` is written, as by ``convolve_prompts``; ``conv_state_indices`` ``[batch]`` are the slots.
    With ``of_drafts`` the drafted tokens of each request are convolved: see ``convolve_drafts``.
    """
    assert cache_seqlens is None
    assert conv_state_indices is not None
    slots = conv_state_indices.long()
    if of_drafts:
        return convolve_drafts(x, conv_state[slots], weight, bias, activation, **of_drafts)
    assert x.dim() == 2, x.shape
    rows = (slots != pad_slot_id).nonzero()[:, 0]
    slots = slots[rows]
    # [batch, channels, width]
    inputs = torch.cat([conv_state[slots].to(x.dtype), x[rows, :, None]], dim=2)
    conv_state[slots] = inputs[:, :, 1:].to(conv_state.dtype)
    output = torch.zeros_like(x)
    output[rows] = _convolve(inputs, weight, bias, activation)[:, :, 0]
    return output


def convolve_drafts(
    x: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    intermediate_conv_window: torch.Tensor,
    intermediate_state_indices: torch.Tensor,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve ``n`` drafted tokens of each request, each behind those on its path from the root.

    Args:
        x: ``[batch, channels, n]``, and so is the result.
        states: ``[batch, channels, width - 1]``, of the requests before these tokens.
        intermediate_conv_window: ``[rows, n or more, channels, width - 1]``, written: the state after each
            token. ``intermediate_state_indices`` (``[batch]``) are the rows.
        retrieve_next_token: ``[batch, n]``, the first child of each token, or -1; None: each follows the one
            before it. ``retrieve_next_sibling``: the next child of the same parent.
        retrieve_parent_token: ``[batch, n]``, written, for the recurrences that come after.
    """
    if retrieve_next_token is not None:
        assert retrieve_next_sibling is not None
        assert retrieve_parent_token is not None
        _write_parents(retrieve_next_token, retrieve_next_sibling, retrieve_parent_token)
    drafted, outputs = DraftStates(states.to(x.dtype), retrieve_parent_token), list[torch.Tensor]()
    for token in x.unbind(2):
        # [batch, channels, width]
        inputs = torch.cat([drafted.before_next(), token[:, :, None]], dim=2)
        outputs.append(_convolve(inputs, weight, bias, activation)[:, :, 0])
        drafted.add(inputs[:, :, 1:])
    drafted.write(intermediate_conv_window, intermediate_state_indices)
    # SGLang lays tokens out one after another.
    return torch.stack(outputs, dim=1).transpose(1, 2)


class DraftStates:
    """The states of requests after each of their drafted tokens.

    Args:
        before: the states before all of them, ``[batch, ...]``.
        parents: ``[batch, n]``, which token each one follows, -1 for none; None: the one before it.
    """

    def __init__(self, before: torch.Tensor, parents: torch.Tensor | None) -> None:
        self._states = [before]
        self._parents = parents

    def before_next(self) -> torch.Tensor:
        """The state that the next token finds, ``[batch, ...]``."""
        if self._parents is None:
            return self._states[-1]
        found = self._parents[:, len(self._states) - 1].long() + 1
        return torch.stack(self._states)[found, torch.arange(len(found))]

    def add(self, state: torch.Tensor) -> None:
        """Note what the next token makes of it."""
        self._states.append(state)

    def write(self, buffer: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the states to ``rows`` (``[batch]`` or more) of ``buffer``, ``[rows, n or more, ...]``."""
        rows = rows[: len(self._states[0])].long()
        for number, state in enumerate(self._states[1:]):
            buffer[rows, number] = state.to(buffer.dtype)


def _write_parents(children: torch.Tensor, siblings: torch.Tensor, parents: torch.Tensor) -> None:
    """Write which token of a tree each one follows, by the first child and the next sibling of each."""
    parents.fill_(-1)
    for of_request, firsts, nexts in zip(parents, children.tolist(), siblings.tolist(), strict=True):
        for token, child in enumerate(firsts):
            while child >= 0:
                of_request[child] = token
                child = nexts[child]


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Each channel by itself: ``[batch, channels, width - 1 + tokens]`` to ``[batch, channels, tokens]``."""
    assert activation in (None, "silu", "swish"), activation
    output = F.conv1d(inputs, weight[:, None], bias, groups=len(weight))
    return output if activation is None else F.silu(output)
