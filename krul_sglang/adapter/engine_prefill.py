"""Computes a prefix again with the engine's own forward: whatever a model's layers are, it can do that."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch

from krul_backend.device import Device
from krul_sglang.engine.capture import QueryCapture, unrecorded

_OF_STATES = (
    *("mamba_track_indices", "mamba_track_buffer_indices", "mamba_track_mask", "mamba_track_seqlens"),
    *("mamba_track_seqlens_cpu", "mamba_prefill_track_mask_cpu", "mamba_track_mask_cpu"),
    *("mamba_cow_src_indices", "mamba_cow_dst_indices", "mamba_clear_indices"),
)
"""What SGLang's batch says of states that its own forward is to copy, clear or keep."""


class EnginePrefill:
    """Writes tokens of a request anew into the slots that the request has for them.

    Each run is an ordinary extend forward of that one request; nothing is sampled from it, and attention is
    not recorded, since the request's own forward records it.
    """

    def __init__(self, model_runner: Any, capture: QueryCapture | None) -> None:
        self._runner = model_runner
        self._capture = capture

    @torch.no_grad()
    def run(self, schedule_batch: Any, index: int, first: int, end: int) -> None:
        """Compute tokens ``[first, end)`` of request ``index`` of SGLang's batch, which is left as it is.

        ::

            [0, first)      in the pool: attended to, not touched
            [first, end)    computed in every layer and written to its slots
            [end, ...)      not touched

        A state of recurrent layers goes on in the request's slot from what it is after ``first`` tokens.
        On every tensor-parallel rank with the same numbers. No load may write to these slots any more.
        """
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

        with unrecorded(self._capture):
            forward_batch = ForwardBatch.init_new(
                self._part_of(schedule_batch, index, first, end),
                self._runner,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                return_hidden_states_before_norm=False,
            )
            self._runner.forward(forward_batch)

    def _part_of(self, schedule_batch: Any, index: int, first: int, end: int) -> Any:
        """SGLang's batch as it would be if it had to prefill these tokens of this request, and no more."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        req, num_tokens = schedule_batch.reqs[index], end - first
        row = self._runner.req_to_token_pool.req_to_token[int(schedule_batch.req_pool_indices_cpu[index])]
        device = Device.of(row)
        part = copy(schedule_batch)
        part.forward_mode = ForwardMode.EXTEND
        part.reqs = [req]
        part.decoding_reqs = None
        part.beam_tail = part.spec_info = None
        part.req_pool_indices = schedule_batch.req_pool_indices[index : index + 1]
        part.req_pool_indices_cpu = schedule_batch.req_pool_indices_cpu[index : index + 1]
        part.input_ids = device.from_list(list(req.full_untruncated_fill_ids[first:end]))
        part.prefill_input_ids_cpu = None
        part.input_embeds = part.replace_embeds = part.replace_positions = None
        part.multimodal_inputs = [req.multimodal_inputs]
        for name in _OF_STATES:
            setattr(part, name, None)
        part.out_cache_loc = row[first:end].long()
        part.prefix_lens, part.extend_lens, part.extend_num_tokens = [first], [num_tokens], num_tokens
        part.seq_lens = device.from_list([end])
        part.seq_lens_cpu = torch.tensor([end])
        part.seq_lens_sum = end
        part.orig_seq_lens = schedule_batch.orig_seq_lens[index : index + 1]
        # Logits are computed for the last token alone, and nobody looks at them.
        part.return_logprob = False
        part.top_logprobs_nums = part.token_ids_logprobs = part.extend_input_logprob_token_ids = None
        part.extend_logprob_start_lens = [num_tokens]
        part.is_prefill_only = True
        part.has_grammar = False
        # A copy, since SGLang sets its grammars anew; a watermark asks for rows of all requests.
        part.sampling_info = copy(schedule_batch.sampling_info)
        part.sampling_info.has_watermark_candidates = False
        part.tbo_split_seq_index = None
        if schedule_batch.global_num_tokens is not None:
            # With DP attention it is only called while all ranks measure the same.
            num_groups = len(schedule_batch.global_num_tokens)
            part.global_num_tokens = [num_tokens] * num_groups
            part.global_num_tokens_for_logprob = [1] * num_groups
        return part
