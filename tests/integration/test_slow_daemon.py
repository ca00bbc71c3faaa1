"""A server goes on at its usual pace while its daemon takes half a second for every answer."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    POOL_TOKENS,
    STRICT,
    ask,
    assert_nothing_left_behind,
    assert_same,
    krul_stats,
    push_out,
    random_prompt,
    small_krul_server_args,
    wait_until,
)
from tests.support.server_plugin import slow_answers

DELAY_S = 0.5
LARGEST_P99_MS = 50.0
"""Far above what is seen, since other processes share the cores; far below the delay."""


def test_the_scheduler_does_not_wait_for_a_slow_daemon(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    delay = tmp_path / "delay"
    args = small_krul_server_args(POOL_TOKENS, {"planner": "full-load"})
    env = {**STRICT, **slow_answers(delay)}
    returning = [random_prompt(("returning", number), 400) for number in range(4)]
    with ForkedServer(tiny_models["float32"], args=args, env=env) as server:
        first = [ask(server, prompt) for prompt in returning]
        push_out(server, num_tokens=POOL_TOKENS, seed="slow")
        delay.write_text(str(DELAY_S))
        # Whatever is found of them: they are answered, and with the same tokens.
        late = [ask(server, prompt) for prompt in returning]
        for number in range(8):
            ask(server, random_prompt(("new", number), 200), max_new_tokens=64)
        stats = krul_stats(server)
        print("while the daemon is slow:", stats["scheduler"], stats["daemon"])
        assert stats["scheduler"]["steps"] > 400
        assert stats["scheduler"]["beyond_planning_ms"]["p99"] < LARGEST_P99_MS
        assert stats["daemon"]["is_connected"]
        assert (stats["daemon"]["lost"], stats["daemon"]["timeouts"]) == (0, 0)
        assert_same(first, late)
        delay.unlink()
        push_out(server, num_tokens=POOL_TOKENS, seed="prompt again")
        # Nobody has to be missed for that to be noticed: the next one that returns is restored.
        wait_until(lambda: krul_stats(server)["waiting_leases"] == 0, "unclaimed leases to go back")
        again = ask(server, returning[0])
        assert again.host_tokens > 300
        assert_same(first[:1], [again])
        assert_nothing_left_behind(server)
        # Of a flush neither: it comes before every later lookup.
        delay.write_text(str(DELAY_S))
        last = ask(server, returning[1])
        begin_s = time.monotonic()
        httpx.post(f"{server.url}/flush_cache", timeout=60, trust_env=False).raise_for_status()
        assert time.monotonic() - begin_s < 2 * DELAY_S
        delay.unlink()
        after = ask(server, returning[0]), ask(server, returning[1])
        assert [answer.host_tokens for answer in after] == [0, 0]
        assert_same([first[0], last], after)
