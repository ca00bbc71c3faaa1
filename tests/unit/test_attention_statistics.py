"""Rows become sums: against a plain transcription, and however the rows are divided."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.attention.rows import QueryRows, accumulate, attention_rows
from krul_backend.attention.statistics import AttentionStatistics, concatenate_heads
from tests.support.attention_builders import Sequence

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Products are fp32, and a distance is a difference of them."""


def reference(rows: QueryRows, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances ``[H, L, L]`` and masses ``[L]``, token by token in float64."""
    num_layers, num_rows, num_heads, _ = rows.queries.shape
    distance = torch.zeros(num_heads, num_layers, num_layers, dtype=torch.float64)
    mass = torch.zeros(num_layers, dtype=torch.float64)
    for r in range(num_rows):
        seen = int(rows.positions[r]) + 1
        tenth = math.ceil(seen / 10)
        counted = set(range(tenth)) | set(range(seen - tenth, seen))
        for h in range(num_heads):
            keys = sequence.keys[:, :seen, int(rows.kv_heads[h])].double()  # [L, seen, D]
            scores = torch.einsum("ld,ltd->lt", rows.queries[:, r, h].double(), keys) * rows.scaling
            weights = scores.softmax(dim=-1)
            distance[h] += (weights[:, None] - weights[None]).square().sum(dim=-1)
            mass += weights[:, sorted(counted)].sum(dim=-1)
    return distance, mass


def assert_same(actual: AttentionStatistics, expected: AttentionStatistics) -> None:
    assert actual.num_rows == expected.num_rows
    torch.testing.assert_close(actual.squared_distance, expected.squared_distance, **CLOSE)
    torch.testing.assert_close(actual.ir_mass, expected.ir_mass, **CLOSE)


@settings(max_examples=15)
@given(
    num_layers=st.integers(1, 4),
    num_tokens=st.integers(1, 25),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 2), (3, 3)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block_bytes=st.sampled_from([1, 700, 4000, 1 << 20]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_sums_equal_a_plain_transcription(
    num_layers: int,
    num_tokens: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    block_bytes: int,
    seed: int,
    data: st.DataObject,
) -> None:
    sequence = Sequence.random(num_layers, num_tokens, *heads, dtype=dtype, seed=seed)
    positions = data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=1, max_size=12))
    rows = sequence.rows_at(torch.tensor(positions))
    distance, mass = reference(rows, sequence)
    result = accumulate(rows, sequence.read_keys, block_bytes=block_bytes)
    assert result.num_rows == len(positions)
    torch.testing.assert_close(result.squared_distance, distance, **CLOSE)
    torch.testing.assert_close(result.ir_mass, mass, **CLOSE)
    assert bool((result.squared_distance.diagonal(dim1=1, dim2=2) == 0).all())
    assert torch.equal(result.squared_distance, result.squared_distance.transpose(1, 2))
    expected = (distance / len(positions)).sqrt().mean(dim=0)
    # The root of a small difference: an error of 1e-5 in a square is 3e-3 in the distance.
    torch.testing.assert_close(result.distances(), expected, rtol=1e-3, atol=4e-3)


@settings(max_examples=10)
@given(cuts=st.lists(st.integers(1, 29), max_size=6), seed=st.integers(0, 2**31))
def test_chunks_add_up_to_the_whole(cuts: list[int], seed: int) -> None:
    sequence = Sequence.random(seed=seed)
    edges = [0, *sorted(cuts), 30]
    parts = [accumulate(sequence.rows(start, end), sequence.read_keys) for start, end in pairwise(edges)]
    total = sum(parts, AttentionStatistics.zero(3, 4))
    assert_same(total, accumulate(sequence.rows(), sequence.read_keys))


def test_heads_of_two_ranks_together_are_all_heads() -> None:
    sequence = Sequence.random()
    rows = sequence.rows()
    ranks = [
        accumulate(
            QueryRows(rows.queries[:, :, heads], rows.positions, rows.kv_heads[heads], rows.scaling),
            sequence.read_keys,
        )
        for heads in (slice(0, 1), slice(1, 4))
    ]
    expected = accumulate(rows, sequence.read_keys)
    assert_same(concatenate_heads(ranks), expected)
    torch.testing.assert_close(
        concatenate_heads(ranks).initial_recent_mass(), expected.initial_recent_mass(), **CLOSE
    )


def test_layers_that_attend_alike_have_no_distance() -> None:
    sequence = Sequence.random(num_layers=2, num_tokens=50)
    twins = Sequence(sequence.queries[[0, 1, 0]].clone(), sequence.keys[[0, 1, 0]].clone(), sequence.kv_heads)
    distances = accumulate(twins.rows(), twins.read_keys).distances()
    assert distances[0, 2] < 1e-3
    assert distances[0, 1] > 0.1


def test_disjoint_attention_is_the_square_root_of_two_apart() -> None:
    """Layer 0 looks at the first token only, layer 1 at the last."""
    keys = torch.zeros(2, 20, 1, 4)
    keys[:, 0, 0, 0] = 100.0
    keys[:, 19, 0, 1] = 100.0
    queries = torch.zeros(2, 1, 1, 4)
    queries[0, 0, 0, 0] = queries[1, 0, 0, 1] = 1.0
    rows = QueryRows(queries, torch.tensor([19]), torch.tensor([0]), 1.0)
    statistics = accumulate(rows, lambda layer: keys[layer])
    assert float(statistics.distances()[0, 1]) == pytest.approx(math.sqrt(2))
    assert statistics.initial_recent_mass().tolist() == pytest.approx([1.0, 1.0])


def test_mass_of_uniform_attention_is_the_share_of_both_tenths() -> None:
    keys = torch.zeros(1, 40, 1, 4)
    for position, expected in ((0, 1.0), (1, 1.0), (8, 2 / 9), (9, 2 / 10), (10, 4 / 11), (39, 8 / 40)):
        rows = QueryRows(torch.ones(1, 1, 1, 4), torch.tensor([position]), torch.tensor([0]), 1.0)
        mass = accumulate(rows, lambda layer: keys[layer]).initial_recent_mass()
        assert mass.tolist() == pytest.approx([expected]), position


def test_rows_see_nothing_after_themselves() -> None:
    sequence = Sequence.random()
    positions = torch.tensor([0, 3, 29])
    weights = attention_rows(
        sequence.queries[0, positions], sequence.keys[0], positions, sequence.kv_heads, 0.5
    )
    assert weights.shape == (4, 3, 30)
    assert weights.dtype is torch.float32
    for row, position in enumerate(positions.tolist()):
        assert float(weights[:, row, position + 1 :].abs().sum()) == 0
        torch.testing.assert_close(weights[:, row, : position + 1].sum(dim=-1), torch.ones(4))


def test_no_rows_change_no_sum_and_have_no_mean() -> None:
    sequence = Sequence.random()
    nothing = accumulate(sequence.rows(5, 5), sequence.read_keys)
    assert nothing.num_rows == 0
    some = accumulate(sequence.rows(), sequence.read_keys)
    assert_same(some + nothing, some)
    with pytest.raises(ValueError, match="no query row"):
        nothing.distances()
    with pytest.raises(ValueError, match="no query row"):
        nothing.initial_recent_mass()


def test_size_in_bytes_is_that_of_the_sums() -> None:
    assert AttentionStatistics.zero(12, 4).nbytes == 8 * (4 * 12 * 12 + 12)


def test_what_does_not_belong_together_is_refused() -> None:
    # One head would be added to each of four without a word.
    with pytest.raises(ValueError, match="4 heads cannot be added to those of 3 layers and 1 heads"):
        AttentionStatistics.zero(3, 4) + AttentionStatistics.zero(3, 1)
    more_rows = AttentionStatistics(torch.zeros(1, 3, 3), torch.zeros(3), 5)
    with pytest.raises(ValueError, match="5 rows"):
        concatenate_heads([AttentionStatistics.zero(3, 1), more_rows])
    with pytest.raises(ValueError, match="no heads"):
        concatenate_heads([])
    with pytest.raises(ValueError, match="masses of shape"):
        AttentionStatistics(torch.zeros(1, 3, 3), torch.zeros(2), 1)
    with pytest.raises(ValueError, match="H, L, L"):
        AttentionStatistics(torch.zeros(1, 3, 2), torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"kv_heads \[4\]"):
        QueryRows(torch.zeros(2, 5, 4, 8), torch.arange(5), torch.arange(2), 1.0)
