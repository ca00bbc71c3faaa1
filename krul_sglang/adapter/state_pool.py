"""Opens SGLang's pool of recurrent states, or of windows, for krul, or says why it cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from krul_sglang.adapter.kv_pool import open_pool
from krul_sglang.adapter.unsupported import FOREIGN_STATE, STATE_SESSIONS, TREES_AS_CHAINS
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel

_KNOWN_PARTS = {"conv", "temporal", "intermediate_ssm", "intermediate_conv_window"}
"""Of SGLang's pool of states. Those that are intermediate follow drafted tokens, and are of no boundary."""


def has_states(runner: Any) -> bool:
    """Whether the model of SGLang's model runner ``runner`` has recurrent layers, or a pool of windows."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    return isinstance(runner.req_to_token_pool, HybridReqToTokenPool) or runner.is_hybrid_swa


def open_states(
    runner: Any, target: ServedModel, settings: Mapping[str, Any], agreement: RankAgreement
) -> BoundaryStates | None:
    """The states of the recurrent layers of SGLang's model runner ``runner``, or its layers' windows; None if
    it has neither.

    ``settings`` are the resolved server arguments. ``agreement`` joins the ranks that share the states.

    Raises:
        UnsupportedSetupError: for states, or settings, that krul cannot serve.
    """
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

    if not has_states(runner):
        return None
    if settings["enable_streaming_session"]:
        raise STATE_SESSIONS.error("enable_streaming_session = True")
    algorithm, of_requests = settings["speculative_algorithm"], runner.req_to_token_pool
    make = partial(BoundaryStates, rank=agreement.rank, num_ranks=agreement.num_ranks)
    if runner.is_hybrid_swa:
        if isinstance(of_requests, HybridReqToTokenPool):
            raise FOREIGN_STATE.error("with a pool of windows")
        windows = open_pool(runner.token_to_kv_pool.swa_kv_pool)
        num_pages = -(-runner.sliding_window_size // target.identity.page_size)
        return make(windows, f"windows of {windows.format}", target, window_pages=num_pages)
    of_states = of_requests.mamba_pool
    if type(of_requests) is not HybridReqToTokenPool or type(of_states) is not MambaPool:
        raise FOREIGN_STATE.error(f"{type(of_requests).__name__} with {type(of_states).__name__}")
    cache = of_states.mamba_cache
    others = {name for name, value in vars(cache).items() if value is not None} - _KNOWN_PARTS
    if type(cache) not in (MambaPool.State, MambaPool.SpeculativeState) or others or of_states._slot_siblings:
        raise FOREIGN_STATE.error(f"{type(cache).__name__} with more than convolutions and one recurrence")
    # [layers, slots, ...]; models with convolutions alone have an empty second part.
    parts = [part for part in (*cache.conv, cache.temporal) if part.numel()]
    # Of NGRAM this is its breadth.
    num_branches = settings["speculative_eagle_topk"] or 1
    are_trees = bool(algorithm) and (algorithm.upper() == "NGRAM" or num_branches > 1)
    if are_trees and not (num_branches > 1 and cache.temporal.numel()):
        raise TREES_AS_CHAINS.error(f"{algorithm} of {num_branches} branches, {len(parts)} parts per layer")
    if len(parts) not in (1, 2) or not all(part.is_contiguous() for part in parts):
        raise FOREIGN_STATE.error(f"{len(parts)} parts per layer")
    layout = " ".join(f"{part.dtype}{list(part.shape[2:])}" for part in parts)
    rows = [[_rows(layer) for layer in part] for part in parts]
    if len(rows) == 1:
        half = rows[0][0].shape[-1] // 2
        rows = [[row[..., :half] for row in rows[0]], [row[..., half:] for row in rows[0]]]
    first, second = rows
    states = DevicePool(first, second, num_tokens=of_states.size, write=_refuse, scales=_no_scales)
    return make(states, layout, target)


def _rows(layer: torch.Tensor) -> torch.Tensor:
    """The states of a layer, ``[slots, ...]``, as bytes: ``[slots, 1, bytes]``."""
    return layer.flatten(1).view(torch.uint8)[:, None]


def _refuse(layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    raise AssertionError("states are not computed from keys and values")


def _no_scales(layer: int) -> tuple[float, float]:
    return 1.0, 1.0
