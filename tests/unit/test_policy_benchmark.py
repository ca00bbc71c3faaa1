"""The replay of sessions: what it counts, and that knowing the future is never worse."""

from __future__ import annotations

import random
from pathlib import Path

import orjson
import pytest

from benchmarks.policy.__main__ import REFERENCE, Configuration, make_policies, run, summarize
from benchmarks.policy.policies import S3FifoPolicy
from benchmarks.policy.replay import Replay
from benchmarks.policy.workload import (
    PAGE_TOKENS,
    Conversation,
    Cost,
    Future,
    Request,
    Session,
    TraceError,
    Turn,
    Workload,
    make_workload,
    read_sessions,
)

PAGE_BYTES = 8192
COST = Cost(token_s=1.0, position_s=0.0)


def synthetic_sessions(count: int) -> list[Session]:
    """Made-up sessions: prompts that grow by a few pages, short pauses and now and then a long one."""
    chance = random.Random(0)
    sessions = []
    for _ in range(count):
        num_pages = chance.randint(5, 60)
        requests = []
        for number in range(chance.randint(2, 20)):
            is_long = chance.random() < 0.2
            pause_s = chance.expovariate(1 / 600 if is_long else 1 / 10) if number else 0.0
            requests.append(Request(pause_s, chance.uniform(1, 20), tuple(range(1, num_pages + 1))))
            num_pages += chance.randint(0, 8)
        sessions.append(tuple(requests))
    return sessions


def turns_of(*lookups: tuple[int, float, int]) -> Workload:
    """Turns of one second: conversation, arrival, number of pages."""
    conversations = {number: Conversation(number, PAGE_BYTES) for number, _, _ in lookups}
    turns = []
    for number, at_s, num_pages in lookups:
        request = Request(0.0, 1.0, tuple(range(1, num_pages + 1)))
        turns.append(Turn(conversations[number], at_s, at_s, at_s + 1, request))
        conversations[number].turns.append(turns[-1])
    return Workload(tuple(turns))


def hits_of(workload: Workload, num_pages: int) -> dict[str, int]:
    return {
        name: Replay(workload, num_pages * PAGE_BYTES, policy, COST).run().hit_pages
        for name, policy in make_policies(workload).items()
    }


def test_the_counts_of_a_tiny_trace() -> None:
    workload = turns_of((0, 0, 2), (0, 10, 3), (1, 20, 4), (0, 30, 3))
    policy = make_policies(workload)["lru"]
    outcome = Replay(workload, 7 * PAGE_BYTES, policy, COST).run()
    assert (outcome.turns, outcome.prompt_pages, outcome.hit_pages) == (4, 12, 2 + 3)
    assert outcome.stored_pages == 2 + 1 + 4
    assert outcome.hit_bytes == 5 * PAGE_BYTES
    assert outcome.saved_s == 5 * PAGE_TOKENS
    assert outcome.recompute_s == 12 * PAGE_TOKENS
    assert workload.working_set_bytes == 7 * PAGE_BYTES


def test_three_conversations_in_turn_where_two_fit() -> None:
    workload = turns_of(*((number % 3, 10.0 * number, 4) for number in range(30)))
    hits = hits_of(workload, 8)
    # The least recently used one is always the next one.
    assert hits["lru"] == hits["fifo"] == 0
    # Two of three stay, but for the first times and the last round.
    assert hits[REFERENCE] >= 13 * 4


@pytest.mark.parametrize("seed", range(5))
def test_with_pages_of_one_size_no_policy_hits_more_often_than_belady(seed: int) -> None:
    # One page for each conversation: there Belady's order is proven to be the best one.
    sessions = [(Request(0.0, 0.01, (1,)), *[Request(pause, 0.01, (1,))] * 30) for pause in (1.3, 7.1, 40.9)]
    workload = make_workload(sessions, 12, 250, page_bytes=PAGE_BYTES, seed=seed)
    hits = hits_of(workload, 6)
    assert 0 < max(hits.values()) == hits[REFERENCE]


def test_users_overlap_and_slots_make_turns_wait() -> None:
    sessions = synthetic_sessions(5)
    free = make_workload(sessions, 8, 100)
    assert len(free.turns) == 100
    assert all(turn.start_s == turn.arrival_s for turn in free.turns)
    queued = make_workload(sessions, 8, 100, num_slots=1)
    assert all(
        after.start_s >= before.end_s for before, after in zip(queued.turns, queued.turns[1:], strict=False)
    )
    assert any(turn.start_s > turn.arrival_s for turn in queued.turns)


def test_the_future_knows_the_next_use_and_what_is_used_again() -> None:
    workload = turns_of((0, 0, 3), (0, 10, 5), (0, 20, 4))
    future = Future(workload)
    assert future.next_use_s("0:5", 0) == 10
    assert future.next_use_s("0:5", 10) == float("inf")
    assert [future.num_used_again(turn, turn.end_s) for turn in workload.turns] == [3, 4, 0]


def test_s3_fifo_keeps_what_was_used_again_and_drops_what_came_once() -> None:
    workload = turns_of(
        *((0, at_s, 1) for at_s in (0, 5, 10)), *((n, 10.0 * n + 20, 1) for n in range(1, 12)), (0, 500, 1)
    )
    outcome = Replay(workload, 4 * PAGE_BYTES, lambda _: S3FifoPolicy(), COST).run()
    assert outcome.hit_pages == 3


def test_a_trace_file_is_read_in_pages(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    blocks = PAGE_TOKENS // 64
    requests = [
        {"t": 0, "in": 1000, "out": 100, "api_time": 2.0, "blocks": [[1, 2 * blocks]]},
        {"t": 12, "in": 1000, "out": 50, "blocks": [[1, blocks], [100, 99 + 2 * blocks]]},
    ]
    path.write_bytes(orjson.dumps({"block_size": 64, "requests": requests}))
    (session,) = read_sessions(path)
    assert session[0] == Request(0.0, 2.0, (blocks, 2 * blocks))
    assert session[1] == Request(10.0, 1.0, (blocks, 99 + blocks, 99 + 2 * blocks))
    path.write_text("{}")
    with pytest.raises(TraceError, match="holds no sessions"):
        read_sessions(path)


def test_a_run_has_a_row_for_each_policy_and_setting_and_is_small() -> None:
    configuration = Configuration(shares=(0.1, 0.5), users=6, many_users=(3,), turns=60, slots=2)
    result = run(synthetic_sessions(6), configuration, lambda _: None)
    assert len(result["rows"]) == (2 + 1 + 2) * 5
    for row in result["rows"]:
        assert 0 <= row["hit_rate"] < 1
        assert 0 <= row["saved_s"] < row["recompute_s"]
    summary = summarize(result)
    assert set(summary["relative"]) == {"value", "lru", "fifo", "s3-fifo"}
    assert len(orjson.dumps(summary)) < 20_000
