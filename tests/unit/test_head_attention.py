"""Attention of recomputed heads against a plain softmax in fp64, and heads cut into parts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from krul_sglang.adapter.head_attention import HeadAttention, NoHeadsError
from krul_sglang.engine.common import span_attention
from krul_sglang.engine.common.span_attention import GatheredAttention, Span
from krul_sglang.engine.restore.heads import Head
from tests.support.head_attention_case import HEAD_DIM, NUM_SLOTS, VALUE_DIM, Case, own_slots

SPANS = [[(0, 5)], [(7, 5)], [(9, 1)], [(0, 6), (5, 3), (0, 1), (11, 9)]]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_is_causal_over_past_and_own_tokens(
    spans: list[tuple[int, int]], num_q_heads: int, num_kv_heads: int
) -> None:
    case = Case(spans, num_q_heads, num_kv_heads)
    expected = case.expected()
    output = case.run()
    assert output.shape == (sum(num_tokens for _, num_tokens in spans), num_q_heads * VALUE_DIM)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [1, 2, 3, 8, 9, 100])
def test_queries_of_several_calls(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_attention, "_MIN_QUERIES", step)
    monkeypatch.setattr(span_attention, "_MAX_SCORES", 0)
    case = Case([(5, 9), (3, 8), (0, 9)])
    expected = case.expected()
    torch.testing.assert_close(case.run().double(), expected, rtol=1e-5, atol=1e-5)


TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@settings(max_examples=60)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
    max_scores=st.integers(0, 2000),
    value_dim=st.sampled_from([VALUE_DIM, HEAD_DIM]),
)
def test_any_spans_attend_as_a_plain_softmax(
    spans: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    dtype: torch.dtype,
    max_scores: int,
    value_dim: int,
) -> None:
    case = Case(spans, num_kv_heads * group, num_kv_heads, dtype, 300, value_dim)
    expected = case.expected()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(span_attention, "_MIN_QUERIES", 4)
        patch.setattr(span_attention, "_MAX_SCORES", max_scores)
        output = case.run()
    assert output.dtype is dtype
    torch.testing.assert_close(output.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Allocations(TorchDispatchMode):
    """The largest tensor, in bytes, that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for part in output if isinstance(output, tuple | list) else (output,):
            if isinstance(part, torch.Tensor):
                self.largest = max(self.largest, part.untyped_storage().nbytes())
        return output


@pytest.fixture
def unseen_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias is an empty tensor of a class of its own, which torch cannot make while operations are seen."""

    def make(num_queries: int, num_tokens: int) -> torch.Tensor:
        with _disable_current_modes():
            return causal_lower_right(num_queries, num_tokens)

    monkeypatch.setattr(span_attention, "causal_lower_right", make)


def largest_tensor(num_past: int, num_tokens: int, backend: SDPBackend) -> int:
    case = Case([(num_past, num_tokens)], 8, 1, num_slots=num_past + num_tokens, value_dim=HEAD_DIM)
    attention = HeadAttention(case.pool, GatheredAttention(), None)
    attention.use(case.spans, own_slots(case.spans[0]))
    q, k, v = (x.flatten(1) for x in (case.q, case.k, case.v))
    with sdpa_kernel(backend), Allocations() as allocations:
        attention.forward(q, k, v, case.layer)
    return allocations.largest


@pytest.mark.usefixtures("unseen_bias")
@pytest.mark.parametrize("num_past", [0, 2000])
def test_memory_is_linear_in_tokens(num_past: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_attention, "_MAX_SCORES", 1 << 16)
    small = largest_tensor(num_past, 1000, SDPBackend.FLASH_ATTENTION)
    large = largest_tensor(4 * num_past, 4000, SDPBackend.FLASH_ATTENTION)
    assert large <= 4 * small


@pytest.mark.usefixtures("unseen_bias")
def test_a_kernel_that_keeps_all_scores_takes_bounded_memory() -> None:
    """As torch's own does for grouped queries under a mask; a GPU without FlashInfer may get it."""
    largest = largest_tensor(15_000, 1000, SDPBackend.MATH)
    assert largest <= 4 * span_attention._MAX_SCORES
    # All at once they would be more.
    assert 3 * largest < 4 * 8 * 1000 * 16_000


def test_kv_is_written_to_the_slots_of_the_spans_and_nowhere_else() -> None:
    case = Case([(4, 6), (0, 3), (7, 2)])
    before = case.pool.copy()
    case.run()
    after = case.pool.copy()
    assert torch.equal(after[0].k, before[0].k)
    assert torch.equal(after[0].v, before[0].v)
    expected_k, expected_v = before[1].k, before[1].v
    for span in case.spans:
        rows = slice(span.first_row, span.first_row + span.num_tokens)
        expected_k[own_slots(span)], expected_v[own_slots(span)] = case.k[rows], case.v[rows]
    assert torch.equal(after[1].k, expected_k)
    assert torch.equal(after[1].v, expected_v)


def test_slots_that_a_load_fills_meanwhile_are_not_read() -> None:
    case = Case([(4, 6), (0, 3)])
    expected = case.expected()
    used = torch.cat([span.slots for span in case.spans])
    others = torch.ones(NUM_SLOTS, dtype=torch.bool)
    others[used] = False
    # Its own slots hold whatever was there before, too.
    for buffer in case.pool.buffers(1):
        buffer[others] = float("nan")
        for span in case.spans:
            buffer[own_slots(span)] = float("nan")
    torch.testing.assert_close(case.run().double(), expected, rtol=1e-5, atol=1e-5)


def test_the_pools_dtype_is_kept() -> None:
    case = Case([(6, 5), (0, 4)], dtype=torch.bfloat16)
    expected = case.expected()
    output = case.run()
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(case.pool.buffers(1)[0][own_slots(case.spans[0])], case.k[:5])


def test_kv_that_the_model_wrote_itself_is_read_and_not_written_again() -> None:
    """It may be rounded in another way than what the model hands on."""
    case = Case([(4, 6), (0, 3)])
    k_buffer, v_buffer = case.pool.buffers(1)
    own = torch.cat([own_slots(span) for span in case.spans])
    case.k, case.v = k_buffer[own].clone(), v_buffer[own].clone()
    expected, before = case.expected(), case.pool.copy()
    case.k, case.v = torch.full_like(case.k, float("nan")), torch.full_like(case.v, float("nan"))
    torch.testing.assert_close(case.run(save_kv_cache=False).double(), expected, rtol=1e-5, atol=1e-5)
    for old, new in zip(before, case.pool.copy(), strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)


def test_attention_of_another_kind_is_refused() -> None:
    case = Case([(0, 3)])
    attention = HeadAttention(case.pool, GatheredAttention(), None)
    attention.use(case.spans, own_slots(case.spans[0]))
    q, k, v = (x.flatten(1) for x in (case.q, case.k, case.v))
    attention.forward(q, k, v, case.layer, None, True, sinks=None)
    with pytest.raises(NoHeadsError, match="asks for sinks"):
        attention.forward(q, k, v, case.layer, None, True, sinks=torch.zeros(4))


def test_a_head_in_parts_attends_as_the_head_at_once() -> None:
    """Parts read the parts before them from the pool, where the whole has them at hand."""
    at_once, in_parts = Case([(5, 12)]), Case([(5, 12)])
    (span,) = at_once.spans
    expected = at_once.run()
    head = Head(torch.arange(12), span.slots, start=5, ends=(17,))
    attention = HeadAttention(in_parts.pool, GatheredAttention(), None)
    outputs = []
    for first, end in ((0, 5), (5, 6), (6, 12)):
        part = head.part(first, end)
        assert part is not None
        own = part.slots[part.start :]
        attention.use([Span(0, len(own), part.slots)], own)
        rows = slice(first, end)
        outputs.append(
            attention.forward(
                *(x[rows].flatten(1) for x in (in_parts.q, in_parts.k, in_parts.v)), in_parts.layer
            )
        )
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-5, atol=1e-5)
    for old, new in zip(at_once.pool.copy(), in_parts.pool.copy(), strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)


# ---- parts of heads ----

lengths_strategy = st.lists(st.integers(0, 15), min_size=1, max_size=4)


def head_of(start: int, lengths: list[int]) -> Head:
    ends = tuple(start + length for length in sorted(lengths, reverse=True))
    return Head(1000 + torch.arange(start, ends[0]), 500 + torch.arange(ends[0]), start, ends)


@settings(max_examples=200)
@given(start=st.integers(0, 6), lengths=lengths_strategy, cuts=st.lists(st.integers(0, 16), max_size=4))
def test_parts_cover_a_head_once(start: int, lengths: list[int], cuts: list[int]) -> None:
    head = head_of(start, lengths)
    bounds = sorted({0, *cuts, 20})
    tokens: list[list[int]] = [[] for _ in head.ends]
    for first, end in pairwise(bounds):
        part = head.part(first, end)
        if part is None:
            assert start + first >= head.ends[0]
            continue
        assert part.start == start + first
        assert part.start < part.ends[0] <= start + end
        assert list(part.ends) == sorted(part.ends, reverse=True)
        assert part.ends[-1] >= part.start
        # Ids of its own tokens; slots of these and of all before them.
        assert part.token_ids.tolist() == [1000 + token for token in range(part.start, part.ends[0])]
        assert part.slots.tolist() == [500 + token for token in range(part.ends[0])]
        for of_layer, layer_end in zip(tokens, part.ends, strict=True):
            of_layer += range(part.start, layer_end)
    assert tokens == [list(range(start, end)) for end in head.ends]


@given(start=st.integers(0, 6), lengths=lengths_strategy, first=st.integers(0, 20))
def test_parts_of_no_tokens_are_none(start: int, lengths: list[int], first: int) -> None:
    head = head_of(start, lengths)
    assert head.part(first, first) is None
    assert head.part(max(lengths), max(lengths) + 5) is None


@given(
    start=st.integers(0, 6),
    lengths=lengths_strategy,
    first=st.integers(0, 10),
    size=st.integers(1, 10),
    inner=st.tuples(st.integers(0, 5), st.integers(1, 5)),
)
def test_a_part_of_a_part_is_a_part(
    start: int, lengths: list[int], first: int, size: int, inner: tuple[int, int]
) -> None:
    head = head_of(start, lengths)
    part = head.part(first, first + size)
    nested = None if part is None else part.part(inner[0], sum(inner))
    direct = head.part(first + inner[0], first + min(sum(inner), size))
    assert (nested is None) == (direct is None)
    if nested is not None and direct is not None:
        assert (nested.start, nested.ends) == (direct.start, direct.ends)
        assert torch.equal(nested.token_ids, direct.token_ids)
        assert torch.equal(nested.slots, direct.slots)
