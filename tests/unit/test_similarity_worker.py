"""The worker process: results, a full queue, deaths, nonsense and its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import similarity_worker
from benchmarks.similarity_worker import HeterogeneousEstimator, SimilarityWorker
from benchmarks.worker_process import WorkerGoneError, WorkerProcess, _receive, _send, serve
from krul_backend.attention.rows import Phase, accumulate
from krul_backend.attention.statistics import AttentionStatistics
from tests.support.attention_builders import Sequence
from tests.support.strict_device import StrictDevice

SEQUENCE = Sequence.random(num_tokens=40, dtype=torch.bfloat16)
EXPECTED = accumulate(SEQUENCE.rows(), SEQUENCE.read_keys)


JOB_BYTES = SEQUENCE.queries.nbytes + SEQUENCE.keys.nbytes


def reduce_prompt(worker: SimilarityWorker) -> AttentionStatistics:
    estimator = HeterogeneousEstimator(SEQUENCE.num_layers, SEQUENCE.num_heads, worker)
    estimator.add(SEQUENCE.rows(), Phase.PREFILL, SEQUENCE.read_keys)
    return estimator.finish(SEQUENCE.read_keys)


def assert_expected(statistics: AttentionStatistics) -> None:
    assert statistics.num_rows == EXPECTED.num_rows
    torch.testing.assert_close(statistics.squared_distance, EXPECTED.squared_distance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.ir_mass, EXPECTED.ir_mass, rtol=1e-5, atol=1e-5)


def kill(worker: SimilarityWorker) -> None:
    assert worker.process_id is not None
    os.kill(worker.process_id, signal.SIGKILL)


@pytest.fixture
def worker() -> Iterator[SimilarityWorker]:
    with SimilarityWorker(capacity_bytes=JOB_BYTES) as worker:
        yield worker


def test_it_survives_one_death_and_then_does_the_work_here(worker: SimilarityWorker) -> None:
    assert worker.process_id is None
    assert_expected(reduce_prompt(worker))
    first = worker.process_id
    kill(worker)
    assert_expected(reduce_prompt(worker))
    assert worker.process_id not in (None, first)
    assert (worker.stats().restarts, worker.stats().reduced_here) == (1, 0)
    kill(worker)
    for num_reduced in (1, 2):
        assert_expected(reduce_prompt(worker))
        assert worker.process_id is None
        assert (worker.stats().restarts, worker.stats().reduced_here) == (1, num_reduced)
    assert worker.stats().submitted == 4


def test_a_process_that_does_not_answer_counts_as_dead() -> None:
    with SimilarityWorker(capacity_bytes=1 << 20, timeout_s=0.0) as worker:
        assert_expected(reduce_prompt(worker))
        assert (worker.stats().restarts, worker.stats().reduced_here) == (1, 1)


# ---- on a GPU ----


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> StrictDevice:
    device = StrictDevice()
    monkeypatch.setattr(similarity_worker.Device, "of", lambda tensor: device)
    return device


def test_rows_and_keys_leave_the_device_on_a_stream_of_their_own(strict: StrictDevice) -> None:
    """After what was queued before; the caller overwrites its rows at once, and waits for nothing."""
    rows = SEQUENCE.rows()
    keys_held: list[int] = []
    keys_alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def read_keys(layer: int) -> torch.Tensor:
        keys = SEQUENCE.read_keys(layer).clone()
        keys_alive.add(keys)
        keys_held.append(len(keys_alive))
        return keys

    with SimilarityWorker(capacity_bytes=JOB_BYTES) as worker:
        forward = strict.current_stream()
        future = worker.submit(rows, read_keys)
        rows.queries.zero_()
        assert future is not None
        assert_expected(future.result(timeout=60))
        (waited,) = strict.module.waits_before("download", worker._stream)
        assert waited.stream is forward
        assert not any(entry.kind == "download" for entry in strict.module.log if entry.stream is forward)
    assert strict.module.pageable_copies == 0
    # Not those of all layers at once.
    assert max(keys_held) == 1
    strict.check()


def test_room_that_may_still_be_written_is_not_given_back(
    strict: StrictDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[int] = []

    def read_keys(layer: int) -> torch.Tensor:
        if layer == 1:
            under_way.append(len(strict.module.copies_under_way()))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SEQUENCE.read_keys(layer)

    with SimilarityWorker(capacity_bytes=JOB_BYTES) as worker:
        give_back = worker._give_back

        def given_back(num_bytes: int) -> None:
            under_way.append(len(strict.module.copies_under_way()))
            give_back(num_bytes)

        monkeypatch.setattr(worker, "_give_back", given_back)
        with pytest.raises(torch.OutOfMemoryError):
            worker.submit(SEQUENCE.rows(), read_keys)
        assert under_way == [2, 0]
        assert_expected(reduce_prompt(worker))
    strict.check()


def test_a_full_queue_rejects_and_the_estimator_reduces_at_once() -> None:
    with SimilarityWorker(capacity_bytes=JOB_BYTES - 64) as worker:
        assert_expected(reduce_prompt(worker))
        assert (worker.stats().submitted, worker.stats().rejected) == (0, 1)
        assert worker.process_id is None


def test_closing_waits_for_what_was_accepted_and_ends_the_process() -> None:
    worker = SimilarityWorker(capacity_bytes=1 << 20)
    futures = [worker.submit(SEQUENCE.rows(), SEQUENCE.read_keys) for _ in range(3)]
    worker.close()
    worker.close()
    for future in futures:
        assert future is not None
        assert_expected(future.result(timeout=0))
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(SEQUENCE.rows(), SEQUENCE.read_keys)


def test_the_process_ends_with_a_parent_that_is_killed() -> None:
    from_parent, to_test = os.pipe()
    parent_id = os.fork()
    if parent_id == 0:
        process = WorkerProcess()
        os.write(to_test, str(process.process_id).encode())
        signal.pause()
    process_id = int(os.read(from_parent, 100))
    assert is_running(process_id)
    os.kill(parent_id, signal.SIGKILL)
    os.waitpid(parent_id, 0)
    deadline = time.monotonic() + 60
    while is_running(process_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(process_id)
    for descriptor in (from_parent, to_test):
        os.close(descriptor)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    # An orphan that nobody waits for stays a zombie.
    return state != "Z"


@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=40))
def test_a_process_that_answers_nonsense_counts_as_gone(content: bytes) -> None:
    process = WorkerProcess.__new__(WorkerProcess)
    process._pipe, theirs = multiprocessing.Pipe()
    process._process = subprocess.Popen(["true"])
    theirs.send_bytes(content)
    with theirs, process._pipe, pytest.raises(WorkerGoneError):
        process.reduce(SEQUENCE.rows(), SEQUENCE.keys, timeout_s=10.0)


def test_serving_answers_every_job_and_ends_with_its_input() -> None:
    """One good job between two that are refused, by the loop of the process itself."""
    rows = SEQUENCE.rows()
    good = (rows.queries, SEQUENCE.keys, rows.positions, rows.kv_heads)
    client, pipe = multiprocessing.Pipe()
    thread = threading.Thread(target=serve, args=(pipe,))
    thread.start()
    answers = []
    for job in (
        (*good[:2], rows.positions[1:], rows.kv_heads),
        good,
        (rows.queries, SEQUENCE.keys[:1], *good[2:]),
    ):
        _send(client, job, scaling=rows.scaling)
        answers.append(_receive(client))
    client.close()
    thread.join(10.0)
    assert not thread.is_alive()
    pipe.close()
    assert "need positions [40]" in answers[0][0]["error"]
    assert "IndexError" in answers[2][0]["error"]
    assert_expected(AttentionStatistics(*answers[1][1], rows.num_rows))
