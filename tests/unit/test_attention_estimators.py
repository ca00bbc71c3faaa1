"""The heterogeneous estimator gives what reducing all rows at once gives; sampled positions are even."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from krul_backend.attention.rows import Phase, QueryRows, accumulate, sample_positions
from krul_backend.attention.similarity_worker import HeterogeneousEstimator, SimilarityWorker
from krul_backend.attention.statistics import AttentionStatistics
from tests.support.attention_builders import Sequence, assert_same

CAPACITY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def worker() -> Iterator[SimilarityWorker]:
    with SimilarityWorker(CAPACITY_BYTES) as worker:
        yield worker


def play_turn(
    estimator: HeterogeneousEstimator, sequence: Sequence, chunks: list[int], start: int = 0
) -> AttentionStatistics:
    """A turn from token ``start`` on: the prompt in chunks, then the other tokens one by one.

    The caller's buffer for queries is written over after every call, as a capture's ring is.
    """

    def add(first: int, end: int, phase: Phase) -> None:
        rows = sequence.rows(first, end)
        buffer = QueryRows(rows.queries.clone(), rows.positions.clone(), rows.kv_heads, rows.scaling)
        estimator.add(buffer, phase, lambda layer: sequence.keys[layer, :end])
        buffer.queries.fill_(torch.nan)
        buffer.positions.fill_(0)

    for num_tokens in chunks:
        add(start, start + num_tokens, Phase.PREFILL)
        start += num_tokens
    for position in range(start, sequence.num_tokens):
        add(position, position + 1, Phase.DECODE)
    return estimator.finish(sequence.read_keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunks", [[20], [7, 6, 12], [1, 1, 28]])
def test_chunks_and_steps_give_what_all_rows_give(
    worker: SimilarityWorker, chunks: list[int], dtype: torch.dtype
) -> None:
    sequence = Sequence.random(dtype=dtype, seed=3)
    estimator = HeterogeneousEstimator(sequence.num_layers, sequence.num_heads, worker)
    expected = accumulate(sequence.rows(), sequence.read_keys)
    assert_same(play_turn(estimator, sequence, chunks), expected)


def test_turns_add_up(worker: SimilarityWorker) -> None:
    sequence = Sequence.random(num_tokens=40, seed=4)
    first_turn = Sequence(sequence.queries[:, :15], sequence.keys[:, :15], sequence.kv_heads)
    total = play_turn(HeterogeneousEstimator(3, 4, worker), first_turn, [10])
    total += play_turn(HeterogeneousEstimator(3, 4, worker), sequence, [12], start=15)
    assert_same(total, accumulate(sequence.rows(), sequence.read_keys))


def test_a_turn_without_rows_is_zero(worker: SimilarityWorker) -> None:
    sequence = Sequence.random()
    estimator = HeterogeneousEstimator(3, 4, worker)
    estimator.add(sequence.rows(5, 5), Phase.PREFILL, sequence.read_keys)
    assert_same(estimator.finish(sequence.read_keys), AttentionStatistics.zero(3, 4))


def reduce_prompt(worker: SimilarityWorker, sequence: Sequence) -> AttentionStatistics:
    estimator = HeterogeneousEstimator(sequence.num_layers, sequence.num_heads, worker)
    estimator.add(sequence.rows(), Phase.PREFILL, sequence.read_keys)
    return estimator.finish(sequence.read_keys)


def test_estimators_share_a_worker(worker: SimilarityWorker) -> None:
    before = worker.stats()
    sequences = [Sequence.random(num_tokens=20 + i, seed=i) for i in range(3)]
    estimators = [HeterogeneousEstimator(3, 4, worker) for _ in sequences]
    for start, end in ((0, 12), (12, None)):
        for estimator, sequence in zip(estimators, sequences, strict=True):
            estimator.add(sequence.rows(start, end), Phase.PREFILL, sequence.read_keys)
    for estimator, sequence in reversed(list(zip(estimators, sequences, strict=True))):
        expected = accumulate(sequence.rows(), sequence.read_keys)
        assert_same(estimator.finish(sequence.read_keys), expected)
    assert worker.stats().submitted - before.submitted == 6
    assert worker.stats().reduced_here == 0


def test_the_queue_gets_its_room_back(worker: SimilarityWorker) -> None:
    """More jobs than the queue holds, one after the other; half of them fail on the way in."""
    sequence = Sequence.random(num_tokens=200)

    def fail_in_layer_1(layer: int) -> torch.Tensor:
        if layer == 1:
            raise OSError("gone")
        return sequence.keys[layer]

    num_bytes = sequence.queries.nbytes + sequence.keys.nbytes
    expected = accumulate(sequence.rows(), sequence.read_keys)
    for _ in range(CAPACITY_BYTES // num_bytes + 1):
        with pytest.raises(OSError, match="gone"):
            worker.submit(sequence.rows(), fail_in_layer_1)
        assert_same(reduce_prompt(worker, sequence), expected)
    assert worker.stats().rejected == 0


@given(start=st.integers(0, 1000), num_tokens=st.integers(1, 300), count=st.integers(1, 400))
def test_sample_positions_are_even_and_have_the_last(start: int, num_tokens: int, count: int) -> None:
    positions = sample_positions(start, start + num_tokens, count)
    assert positions.dtype is torch.int64
    assert len(positions) == min(count, num_tokens)
    assert int(positions[-1]) == start + num_tokens - 1
    gaps = torch.diff(positions, prepend=torch.tensor([start - 1]))
    assert int(gaps.min()) >= 1
    assert int(gaps.max() - gaps.min()) <= 1


@pytest.mark.parametrize(("start", "end", "count"), [(5, 5, 1), (5, 4, 1), (0, 5, 0)])
def test_sample_positions_of_nothing(start: int, end: int, count: int) -> None:
    with pytest.raises(ValueError, match="cannot place"):
        sample_positions(start, end, count)
