"""Estimators agree on the same rows; the sampled one keeps a bounded, even choice of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines import Estimator, ExactEstimator, SampledEstimator
from benchmarks.similarity_worker import HeterogeneousEstimator, SimilarityWorker
from krul_backend.attention.rows import Phase, QueryRows, ReadKeys, accumulate, sample_positions
from krul_backend.attention.statistics import AttentionStatistics
from tests.support.attention_builders import Sequence, assert_same

CAPACITY_BYTES = 1 << 20

MakeEstimator = Callable[[int, int], Estimator]


@pytest.fixture(scope="module")
def worker() -> Iterator[SimilarityWorker]:
    with SimilarityWorker(CAPACITY_BYTES) as worker:
        yield worker


@pytest.fixture(params=["exact", "sampled", "heterogeneous"])
def make_estimator(request: pytest.FixtureRequest, worker: SimilarityWorker) -> MakeEstimator:
    def make(num_layers: int, num_heads: int) -> Estimator:
        if request.param == "exact":
            return ExactEstimator(num_layers, num_heads)
        if request.param == "sampled":
            return SampledEstimator(num_layers, num_heads, max_rows=1000)
        return HeterogeneousEstimator(num_layers, num_heads, worker)

    return make


def play_turn(
    estimator: Estimator, sequence: Sequence, chunks: list[int], start: int = 0
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
def test_all_agree_on_the_same_rows(
    make_estimator: MakeEstimator, chunks: list[int], dtype: torch.dtype
) -> None:
    sequence = Sequence.random(dtype=dtype, seed=3)
    estimator = make_estimator(sequence.num_layers, sequence.num_heads)
    expected = accumulate(sequence.rows(), sequence.read_keys)
    assert_same(play_turn(estimator, sequence, chunks), expected)


def test_turns_add_up(make_estimator: MakeEstimator) -> None:
    sequence = Sequence.random(num_tokens=40, seed=4)
    first_turn = Sequence(sequence.queries[:, :15], sequence.keys[:, :15], sequence.kv_heads)
    total = play_turn(make_estimator(3, 4), first_turn, [10])
    total += play_turn(make_estimator(3, 4), sequence, [12], start=15)
    assert_same(total, accumulate(sequence.rows(), sequence.read_keys))


def test_a_turn_without_rows_is_zero(make_estimator: MakeEstimator) -> None:
    sequence = Sequence.random()
    estimator = make_estimator(3, 4)
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


class PositionRecorder:
    """Stands in for the keys: notes that they were asked for, so that the rows that remain are known."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        self.num_reads = 0

    def __call__(self, layer: int) -> torch.Tensor:
        self.num_reads += 1
        return self._sequence.keys[layer]


@settings(max_examples=25, deadline=None)
@given(
    max_rows=st.integers(1, 20),
    chunks=st.lists(st.integers(0, 25), min_size=1, max_size=8),
)
def test_sampled_keeps_an_even_choice_of_bounded_size(max_rows: int, chunks: list[int]) -> None:
    num_tokens = sum(chunks)
    sequence = Sequence.random(num_layers=2, num_tokens=max(1, num_tokens), num_heads=1, num_kv_heads=1)
    estimator = SampledEstimator(2, 1, max_rows)
    row_bytes = sequence.queries[:, :1].nbytes
    start = 0
    for size in chunks:
        estimator.add(sequence.rows(start, start + size), Phase.PREFILL, sequence.read_keys)
        start += size
        assert estimator.nbytes <= max_rows * row_bytes
    result = estimator.finish(sequence.read_keys)
    if num_tokens == 0:
        assert result.num_rows == 0
        return
    assert min(num_tokens, max_rows) / 2 < result.num_rows <= max_rows
    strides = [2**power for power in range(10)]
    # Evenly spaced from the first row on: exactly one stride gives this number of rows and these sums.
    fitting = [stride for stride in strides if -(-num_tokens // stride) == result.num_rows]
    expected = [
        accumulate(sequence.rows_at(torch.arange(0, num_tokens, stride)), sequence.read_keys)
        for stride in fitting
    ]
    assert any(
        torch.allclose(result.squared_distance, candidate.squared_distance, atol=1e-5)
        for candidate in expected
    )


def test_sampled_reads_no_keys_before_the_end() -> None:
    sequence = Sequence.random()
    recorder = PositionRecorder(sequence)
    read: ReadKeys = recorder
    estimator = SampledEstimator(3, 4, max_rows=8)
    estimator.add(sequence.rows(0, 29), Phase.PREFILL, read)
    estimator.add(sequence.rows(29, 30), Phase.DECODE, read)
    assert recorder.num_reads == 0
    assert estimator.finish(read).num_rows == 8
    assert recorder.num_reads == 3


def test_sampled_needs_room_for_a_row() -> None:
    with pytest.raises(ValueError, match="max_rows=0"):
        SampledEstimator(3, 4, max_rows=0)


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
