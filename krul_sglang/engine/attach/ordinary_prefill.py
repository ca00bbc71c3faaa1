"""Runs an ordinary prefill of the engine outside of any request, for checks and measurements at start."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.device import Device


@dataclass(frozen=True, eq=False)
class Prefilled:
    """Tokens whose KV the engine has just computed in ``slots``, int64 ``[num_tokens]`` on the device."""

    token_ids: torch.Tensor
    slots: torch.Tensor
    seconds: float


@contextmanager
def ordinary_prefill(model_runner: Any, tree_cache: Any, token_ids: Sequence[int]) -> Iterator[Prefilled]:
    """Run ``token_ids`` through the engine's own forward; their slots are freed when the block is left.

    Every rank calls it at the same point, while nothing else runs.
    """
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    req = Req(
        rid="krul-start",
        origin_input_text="",
        origin_input_ids=array("q", token_ids),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.extend_end = len(req.origin_input_ids)
    batch = ScheduleBatch.init_new(
        reqs=[req],
        req_to_token_pool=model_runner.req_to_token_pool,
        token_to_kv_pool_allocator=model_runner.token_to_kv_pool_allocator,
        tree_cache=tree_cache,
        model_config=model_runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    row = model_runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    slots = row[: len(token_ids)].long()
    try:
        with torch.no_grad():
            seconds = timed(Device.of(row), lambda: _forward(model_runner, ForwardBatch, batch))
        yield Prefilled(batch.input_ids, slots, seconds)
    finally:
        model_runner.token_to_kv_pool_allocator.free(batch.out_cache_loc)
        model_runner.req_to_token_pool.free(req)


def _forward(model_runner: Any, forward_batch_class: Any, batch: Any) -> None:
    forward_batch = forward_batch_class.init_new(batch, model_runner, return_hidden_states_before_norm=False)
    model_runner.forward(forward_batch)


def timed(device: Device, work: Callable[[], object]) -> float:
    """Seconds that ``work()`` takes, until its last operation has ended on the device."""
    device.synchronize()
    start_s = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start_s
