"""The engine's own forward over tokens of one request: what SGLang is given, and that its batch stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from krul_sglang.adapter.engine_prefill import EnginePrefill

ROWS, MAX_TOKENS = (3, 0, 2), 40
"""Rows of the batch's requests in SGLang's request pool. Request ``i`` has token ids from ``1000 i`` on."""
REQ_TO_TOKEN = torch.stack([torch.randperm(400)[:MAX_TOKENS] for _ in range(4)]).to(torch.int32)


class Capture:
    """Tells whether a forward would be recorded."""

    def __init__(self) -> None:
        self.is_suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self.is_suspended = True
        yield
        self.is_suspended = False


class Rig:
    """A model runner that remembers the batches that it runs, and a mixed batch that wants logprobs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capture: Any = Capture()
        self.given: list[Any] = []
        self.ran: list[tuple[Any, bool]] = []
        self.capture_modes: list[CaptureHiddenMode] = []
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=REQ_TO_TOKEN),
            forward=lambda batch: self.ran.append((batch, self.capture.is_suspended)),
        )
        monkeypatch.setattr(ForwardBatch, "init_new", self._init_new)
        self.prefill = EnginePrefill(runner, self.capture)
        reqs: list[Any] = [
            SimpleNamespace(
                rid=str(i),
                full_untruncated_fill_ids=list(range(1000 * i, 1000 * i + 35)),
                multimodal_inputs=f"images of {i}",
            )
            for i in range(3)
        ]
        info: Any = SimpleNamespace(has_watermark_candidates=True, grammars=["a grammar"])
        self.batch = ScheduleBatch(
            reqs=reqs,
            device="cpu",
            forward_mode=ForwardMode.MIXED,
            decoding_reqs=reqs[2:],
            input_ids=torch.arange(21),
            req_pool_indices=torch.tensor(ROWS),
            req_pool_indices_cpu=torch.tensor(ROWS),
            prefix_lens=[25, 10, 34],
            extend_lens=[10, 10, 1],
            extend_num_tokens=21,
            extend_logprob_start_lens=[0, 0, 0],
            extend_input_logprob_token_ids=torch.arange(21),
            seq_lens=torch.tensor([35, 20, 35]),
            seq_lens_cpu=torch.tensor([35, 20, 35]),
            seq_lens_sum=90,
            orig_seq_lens=torch.tensor([35, 36, 37], dtype=torch.int32),
            out_cache_loc=torch.arange(21),
            return_logprob=True,
            top_logprobs_nums=[1, 2, 3],
            token_ids_logprobs=[[1], [2], [3]],
            has_grammar=True,
            sampling_info=info,
            input_embeds=torch.zeros(21, 2),
            global_num_tokens=[21],
            global_num_tokens_for_logprob=[21],
            tbo_split_seq_index=1,
            spec_info=SimpleNamespace(positions=torch.arange(21)),
        )

    def _init_new(self, batch: Any, runner: Any, *, capture_hidden_mode: Any, **kwargs: Any) -> Any:
        self.given.append(batch)
        self.capture_modes.append(capture_hidden_mode)
        return batch


def test_sglang_is_asked_to_prefill_these_tokens_of_this_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.prefill.run(rig.batch, 1, 4, 10)
    (part,) = rig.given
    assert [req.rid for req in part.reqs] == ["1"]
    assert part.multimodal_inputs == ["images of 1"]
    assert part.forward_mode == ForwardMode.EXTEND
    assert part.input_ids.tolist() == list(range(1004, 1010))
    assert part.out_cache_loc.tolist() == REQ_TO_TOKEN[ROWS[1], 4:10].tolist()
    assert part.out_cache_loc.dtype == torch.int64
    assert (part.req_pool_indices.tolist(), part.req_pool_indices_cpu.tolist()) == ([0], [0])
    assert (part.prefix_lens, part.extend_lens, part.extend_num_tokens) == ([4], [6], 6)
    assert (part.seq_lens.tolist(), part.seq_lens_cpu.tolist(), part.seq_lens_sum) == ([10], [10], 10)
    assert (part.orig_seq_lens.tolist(), part.global_num_tokens) == ([36], [6])
    # Nothing of what the other requests, or its own answer, would want of this forward.
    assert (part.return_logprob, part.has_grammar, part.decoding_reqs) == (False, False, None)
    assert (part.input_embeds, part.tbo_split_seq_index, part.spec_info) == (None, None, None)
    assert not part.sampling_info.has_watermark_candidates
    assert rig.capture_modes == [CaptureHiddenMode.NULL]


def test_ranks_that_measure_together_compute_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.batch.global_num_tokens = rig.batch.global_num_tokens_for_logprob = [21, 21]
    rig.prefill.run(rig.batch, 1, 4, 10)
    (part,) = rig.given
    assert (part.global_num_tokens, part.global_num_tokens_for_logprob) == ([6, 6], [1, 1])


def test_the_forward_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.prefill.run(rig.batch, 0, 0, 3)
    assert rig.ran == [(rig.given[0], True)]
    assert not rig.capture.is_suspended


def test_the_batch_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    before, info = copy(rig.batch), vars(rig.batch.sampling_info).copy()
    rig.prefill.run(rig.batch, 2, 0, 34)
    for field in fields(ScheduleBatch):
        assert getattr(rig.batch, field.name) is getattr(before, field.name), field.name
    assert vars(rig.batch.sampling_info) == info


def test_all_that_is_set_is_known_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that SGLang renames would keep the value of the whole batch."""
    rig = Rig(monkeypatch)
    rig.prefill.run(rig.batch, 0, 0, 3)
    assert vars(rig.given[0]).keys() <= {field.name for field in fields(ScheduleBatch)}
