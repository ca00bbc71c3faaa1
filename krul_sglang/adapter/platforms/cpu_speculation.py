"""Torch versions of the kernels that speculation needs, for servers without an accelerator.

SGLang's own for CPUs are in ``sgl_kernel``, which needs CUDA's libraries. The functions here have their
contracts: what is written, and in which order.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from krul_sglang.adapter.platforms.cpu_attention import DraftSteps

ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3")
"""As SGLang names them: those that were made to run on a CPU."""

_NONE = -1
"""Where a node of a tree has no child, or no further sibling."""


def install() -> None:
    """Have SGLang take these functions where it would take those of ``sgl_kernel``.

    Called in the scheduler's process before the worker that drafts, and the KV pool, are made.
    """
    # Its own module imports sgl_kernel when it is imported.
    tree_module = ModuleType("sglang.kernels.ops.speculative.reconstruct_tree")
    tree_module.__dict__["reconstruct_indices_from_tree_mask_func"] = reconstruct_tree
    sys.modules[tree_module.__name__] = tree_module

    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache import allocation, memory_pool
    from sglang.srt.speculative import (
        draft_utils,
        eagle_utils,
        eagle_worker_common,
        eagle_worker_v2,
        ngram_worker,
    )

    replaced = {
        cache_locs: {
            "assign_draft_cache_locs_contiguous_cpu": read_draft_slots,
            "assign_extend_cache_locs_cpu": read_slots,
        },
        eagle: {
            "fill_accept_out_cache_loc_cpu": read_accepted_slots,
            "fill_bonus_tokens_cpu": read_bonus_tokens,
        },
        spec_tree: {
            "sgl_build_tree_kernel_efficient_cpu": build_tree,
            "sgl_verify_tree_greedy_cpu": verify_tree_greedy,
        },
        allocation: {
            "assign_req_to_token_pool_cpu": write_slots,
            "get_last_loc_triton": allocation.get_last_loc_torch,
        },
        # They sample as on a CPU, hand on masks of the drafted tokens alone, and capture no graphs.
        eagle_utils: {},
        eagle_worker_common: {},
        eagle_worker_v2: {},
        ngram_worker: {},
    }
    for module, functions in replaced.items():
        module.__dict__.update(functions, _is_cpu=True)
    # Rows of the pool are moved by indexing, so there is no kernel to warm up.
    envs.SGLANG_NATIVE_MOVE_KV_CACHE.set(True)
    memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup = lambda pool: None
    # A draft model's prompts and accepted tokens are extended by the attention that it has anyway.
    factory = draft_utils.DraftBackendFactory
    factory.create_draft_extend_backend = lambda self: None
    factory.create_decode_backend = _make_draft_steps


def _make_draft_steps(factory: Any) -> DraftSteps | None:
    """The attention of a draft model's steps; None if there are none but the one of the tokens before."""
    num_steps = factory.speculative_num_steps - 1
    return DraftSteps(factory.draft_model_runner, num_steps, factory.topk) if num_steps > 0 else None


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Write how drafted tokens hang together, by which candidates of a draft model were selected.

    Args:
        parent_list: ``[batch, m]``: of group ``g`` of ``topk`` candidates, the candidate that it follows.
        top_scores_index: ``[batch, n - 1]``: the selected candidates, ascending; those of group 0 follow the
            root, which is node 0.
        tree_mask: bool ``[batch * n * n]``, written: whether node ``i`` of a request sees node ``j``.

    The others are as for ``reconstruct_tree``; ``n`` is ``num_verify_tokens``.
    """
    trees = tree_mask.view(-1, num_verify_tokens, num_verify_tokens)
    trees.copy_(torch.eye(num_verify_tokens, dtype=torch.bool))
    of_requests = (parent_list.tolist(), top_scores_index.tolist())
    for tree, parents, selected in zip(trees, *of_requests, strict=True):
        tree[:, 0] = True
        for node, candidate in enumerate(selected, start=1):
            group = candidate // topk
            if group:
                tree[node] |= tree[selected.index(parents[group]) + 1]
    links = (positions, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    reconstruct_tree(tree_mask, seq_lens, *links, len(trees), num_verify_tokens)


def reconstruct_tree(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Write how the drafted tokens of each request hang together, by which of them each one sees.

    Args:
        tree_mask: bool ``[batch * n * n]``: whether node ``i`` of a request sees node ``j``.
        verified_seq_len: ``[batch]``: tokens before the tree's root.
        positions: int64 ``[batch * n]``, written: of the nodes in their requests.
        retrieve_index: int64 ``[batch, n]``, written: rows of the nodes in the forward.
        retrieve_next_token: int64 ``[batch, n]``, written: the first child of each node, or -1.
        retrieve_next_sibling: int64 ``[batch, n]``, written: the next child of the same parent, or -1.
    """
    nodes = torch.arange(draft_token_num)
    shape = (batch_size, draft_token_num, draft_token_num)
    # [b, i, j]: node j comes before node i on its path.
    is_before = tree_mask.view(shape).bool() & (nodes < nodes[:, None])
    depth = is_before.sum(-1)
    parent = torch.where(is_before, nodes, _NONE).amax(-1)
    same_parent = (parent[:, :, None] == parent[:, None, :]) & (parent >= 0)[:, :, None]
    positions.copy_((depth + verified_seq_len[:, None]).flatten())
    retrieve_index.copy_(torch.arange(batch_size * draft_token_num).view(batch_size, draft_token_num))
    retrieve_next_token.copy_(_first_true(is_before.transpose(1, 2)))
    retrieve_next_sibling.copy_(_first_true(same_parent & (nodes > nodes[:, None])))


def _first_true(flags: torch.Tensor) -> torch.Tensor:
    """The first true place of the last dimension, -1 if there is none."""
    return torch.where(flags.any(-1), flags.int().argmax(-1), _NONE)


def verify_tree_greedy(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept the path of each request's tree that the target itself would have chosen.

    Args:
        predicts: ``[batch * n]``, written: at each accepted row the token that follows it.
        accept_index: ``[batch, depth]``, written: the accepted rows, the root's first. It holds -1 elsewhere.
        accept_token_num: ``[batch]``, written: how many are accepted beside the root.
        candidates: ``[batch, n]``: the drafted tokens; the root is the last token of the request.
        retrive_index, retrive_next_token, retrive_next_sibling: ``[batch, n]``, see ``reconstruct_tree``.
        target_predict: ``[batch, n]``: what the target says after each node.
    """
    wanted = target_predict.flatten().tolist()
    trees = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for request, (tokens, rows, children, siblings) in enumerate(
        zip(*(of_requests.tolist() for of_requests in trees), strict=True)
    ):
        node, accepted = 0, [rows[0]]
        while len(accepted) < accept_index.shape[1]:
            node = children[node]
            while node != _NONE and tokens[node] != wanted[accepted[-1]]:
                node = siblings[node]
            if node == _NONE:
                break
            accepted.append(rows[node])
        accept_index[request, : len(accepted)] = torch.tensor(accepted)
        accept_token_num[request] = len(accepted) - 1
        for row in accepted:
            predicts[row] = wanted[row]


def read_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the slots of tokens ``[start, end)`` of each request to ``out_cache_loc``, one after another.

    ``req_to_token`` ``[requests, pool_len]`` has them; what is left of ``out_cache_loc`` is not touched.
    """
    spans = _spans(req_pool_indices, start_offset, end_offset)
    slots = torch.cat([req_to_token[request, start:end] for request, start, end in spans])
    out_cache_loc[: len(slots)] = slots


def write_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write ``out_cache_loc`` to tokens ``[start, end)`` of each request's row: the reverse of
    ``read_slots``."""
    first = 0
    for request, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[request, start:end] = out_cache_loc[first : first + end - start]
        first += end - start


def _spans(*columns: torch.Tensor) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def read_draft_slots(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Write the slots of the ``topk * num_steps`` tokens behind each request to ``out_cache_loc``."""
    ends = seq_lens + topk * num_steps
    read_slots(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def read_bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Write the last of each request's ``accept_lens`` tokens, which are the first of ``accept_stride``."""
    last = (accept_lens - 1).long()[:, None]
    bonus_tokens.copy_(accept_tokens.view(-1, accept_stride).gather(1, last).flatten())


def read_accepted_slots(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Write the slots of the accepted rows to ``accept_out_cache_loc``, one after another.

    ``accept_index`` has -1 where no row was accepted; what is left of the output is not touched.
    """
    rows = accept_index[accept_index >= 0]
    accept_out_cache_loc[: len(rows)] = out_cache_loc[rows.long()]
