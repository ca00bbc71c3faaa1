"""What FlashInfer is handed, against a stand-in that is strict about it and computes plainly."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from krul_backend.device import Device
from krul_sglang.adapter import head_attention
from krul_sglang.adapter.head_attention import PagedAttention, span_attention, trial_error
from krul_sglang.engine.common.span_attention import GatheredAttention, Span
from tests.support.head_attention_case import HEAD_DIM, NUM_SLOTS, SCALING, Case, reference

CPU = Device(torch.device("cpu"))


class FakeWrapper:
    """FlashInfer's wrapper, as far as heads use it.

    ``made`` are all of a class, ``log`` is what happened to them in order.
    """

    made: list[FakeWrapper]
    log: list[str]

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        inspect.signature(BatchPrefillWithPagedKVCacheWrapper.__init__).bind(
            self, workspace, kv_layout, **options
        )
        assert workspace.dtype is torch.uint8
        assert kv_layout == "NHD"
        self.workspace = workspace
        self.number = len(self.made)
        self.made.append(self)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan).bind(self, *args, **kwargs)
        bound.apply_defaults()
        plan = SimpleNamespace(**bound.arguments)
        q_ends, kv_ends = plan.qo_indptr, plan.paged_kv_indptr
        for ends in (q_ends, kv_ends, plan.paged_kv_last_page_len, plan.paged_kv_indices):
            assert ends.dtype is torch.int32
        assert len(q_ends) == len(kv_ends) == len(plan.paged_kv_last_page_len) + 1
        assert q_ends[0] == kv_ends[0] == 0
        assert plan.paged_kv_last_page_len.tolist() == [1] * (len(q_ends) - 1)
        assert len(plan.paged_kv_indices) >= kv_ends[-1] + 256
        assert plan.page_size == 1
        assert plan.causal
        # Without memory for partial results there must be none.
        assert plan.disable_split_kv
        self.log.append(f"plan {self.number}")
        self.of = plan

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], **options: Any
    ) -> torch.Tensor:
        inspect.signature(BatchPrefillWithPagedKVCacheWrapper.run).bind(self, q, paged_kv_cache, **options)
        self.log.append(f"run {self.number}")
        plan = self.of
        k_pages, v_pages = paged_kv_cache
        assert q.is_contiguous()
        assert q.shape == (plan.qo_indptr[-1], plan.num_qo_heads, plan.head_dim_qk)
        assert k_pages.shape[1:] == (1, plan.num_kv_heads, plan.head_dim_qk)
        assert v_pages.shape[1:] == (1, plan.num_kv_heads, plan.head_dim_vo)
        assert (q.dtype, k_pages.dtype, v_pages.dtype) == (plan.q_data_type, *[plan.kv_data_type] * 2)
        k_scale, v_scale = (options[name] or 1.0 for name in ("k_scale", "v_scale"))
        outputs = []
        for request in range(len(plan.qo_indptr) - 1):
            rows = slice(*plan.qo_indptr[request : request + 2].tolist())
            slots = plan.paged_kv_indices[slice(*plan.paged_kv_indptr[request : request + 2].tolist())].long()
            k, v = k_pages[slots, 0].float() * k_scale, v_pages[slots, 0].float() * v_scale
            output = reference(q[rows], k, v, plan.sm_scale)
            outputs.append(output.view(-1, plan.num_qo_heads, plan.head_dim_vo))
        return torch.cat(outputs).to(q.dtype)


@pytest.fixture
def wrapper_class() -> type[FakeWrapper]:
    return type("Wrapper", (FakeWrapper,), {"made": [], "log": []})


SPANS = [[(0, 5)], [(7, 5)], [(0, 6), (5, 3), (0, 1), (11, 9)]]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("value_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_several_requests_are_attended_to_in_one_call(
    spans: list[tuple[int, int]], value_dim: int, wrapper_class: type[FakeWrapper]
) -> None:
    case = Case(spans, 6, 2, torch.float16, value_dim=value_dim)
    expected = case.expected()
    output = case.run(PagedAttention(CPU, wrapper_class))
    torch.testing.assert_close(output.double(), expected, rtol=4e-3, atol=4e-3)
    assert [entry.split()[0] for entry in wrapper_class.log] == ["plan", "run"]


def test_layers_of_equal_spans_share_a_plan(wrapper_class: type[FakeWrapper]) -> None:
    case = Case([(3, 5), (0, 2)])
    attention = PagedAttention(CPU, wrapper_class)
    attention.plan(case.spans)
    for layer in (0, 1, 0):
        attention.attend(case.q, *case.pool.buffers(layer), case.layer)
    assert wrapper_class.log == ["plan 1", "run 1", "run 1", "run 1"]
    attention.plan(case.spans[:1])
    output = attention.attend(case.q[:5], *case.pool.buffers(1), case.layer)
    assert wrapper_class.log[4:] == ["plan 0", "run 0"]
    k_buffer, v_buffer = case.pool.buffers(1)
    slots = case.spans[0].slots
    expected = reference(case.q[:5], k_buffer[slots], v_buffer[slots])
    torch.testing.assert_close(output.flatten(1).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_layer_of_another_scale_gets_a_plan_of_its_own(wrapper_class: type[FakeWrapper]) -> None:
    case = Case([(3, 5)])
    attention = PagedAttention(CPU, wrapper_class)
    attention.plan(case.spans)
    attention.attend(case.q, *case.pool.buffers(1), case.layer)
    case.layer.scaling = 2 * SCALING
    output = attention.attend(case.q, *case.pool.buffers(1), case.layer)
    k_buffer, v_buffer = case.pool.buffers(1)
    slots = case.spans[0].slots
    expected = reference(case.q, k_buffer[slots], v_buffer[slots], 2 * SCALING)
    torch.testing.assert_close(output.flatten(1).double(), expected, rtol=1e-5, atol=1e-5)


class LoggingDevice(Device):
    """Tells when an event was recorded and waited for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.log = log
        self.num_events = 0

    def record(self, stream: Any | None = None) -> Any:
        number, self.num_events = self.num_events, self.num_events + 1
        self.log.append(f"event {number}")
        return SimpleNamespace(synchronize=lambda: self.log.append(f"waited for {number}"))


def test_a_plan_is_on_the_device_before_its_staging_is_used_again(wrapper_class: type[FakeWrapper]) -> None:
    """FlashInfer copies a plan from page-locked memory on the stream, and does not wait for the copy."""
    log = wrapper_class.log
    case = Case([(3, 5)])
    attention = PagedAttention(LoggingDevice(log), wrapper_class)
    for _ in range(4):
        attention.plan(case.spans)
        attention.attend(case.q, *case.pool.buffers(1), case.layer)
    turns = [["plan 1", "event 0"], ["plan 0", "event 1"], ["waited for 0", "plan 1", "event 2"]]
    turns.append(["waited for 1", "plan 0", "event 3"])
    runs = ["run 1", "run 0", "run 1", "run 0"]
    assert log == [entry for turn, run in zip(turns, runs, strict=True) for entry in (*turn, run)]


def test_a_quantized_pool_is_read_with_the_scales_of_the_layer(wrapper_class: type[FakeWrapper]) -> None:
    case = Case([(3, 5)], dtype=torch.bfloat16)
    slots = case.spans[0].slots
    buffers = [(buffer.float() / 4).to(torch.float8_e4m3fn) for buffer in case.pool.buffers(1)]
    case.layer.k_scale_float, case.layer.v_scale_float = 4.0, 2.0
    attention = PagedAttention(CPU, wrapper_class)
    attention.plan(case.spans)
    output = attention.attend(case.q, buffers[0], buffers[1], case.layer)
    k, v = 4 * buffers[0].float()[slots], 2 * buffers[1].float()[slots]
    torch.testing.assert_close(output.flatten(1).double(), reference(case.q, k, v), rtol=3e-2, atol=3e-2)
    # In the model's own type there is nothing to scale.
    output = attention.attend(case.q, *case.pool.buffers(1), case.layer)
    k_buffer, v_buffer = case.pool.buffers(1)
    expected = reference(case.q, k_buffer[slots], v_buffer[slots])
    torch.testing.assert_close(output.flatten(1).double(), expected, rtol=3e-2, atol=3e-2)


# ---- which of the two ----


class WrongWrapper(FakeWrapper):
    """Sees one token too few."""

    def run(self, q: torch.Tensor, paged_kv_cache: Any, **options: Any) -> torch.Tensor:
        return super().run(q, tuple(pages.roll(1, 0) for pages in paged_kv_cache), **options)


class FailingWrapper(FakeWrapper):
    def plan(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("nvcc not found")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool seems to lie on a device with streams of its own."""
    device = Device(torch.device("cpu"))
    device.shares_cores = False
    device.host_empty = lambda shape, dtype: torch.empty(shape, dtype=dtype)  # type: ignore[method-assign]
    device.record = lambda stream=None: SimpleNamespace(synchronize=lambda: None)  # type: ignore
    monkeypatch.setattr(head_attention.Device, "of", lambda tensor: device)


def choose(
    monkeypatch: pytest.MonkeyPatch, wrapper: type[FakeWrapper], dtype: torch.dtype = torch.float16
) -> Any:
    made = type("Wrapper", (wrapper,), {"made": [], "log": []})
    monkeypatch.setattr("flashinfer.BatchPrefillWithPagedKVCacheWrapper", made)
    case = Case([(0, 3)], dtype=dtype)
    return span_attention(case.pool.buffers(1), case.layer, dtype)


@pytest.mark.usefixtures("accelerator")
def test_flashinfer_is_taken_if_it_computes_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose(monkeypatch, FakeWrapper), PagedAttention)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(
    ("wrapper", "why"), [(WrongWrapper, "which is off by"), (FailingWrapper, "nvcc not found")]
)
def test_without_proof_torch_attends(
    wrapper: type[FakeWrapper], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose(monkeypatch, wrapper), GatheredAttention)
    assert why in caplog.text


@pytest.mark.usefixtures("accelerator")
def test_without_flashinfer_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flashinfer", None)
    case = Case([(0, 3)], dtype=torch.float16)
    assert isinstance(span_attention(case.pool.buffers(1), case.layer, torch.float16), GatheredAttention)


@pytest.mark.usefixtures("accelerator")
def test_types_that_flashinfer_does_not_know_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose(monkeypatch, FakeWrapper, torch.float32), GatheredAttention)


def test_a_cpu_has_no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose(monkeypatch, FakeWrapper), GatheredAttention)


def test_the_trial_leaves_no_plan_behind(wrapper_class: type[FakeWrapper]) -> None:
    case = Case([(0, 3)], dtype=torch.float16)
    paged, plain = PagedAttention(CPU, wrapper_class), GatheredAttention()
    error = trial_error(paged, plain, case.pool.buffers(1), case.layer, torch.float16)
    assert 0 <= error < 0.01
    # The next spans are planned for, though the kinds are those of the trial.
    spans = (Span(0, 2, torch.arange(NUM_SLOTS)),)
    for attention in (paged, plain):
        attention.plan(spans)
    outputs = [x.attend(case.q[:2], *case.pool.buffers(1), case.layer).float() for x in (paged, plain)]
    torch.testing.assert_close(*outputs, rtol=4e-3, atol=4e-3)
