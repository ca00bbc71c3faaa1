"""The attention that tokens draw, against full attention matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from krul_backend.attention import rows as rows_module
from krul_backend.attention.rows import PRIOR_ROWS, attention_drawn
from tests.support.attention_builders import Sequence


def brute_force(sequence: Sequence, positions: list[int], start: int, num_tokens: int) -> torch.Tensor:
    """Token by token and head by head, in fp64 ``[L, Hkv, num_tokens]``."""
    num_kv_heads = sequence.keys.shape[2]
    sums = torch.zeros(sequence.num_layers, num_kv_heads, num_tokens, dtype=torch.float64)
    num_seen = torch.zeros(num_tokens, dtype=torch.float64)
    for row in positions:
        if row < start:
            continue
        num_seen[: row + 1 - start] += 1
        for layer in range(sequence.num_layers):
            for head in range(sequence.num_heads):
                kv_head = int(sequence.kv_heads[head])
                keys = sequence.keys[layer, : row + 1, kv_head].double()
                weights = (keys @ sequence.queries[layer, row, head].double() * 0.5).softmax(0)
                drawn = weights[start : start + num_tokens]
                sums[layer, kv_head, : len(drawn)] += drawn
    average = sums.sum(-1, keepdim=True) / num_seen.sum()
    return (sums + PRIOR_ROWS * average) / (num_seen + PRIOR_ROWS)


@contextmanager
def computed(how: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        if how != "in compiled loops":
            patches.setattr(rows_module.Device, "of", lambda _: SimpleNamespace(shares_cores=False))
        yield


@settings(max_examples=80)
@given(st.data())
def test_equals_a_brute_force_over_full_attention(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.integers(1, 3), "KV heads")
    sequence = Sequence.random(
        num_layers=2,
        num_tokens=data.draw(st.integers(1, 20), "tokens"),
        num_heads=num_kv_heads * data.draw(st.integers(1, 3), "heads per KV head"),
        num_kv_heads=num_kv_heads,
        head_dim=4,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    every = range(sequence.num_tokens)
    start = data.draw(st.sampled_from(every), "start")
    num_tokens = data.draw(st.integers(1, sequence.num_tokens - start), "tokens of the turn")
    # At least one row that sees a token of the turn; rows may be before and after it, too.
    seeing = data.draw(st.integers(start, sequence.num_tokens - 1), "a row that sees")
    positions = sorted({seeing, *data.draw(st.lists(st.sampled_from(every), max_size=8), "rows")})
    block_bytes = data.draw(st.sampled_from([1, 500, 1 << 20]), "bytes of a block")
    with computed(data.draw(st.sampled_from(["in compiled loops", "by torch, as on a GPU"]))):
        drawn = attention_drawn(
            sequence.rows_at(torch.tensor(positions)),
            sequence.read_keys,
            start,
            num_tokens,
            block_bytes=block_bytes,
        )
    assert drawn.dtype is torch.float32
    expected = brute_force(sequence, positions, start, num_tokens)
    torch.testing.assert_close(drawn.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", ["in compiled loops", "by torch, as on a GPU"])
@pytest.mark.parametrize("num_tokens", [40, 150])
def test_keys_of_16_bits_are_multiplied_as_they_are(how: str, num_tokens: int) -> None:
    plain = Sequence.random(num_tokens=num_tokens, num_heads=6, num_kv_heads=2, head_dim=64)
    # Scores from -40 to 40: what one row sees differs by more than fp32 can hold.
    keys, queries = (3 * each.bfloat16() for each in (plain.keys, plain.queries))
    sequence, exact = (
        Sequence(queries.to(dtype), keys.to(dtype), plain.kv_heads)
        for dtype in (torch.bfloat16, torch.float32)
    )
    with computed(how):
        drawn = attention_drawn(sequence.rows(), sequence.read_keys, 3, num_tokens - 3)
    expected = brute_force(exact, list(range(num_tokens)), 3, num_tokens - 3)
    # Scores are rounded to 8 bits.
    torch.testing.assert_close(drawn.double(), expected, rtol=0.2, atol=1e-4)
    assert ((drawn / expected).log().abs().mean()) < 0.02


def test_scores_that_are_all_far_below_zero_count_like_any() -> None:
    plain = Sequence.random(num_layers=1, num_tokens=30, num_heads=2, num_kv_heads=1)
    keys, queries = plain.keys.clone(), plain.queries.clone()
    keys[..., 0], queries[..., 0] = -200.0, 2.0
    shifted = Sequence(queries, keys, plain.kv_heads)
    drawn = attention_drawn(shifted.rows(), shifted.read_keys, 0, 30)
    expected = brute_force(shifted, list(range(30)), 0, 30)
    torch.testing.assert_close(drawn.double(), expected, rtol=1e-4, atol=1e-7)


def test_all_rows_share_out_all_of_their_attention() -> None:
    sequence = Sequence.random(num_tokens=40, num_heads=6, num_kv_heads=2)
    drawn = attention_drawn(sequence.rows(), sequence.read_keys, 0, 40).double()
    num_seen = torch.arange(40, 0, -1)
    # What rows spent is what they were given: one per row and query head, and the same once more for each
    # of the prior rows, spread evenly over what was seen.
    prior = PRIOR_ROWS * 40 * 40 * 3 / float(num_seen.sum())
    spent = (drawn * (num_seen + PRIOR_ROWS)).sum(-1)
    torch.testing.assert_close(spent, torch.full_like(spent, 40 * 3 + prior), rtol=1e-5, atol=0)


def test_a_token_that_all_rows_look_at_draws_most() -> None:
    sequence = Sequence.random(num_layers=1, num_tokens=30, num_heads=2, num_kv_heads=1)
    queries, keys = sequence.queries.clone(), sequence.keys.clone()
    keys[0, 7, 0] = 0
    keys[0, 7, 0, 0] = 10
    queries[..., 0] = 4.0
    pointed = Sequence(queries, keys, sequence.kv_heads)
    drawn = attention_drawn(pointed.rows(), pointed.read_keys, 0, 30)[0, 0]
    assert int(drawn.argmax()) == 7
    # Nearly all of both query heads, less what the prior rows take away.
    assert drawn[7] > 1.7
    assert drawn[[*range(7), *range(8, 30)]].max() < 0.5


@pytest.mark.parametrize("positions", [[], [0, 3, 9]])
def test_without_rows_that_see_the_turn_all_its_tokens_draw_the_same(positions: list[int]) -> None:
    sequence = Sequence.random(num_layers=3, num_tokens=20, num_heads=4, num_kv_heads=2)
    rows = sequence.rows_at(torch.tensor(positions, dtype=torch.int64))
    drawn = attention_drawn(rows, sequence.read_keys, 10, 6)
    assert drawn.shape == (3, 2, 6)
    # Two query heads, and 16 tokens that a query after the turn sees.
    assert torch.equal(drawn, torch.full((3, 2, 6), 2 / 16))


class LargestResult(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that an operation made."""

    num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.num_elements = max(self.num_elements, result.numel())
        return result


def test_of_a_long_conversation_no_more_than_the_keys_of_one_layer_are_held() -> None:
    sequence = Sequence.random(num_layers=1, num_tokens=600, num_heads=16, num_kv_heads=2, head_dim=32)
    rows = sequence.rows(560)
    with LargestResult() as largest:
        attention_drawn(rows, sequence.read_keys, 500, 100, block_bytes=1)
    # Not those of the 16 query heads, which are eight times as many.
    assert largest.num_elements == 600 * 2 * 32
