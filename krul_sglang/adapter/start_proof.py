"""Checks on the engine itself at the start: that heads can be recomputed, and that keys can be unrotated."""

from __future__ import annotations

import itertools
import logging
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.codec.layout import LayerKV, as_bytes
from krul_backend.codec.rotary import RotaryTable
from krul_backend.device import Device
from krul_sglang.adapter.engine_prefill import EnginePrefill
from krul_sglang.adapter.head_attention import NoHeadsError
from krul_sglang.adapter.head_recompute import HeadRecompute
from krul_sglang.adapter.watched_layers import LayerOutputs, WatchedLayers
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore import Head, HeadProof

logger = logging.getLogger(__name__)

_NUM_TOKENS = 256
_MAX_ERROR = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest relative error that 99 of 100 rows may have, by the type of the computation. Kernels round
differently, which stays below these; a wrong computation is off by one or more.

In an fp8 pool a small difference may push an element over a step of the format. If all elements did, that
would add the format's eps.
"""

_ROTARY_POSITIONS = 64
_ROTARY_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Prefilled:
    """Tokens whose KV the engine has just computed in ``slots``, int64 ``[num_tokens]`` on the device.

    ``again_s(first)`` computes those from ``first`` on once more, after those before: it returns seconds.
    """

    token_ids: torch.Tensor
    slots: torch.Tensor
    seconds: float
    again_s: Callable[[int], float]


@contextmanager
def ordinary_prefill(model_runner: Any, tree_cache: Any, token_ids: Sequence[int]) -> Iterator[Prefilled]:
    """Run ``token_ids`` through the engine's own forward; their slots are freed when the block is left.

    Every rank calls it at the same point, while nothing else runs.
    """
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.utils.common import require_mlp_tp_gather

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
    if get_parallel().attn_dp_enabled:
        # What ranks tell each other before each forward of the server. Here all have the same prompt.
        num_groups = get_parallel().attn_dp_size if require_mlp_tp_gather() else 1
        batch.global_num_tokens = [len(token_ids)] * num_groups
        batch.global_num_tokens_for_logprob = [1] * num_groups
        batch.is_extend_in_batch = True
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    row = model_runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    slots = row[: len(token_ids)].long()
    try:
        with torch.no_grad():
            seconds = timed(Device.of(row), lambda: _forward(model_runner, ForwardBatch, batch))
        engine, device = EnginePrefill(model_runner, None), Device.of(row)

        def again_s(first: int) -> float:
            return timed(device, lambda: engine.run(batch, 0, first, len(token_ids)))

        yield Prefilled(batch.input_ids, slots, seconds, again_s)
    finally:
        model_runner.token_to_kv_pool_allocator.free(batch.out_cache_loc)
        if req.kv.holds_mamba:
            model_runner.req_to_token_pool.free_mamba_cache(req)
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


def random_token_ids(vocab_size: int, num_tokens: int) -> list[int]:
    """The same random token ids on every rank and at every start."""
    rng = random.Random(0)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def prove_heads(model_runner: Any, tree_cache: Any, pool: DevicePool, heads: HeadRecompute) -> HeadProof:
    """Recompute the head of an ordinary prefill, in one piece and in two, and compare with the prefill.

    Each layer is given the hidden states that it had in the prefill, and both its KV and its output are
    compared. The head is shorter from layer to layer. The result counts the rows of the one piece. Of two
    pieces the second attends to the first in the pool, by another kernel; they are checked but not counted.
    All is run before anything is compared: a rank that stopped earlier would leave the others in a layer's
    collectives.

    Raises:
        NoHeadsError: KV of the head or a layer's output differs, or KV behind the head has changed.
    """
    num_tokens = min(_NUM_TOKENS, pool.num_tokens // 2)
    token_ids = random_token_ids(model_runner.model_config.vocab_size, num_tokens)
    ends = tuple(num_tokens - num_tokens * layer // (2 * pool.num_layers) for layer in range(pool.num_layers))
    layers = WatchedLayers(model_runner, pool.num_layers, num_tokens)
    with ordinary_prefill(model_runner, tree_cache, token_ids) as prefilled:
        with layers.prefill():
            prefilled.again_s(0)
        before = [pool.elements(layer, prefilled.slots, torch.float32) for layer in range(pool.num_layers)]
        recomputed = []
        for cuts in ((0, num_tokens), (0, num_tokens // 3, num_tokens)):
            _clear(pool, prefilled, ends)
            head = Head(prefilled.token_ids, prefilled.slots, 0, ends)
            with heads.through(layers), layers.replay() as outputs:
                for first, end in itertools.pairwise(cuts):
                    part = head.part(first, end)
                    assert part is not None, (first, end, ends)
                    heads.run([part])
            after = [pool.elements(layer, prefilled.slots, torch.float32) for layer in range(pool.num_layers)]
            recomputed.append((after, outputs))
    proofs = [
        _compare(before, after, ends, outputs, pool.shape.dtype, model_runner.dtype)
        for after, outputs in recomputed
    ]
    return proofs[0]


def largest_error(element_type: torch.dtype, compute_type: torch.dtype) -> float:
    """The largest relative error of a row with which a recomputed head passes."""
    if element_type in _MAX_ERROR:
        return _MAX_ERROR[element_type]
    return _MAX_ERROR[compute_type] + torch.finfo(element_type).eps


def _compare(
    before: Sequence[LayerKV],
    after: Sequence[LayerKV],
    ends: Sequence[int],
    outputs: LayerOutputs,
    element_type: torch.dtype,
    compute_type: torch.dtype,
) -> HeadProof:
    """Compare all layers; ``before`` and ``after`` are the pool's elements in fp32."""
    allowed = largest_error(element_type, compute_type)
    rows = close_rows = 0
    max_error = 0.0
    for layer, end in enumerate(ends):
        for name, old, new in (
            ("K", before[layer].k, after[layer].k),
            ("V", before[layer].v, after[layer].v),
        ):
            error = _relative_error(new[:end], old[:end])
            if not error <= allowed or not torch.equal(new[end:], old[end:]):
                raise NoHeadsError(
                    f"they are not what a prefill computes: {name} of layer {layer} differs by {error:.3g}, "
                    f"or was written behind the head's end"
                )
            is_close = _is_within_one_ulp(new[:end], old[:end], element_type)
            rows += is_close.numel()
            close_rows += int(is_close.sum())
            max_error = max(max_error, error)
    return HeadProof(rows, close_rows, max_error, *outputs.compare(_MAX_ERROR[compute_type]))


def _clear(pool: DevicePool, prefilled: Prefilled, ends: Sequence[int]) -> None:
    for layer, end in enumerate(ends):
        for buffer in pool.buffers(layer):
            as_bytes(buffer).index_fill_(0, prefilled.slots[:end], 0)


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The 99th percentile of the errors of rows ``[H, D]``: rare ties of a rounding do not count."""
    difference = (actual - expected).flatten(1).norm(dim=1)
    size = expected.flatten(1).norm(dim=1).clamp_min(1e-6)
    return float((difference / size).quantile(0.99))


def _is_within_one_ulp(
    actual: torch.Tensor, expected: torch.Tensor, element_type: torch.dtype
) -> torch.Tensor:
    """``[n, H]`` of rows ``[n, H, D]``: no element is off by more than one unit in the row's last place.

    That unit is the spacing of ``element_type`` at the row's largest element: smaller elements are
    differences of larger numbers, and have their rounding errors.
    """
    largest = expected.abs().amax(-1)
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp_min(1e-30)))) * torch.finfo(element_type).eps
    return (actual - expected).abs().amax(-1) <= unit


def read_rotary_table(model: Any, layer_ids: Sequence[int]) -> RotaryTable | None:
    """The table of cosines and sines with which ``model`` rotates the keys of these layers; None if it cannot
    be undone.

    The table is tried first: it must turn back vectors that the model's own module has rotated in float32.
    None also for a model without rotary embedding, or with more than one table. Where images have positions
    of their own, it is that of text before the first one.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = {
        id(owner.rotary_emb): owner.rotary_emb
        for owner in model.modules()
        if isinstance(getattr(owner, "rotary_emb", None), torch.nn.Module)
        and all(
            child.layer_id in layer_ids for child in owner.children() if isinstance(child, RadixAttention)
        )
    }
    if len(modules) != 1:
        if modules:
            logger.warning("krul: keys keep their rotary embedding: the model has %d of them", len(modules))
        return None
    module = next(iter(modules.values()))
    table = None
    if isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor):
        cos, sin = module.cos_sin_cache.float().chunk(2, dim=-1)
        table = RotaryTable(cos, sin, is_neox=module.is_neox_style)
    if table is None or not _undoes(table, module):
        logger.warning("krul: keys keep their rotary embedding: %s cannot be undone", type(module).__name__)
        return None
    return table


def _undoes(table: RotaryTable, module: Any) -> bool:
    """Whether the table undoes what the module does, up to float32 rounding."""
    num_positions = min(_ROTARY_POSITIONS, table.cos.shape[0])
    positions = torch.linspace(0, len(table.cos) - 1, num_positions, device=table.cos.device).long()
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(num_positions, 1, module.head_size, generator=generator).to(positions.device)
    _, rotated = module.forward_native(positions, key, key)
    restored = table.unrotate(rotated.view_as(key), positions)
    return bool((restored - key).abs().max() < _ROTARY_TOLERANCE)
