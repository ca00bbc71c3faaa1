"""Torch versions of the kernels that layers with a gated delta rule need, Qwen3-Next's and Kimi-Linear's, for
servers without an accelerator.

SGLang's own are Triton kernels. The functions here have their contracts: what is written, and where. The rule
is that of Gated DeltaNet (arXiv 2412.06464), section 3, or of Kimi Delta Attention (KDA, arXiv 2510.26692),
section 3, which has a decay for each channel of a key.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from krul_sglang.adapter.platforms.cpu_convolution import PAD_SLOT, DraftStates

CHUNK_TOKENS = 64
"""Tokens of a prompt that are computed together."""


def install() -> None:
    """Have SGLang take these functions where it would take its Triton kernels. Safe to call again."""
    from sglang.kernels.ops.attention import triton_gdn_fused_proj
    from sglang.kernels.ops.attention.fla import chunk, fused_norm_gate, fused_recurrent, kda
    from sglang.kernels.ops.attention.linear import fused_gdn_gating, fused_sigmoid_gating_recurrent
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton

    replaced: dict[ModuleType, dict[str, Any]] = {
        triton_gdn_fused_proj: {"fused_qkvzba_split_reshape_cat": split_projections},
        fused_gdn_gating: {"fused_gdn_gating": compute_gates},
        chunk: {"chunk_gated_delta_rule": extend_prompts},
        kda: {"chunk_kda": extend_kda_prompts},
        fused_recurrent: {
            "fused_recurrent_gated_delta_rule_packed_decode": decode_next,
            "fused_recurrent_kda_packed_decode": decode_next,
        },
        fused_sigmoid_gating_recurrent: {"fused_sigmoid_gating_delta_rule_update": verify_drafts},
        fused_norm_gate: {"rms_norm_gated": normalize_gated},
        elementwise: {"fused_gate_sigmoid_mul_add": add_shared_expert},
        mamba_state_scatter_triton: {
            "track_mamba_states_all_layers": snapshot_states,
            "track_mamba_states_if_needed": snapshot_states,
            "scatter_mamba_states_after_mtp_verify": commit_drafts,
        },
    }
    # Models may have been imported already, and have taken kernels by name.
    of_sglang = [vars(module) for name, module in sys.modules.items() if name.startswith("sglang.")]
    for module, functions in replaced.items():
        for name, function in functions.items():
            original = vars(module)[name]
            for names in of_sglang:
                if names.get(name) is original:
                    names[name] = function


def delta_rule(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and change a memory of values by key, token by token: all ``T`` tokens in a few products.

    With token ``t`` the memory ``S`` decays, then learns a part of what it does not know yet, then is read::

        S = exp(log_decay[t]) * S;  u[t] = beta[t] * (v[t] - k[t] S);  S = S + k[t]^T u[t];  o[t] = q[t] S

    With ``c`` the sums of ``log_decay``, and ``S`` as before the first token::

        u[t] = beta[t] * (v[t] - exp(c[t]) k[t] S - sum_{i < t} (exp(c[t] - c[i]) k[t] . k[i]) u[i])

    This is a triangular system of equations for ``u``.

    Args:
        state: ``S`` transposed, ``[..., V, K]``, as SGLang stores it.
        q, k: ``[..., T, K]``, of length one (queries may be scaled); v: ``[..., T, V]``.
        log_decay: ``[..., T, C]``, where ``C`` is ``K``, or 1 if all channels of a key have one decay.
        beta: ``[..., T]``.

    Returns:
        ``o`` (``[..., T, V]``), and the state after the last token.
    """
    decay, since_start = find_decays(log_decay)
    beta = beta[..., None]
    overlap = beta * _overlap(k, k, decay)
    unknown = beta * (v - (since_start * k) @ state.mT)
    learned = torch.linalg.solve_triangular(overlap, unknown, upper=False, unitriangular=True)
    return read_and_write(state, q, k, learned, decay, since_start)


def find_decays(log_decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute which share of what a token writes is left at each later token, and which share of the state
    before the first token is.

    ``log_decay`` is ``[..., T, C]``, the results ``[..., T, T, C]`` (later, earlier token) and
    ``[..., T, C]``.
    """
    sums = log_decay.cumsum(-2)
    # Before exp, which could overflow above the diagonal.
    is_earlier = torch.ones(sums.shape[-2], sums.shape[-2], dtype=torch.bool).tril()[..., None]
    differences = sums[..., :, None, :] - sums[..., None, :, :]
    return differences.where(is_earlier, -torch.inf).exp(), sums.exp()


def _overlap(q: torch.Tensor, k: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """The product of each query with the earlier keys, as they have decayed: ``[..., T, T]``."""
    if decay.shape[-1] == 1:
        return decay[..., 0] * (q @ k.mT)
    return torch.einsum("...tk,...sk,...tsk->...ts", q, k, decay)


def read_and_write(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    since_start: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each token's ``values`` (``[..., T, V]``) to a memory at its key, and read it with its query.

    The rest, and the results, are those of ``delta_rule`` and ``find_decays``.
    """
    output = (since_start * q) @ state.mT + _overlap(q, k, decay) @ values
    written = values.mT @ (decay[..., -1, :, :] * k)
    return output, since_start[..., -1:, :] * state + written


def extend_prompts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Apply the gated delta rule to new tokens of several requests, which lie one after another.

    Args:
        q, k: ``[1, T, H, K]``, not normalized; v: ``[1, T, HV, V]``; beta: ``[1, T, HV]``.
        g: ``[1, T, HV]``, or ``[1, T, HV, K]`` with a decay for each channel.
        initial_state: ``[slots, HV, V, K]``. Those of the requests are written; SGLang clears new ones.
        initial_state_indices: ``[batch]``, the requests' slots.
        cu_seqlens: ``[batch + 1]``, where each request begins.

    Returns:
        ``[1, T, HV, V]``, and the state before each 64 tokens of a request, ``[1, chunks, HV, V, K]``.
    """
    output, states = torch.zeros_like(v), []
    # [1, T, HV, ...] -> [HV, T, ...]
    inputs = [x[0].transpose(0, 1) for x in (*_heads(q, k, v), g.reshape(*beta.shape, -1), beta)]
    bounds = cu_seqlens.tolist()
    for slot, start, end in zip(initial_state_indices.tolist(), bounds, bounds[1:], strict=False):
        if slot == PAD_SLOT:
            continue
        state = initial_state[slot].to(torch.float32, copy=True)
        for first in range(start, end, CHUNK_TOKENS):
            part = slice(first, min(first + CHUNK_TOKENS, end))
            states.append(state)
            chunk, state = delta_rule(state, *[x[:, part] for x in inputs])
            output[0, part] = chunk.transpose(0, 1).to(output.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return output, None, torch.stack(states)[None] if states else initial_state[None, :0]


def extend_kda_prompts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    lower_bound: None,
    beta_is_raw: bool,
    output_intermediate_states: bool,
    track_state: torch.Tensor | None,
    track_chunk_idx: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``extend_prompts`` with a decay for each channel, whose gates are not computed yet.

    ``g`` is ``[1, T, HV, K]`` and ``dt_bias`` ``[HV * K]``. ``track_state`` (``[batch, HV, V, K]``) is given
    the state before chunk ``track_chunk_idx`` (``[batch]``) of each request, where that is not negative.

    Returns what ``extend_prompts`` does; the states only with ``output_intermediate_states``.
    """
    assert lower_bound is None
    assert beta_is_raw
    gates = compute_gates(A_log.view(-1, 1), g[0], beta[0], dt_bias.view(g.shape[2:]))
    output, _, states = extend_prompts(q, k, v, *gates, cu_seqlens=cu_seqlens, **options)
    if track_state is not None and track_chunk_idx is not None:
        chunks = -(cu_seqlens.diff() // -CHUNK_TOKENS)
        rows = (track_chunk_idx >= 0).nonzero()[:, 0]
        track_state[rows] = states[0, (chunks.cumsum(0) - chunks + track_chunk_idx)[rows]]
    return (output, states) if output_intermediate_states else output


def decode_next(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    lower_bound: None = None,
) -> None:
    """Apply the gated delta rule to the next token of each request.

    ``mixed_qkv`` (``[batch, 2 * H * K + HV * V]``) has queries, then keys, then values; ``a`` and ``b``
    (``[batch, HV]``) make gates, ``a`` (``[batch, HV * K]``) and ``dt_bias`` those of each channel, if there
    are. ``initial_state`` is written, as by ``extend_prompts``, and ``out`` (``[batch, 1, HV, V]``);
    ``ssm_state_indices`` (``[batch]``) are the slots.
    """
    assert lower_bound is None
    num_heads, v_dim, k_dim = initial_state.shape[1:]
    rows = (ssm_state_indices != PAD_SLOT).nonzero()[:, 0]
    slots = ssm_state_indices[rows].long()
    end_of_keys = mixed_qkv.shape[1] - num_heads * v_dim
    qk, v = mixed_qkv[rows, :end_of_keys], mixed_qkv[rows, end_of_keys:]
    q, k = qk.view(len(rows), 2, -1, k_dim).unbind(1)
    inputs = _heads(q, k, v.view(len(rows), num_heads, v_dim))
    a, dt_bias = (x.view(*x.shape[:-1], num_heads, -1) for x in (a[rows], dt_bias))
    gates = compute_gates(A_log[:, None], a, b[rows], dt_bias)
    # [batch, HV, ...] -> [batch, HV, 1, ...]
    of_token = [x[:, :, None] for x in (*inputs, *(gate[0] for gate in gates))]
    result, states = delta_rule(initial_state[slots].float(), *of_token)
    initial_state[slots] = states.to(initial_state.dtype)
    out.zero_()
    out[rows] = result.transpose(1, 2).to(out.dtype)


def verify_drafts(
    *,
    A_log: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    intermediate_states_buffer: torch.Tensor,
    intermediate_state_indices: torch.Tensor,
    retrieve_parent_token: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """Apply the gated delta rule to ``n`` drafted tokens of each request, each behind those on its path.

    No request's state changes. The one after each token is written to ``intermediate_states_buffer``
    (``[rows, n or more, HV, V, K]``), of which ``intermediate_state_indices`` (``[batch]``) are the rows.
    ``retrieve_parent_token`` is what ``convolve_drafts`` has written. The rest is as for ``extend_prompts``
    and ``decode_next``; returns ``[1, batch * n, HV, V]``.
    """
    batch = len(cu_seqlens) - 1
    # [1, batch * n, HV, ...] -> [batch, n, HV, 1, ...]
    gates = compute_gates(A_log[:, None], a[..., None], b, dt_bias[:, None])
    inputs = [x.view(batch, -1, *x.shape[2:]).unsqueeze(3) for x in (*_heads(q, k, v), *gates)]
    before = initial_state_source[initial_state_indices[:batch].long()].float()
    drafted, outputs = DraftStates(before, retrieve_parent_token), list[torch.Tensor]()
    for number in range(inputs[0].shape[1]):
        output, state = delta_rule(drafted.before_next(), *(x[:, number] for x in inputs))
        drafted.add(state)
        outputs.append(output[:, :, 0])
    drafted.write(intermediate_states_buffer, intermediate_state_indices)
    return torch.stack(outputs, dim=1).flatten(0, 1)[None].to(v.dtype)


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries of length ``1 / sqrt(K)``, keys of length one, in float32, for each head of the values ``v``.

    ``[..., H, K]`` to ``[..., HV, K]``; ``v``, ``[..., HV, V]``, is as it was.
    """
    repeats = v.shape[-2] // k.shape[-2]
    q, k, v = q.float(), k.float(), v.float()
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(repeats, dim=-2) for x in (q * q.shape[-1] ** -0.5, k))
    return q, k, v


def compute_gates(
    log_rate: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of each token's decay, and what part of its value is learned: float32 ``[1, T, HV]``.

    ``a`` and ``b`` are ``[T, HV]``, ``log_rate`` (``A_log``) and ``dt_bias`` ``[HV]``. A decay of each
    channel is ``[1, T, HV, K]``: then ``a`` is ``[T, HV, K]``, ``log_rate`` ``[HV, 1]``, and ``dt_bias``
    ``[HV, K]``.
    """
    log_decay = -log_rate.float().exp() * F.softplus(a.float() + dt_bias.float())
    return log_decay[None], b.float().sigmoid()[None]


def split_projections(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, ...]:
    """Sort what two projections have by key head, each with its value heads, into kinds.

    Args:
        mixed_qkvz: ``[T, H * (K + K + HV / H * (V + V))]``: a query, a key, values, gates of outputs.
        mixed_ba: ``[T, H * 2 * HV / H]``: as many ``b`` as ``a``.

    Returns:
        All queries, keys and values, ``[T, 2 * H * K + HV * V]``; gates ``[T, HV, V]``; ``b`` and ``a``,
        ``[T, HV]``.
    """
    num_tokens, values = len(mixed_qkvz), num_heads_v // num_heads_qk * head_v
    # [T, H, ...]
    of_keys = mixed_qkvz.view(num_tokens, num_heads_qk, -1)
    q, k, v, z = torch.split(of_keys, [head_qk, head_qk, values, values], dim=2)
    b, a = mixed_ba.view(num_tokens, num_heads_qk, 2, -1).unbind(2)
    mixed_qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    return mixed_qkv, z.reshape(num_tokens, num_heads_v, head_v), b.flatten(1), a.flatten(1)


def normalize_gated(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    activation: str,
    eps: float,
    **options: Any,
) -> torch.Tensor:
    """RMS norm of each row of ``x``, multiplied with the gates ``g``: ``[..., V]`` each."""
    assert activation in ("silu", "swish", "sigmoid"), activation
    gate = g.float().sigmoid() if activation == "sigmoid" else F.silu(g.float())
    return (F.rms_norm(x.float(), weight.shape, weight.float(), eps) * gate).to(x.dtype)


def add_shared_expert(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Add ``shared_output``, of the expert that all tokens have, to ``final_hidden_states``: ``[T, hidden]``.

    ``gate_weight`` is ``[hidden]``.
    """
    final_hidden_states += (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output


def snapshot_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy the states of those requests that the mask, bool ``[batch]``, has, to other slots, in place.

    States are ``[slots, ...]`` of one layer, or ``[layers, slots, ...]`` of all.
    """
    rows = mamba_track_mask[:batch_size].nonzero()[:, 0]
    sources, targets = cache_indices[rows].long(), mamba_track_indices[rows].long()
    for states, num_dims in ((conv_states, 3), (ssm_states, 4)):
        of_layers = states if states.dim() > num_dims else states[None]
        of_layers[:, targets] = of_layers[:, sources]


def commit_drafts(
    mamba_caches: Any,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: None = None,
) -> None:
    """Write the states after the last accepted tokens to their requests' slots, in all layers; others to the
    slots ``mamba_track_indices``, after the tokens ``mamba_steps_to_track``.

    All are ``[batch]``; nothing is written where one of them is negative. ``mamba_caches`` has the slots
    (``[layers, slots, ...]``) and, by request of the batch, what ``verify_drafts`` and ``convolve_drafts``
    have written.
    """
    assert src_indices_raw is None
    pairs = [
        (mamba_caches.temporal, mamba_caches.intermediate_ssm),
        *zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True),
    ]
    for slots, steps in (
        (state_indices_tensor, last_correct_step_indices),
        (mamba_track_indices, mamba_steps_to_track),
    ):
        if slots is None or steps is None:
            continue
        rows = ((slots >= 0) & (steps >= 0)).nonzero()[:, 0]
        for states, after_drafts in pairs:
            states[:, slots[rows].long()] = after_drafts[:, rows, steps[rows].long()]
