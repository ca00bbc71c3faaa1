"""Servers on disks and on a shared daemon: restarts, crashes of the daemon, little memory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import ServerError, ServerProcess
from tests.support.daemon_process import running_daemon
from tests.support.forked_server import ForkedServer
from tests.support.local_s3 import BUCKET, local_s3
from tests.support.scenario import (
    STRICT,
    Answer,
    ask,
    assert_nothing_left_behind,
    assert_same,
    daemon_pid,
    krul_stats,
    push_out,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
    wait_until_connected,
)
from tests.support.server_plugin import WITH_PLUGIN
from tests.support.store_builders import wait_until

POOL_TOKENS = 2048
TOKEN_BYTES = 4096  # 4 layers x 2 KV heads x 64 channels x (K, V) x 4 bytes
NUM_TURNS = 4
PROMPT_TOKENS = 611
NAMES = ("first", "second", "third")
KEPT = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, "custom_params": {"krul_keep_s": 600}}


def histories(name: str, answers: list[Answer]) -> list[int]:
    """The prompt of the next turn after these answers."""
    history = random_prompt(name, PROMPT_TOKENS)
    for turn, answer in enumerate(answers):
        history = [*history, *answer.output_ids, *random_prompt((name, turn), 29)]
    return history


def questions_after(name: str, answers: list[Answer]) -> list[list[int]]:
    """Prompts that go on in several ways after the first two answers."""
    history = histories(name, answers[:2])
    return [[*history, *random_prompt((name, "question", number), 5 + number)] for number in range(6)]


def converse(server: ServerProcess, name: str, answers: list[Answer], num_turns: int, *, evict: bool) -> None:
    """Append ``num_turns`` answers; before each of them everything leaves the device, or nothing."""
    for _ in range(num_turns):
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=(name, len(answers)))
        answers.append(ask(server, histories(name, answers), max_new_tokens=12))


@pytest.fixture(scope="module")
def kept(tiny_models: dict[str, Path]) -> dict[str, list[Answer]]:
    """Every conversation on a server that never evicts anything."""
    args = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "16384", "--enable-cache-report")
    answers: dict[str, list[Answer]] = {name: [] for name in NAMES}
    with ForkedServer(tiny_models["float32"], args=args) as server:
        for name in NAMES:
            converse(server, name, answers[name], NUM_TURNS, evict=False)
        questions = questions_after("first", answers["first"])
        answers["questions"] = [ask(server, question, max_new_tokens=12) for question in questions]
    return answers


@contextmanager
def krul_server(
    model: Path, options: dict[str, Any], log_path: Path, more: tuple[str, ...] = ()
) -> Iterator[ServerProcess]:
    args = (*small_krul_server_args(POOL_TOKENS, {"planner": "full-load", **options}), *more)
    with ForkedServer(model, args=args, env=STRICT, log_path=log_path) as server:
        yield server


def backend(*arguments: str) -> str:
    command = [sys.executable, "-m", "krul_backend.daemon", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_memory_for_one_conversation_and_a_disk_for_all(
    tiny_models: dict[str, Path], kept: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Evicted from host memory, then everything killed and started again: two disks have it all."""
    disks = [tmp_path / "ssd-0", tmp_path / "ssd-1"]
    options = {
        "host_memory": 1500 * TOKEN_BYTES,
        "ssd_dir": ",".join(map(str, disks)),
        "ssd_capacity": "2GiB",
        "ssd_timeout": 10.0,
    }
    answers: dict[str, list[Answer]] = {name: [] for name in NAMES}
    with krul_server(tiny_models["float32"], options, tmp_path / "first.log") as server:
        for turn in range(2):
            for name in NAMES:
                # A turn that is being stored takes the memory that a load from the disk needs.
                settled_stats(server)
                converse(server, name, answers[name], 1, evict=True)
                if turn:
                    assert answers[name][-1].host_tokens > 500
        stats = settled_stats(server)
        assert stats["evicted_segments"] > 0
        assert stats["tier_hit_pages"]["ssd"] > 0
        assert stats["fetched_segments"] > 0
        assert_nothing_left_behind(server)
        assert "true" in backend("flush", "--endpoint", stats["daemon"]["endpoint"], "--json")
        assert all(any(disk.rglob("*.log")) for disk in disks)
        os.kill(daemon_pid(server), signal.SIGKILL)
        os.kill(server.pid, signal.SIGKILL)
    one_at_a_time = ("--max-running-requests", "1")
    with krul_server(tiny_models["float32"], options, tmp_path / "second.log", one_at_a_time) as server:
        with ThreadPoolExecutor() as clients:
            # The first conversation is read from the disk while it waits for a request that runs.
            running = clients.submit(ask, server, random_prompt("long answer", 64), max_new_tokens=600)
            wait_until(lambda: krul_stats(server)["lookups"] + krul_stats(server)["spared_lookups"] > 0)
            returning = clients.submit(converse, server, NAMES[0], answers[NAMES[0]], 1, evict=False)
            wait_until(lambda: krul_stats(server)["fetched_segments"] > 0)
            assert not running.done()
            returning.result()
        for name in NAMES[1:]:
            settled_stats(server)
            converse(server, name, answers[name], 1, evict=False)
        for name in NAMES:
            assert answers[name][-1].device_tokens == 0
            assert answers[name][-1].host_tokens > 500
        settled_stats(server)
        converse(server, "first", answers["first"], 1, evict=True)
        assert_nothing_left_behind(server)
    for name in NAMES:
        assert_same(kept[name][: len(answers[name])], answers[name])


def test_what_memory_has_in_part_is_completed_from_the_disk(
    tiny_models: dict[str, Path], kept: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Each restore has other heads: what was read for an earlier one stays, and the disk has the rest."""
    options = {
        "planner": "random",
        "store_full_tail": True,
        "host_memory": 32_000 * TOKEN_BYTES,
        "ssd_dir": str(tmp_path / "ssd"),
        "ssd_capacity": "2GiB",
        "ssd_timeout": 10.0,
    }
    args, env = small_krul_server_args(POOL_TOKENS, options), {**STRICT, **WITH_PLUGIN}
    answers: list[Answer] = []
    with ForkedServer(tiny_models["float32"], args=args, env=env) as server:
        converse(server, "first", answers, 2, evict=True)
        assert "true" in backend("flush", "--endpoint", settled_stats(server)["daemon"]["endpoint"], "--json")
    with ForkedServer(tiny_models["float32"], args=args, env=env) as server:
        questions = questions_after("first", answers)
        again = [ask(server, questions[0], max_new_tokens=12)]
        before = settled_stats(server)
        assert before["tier_hit_pages"]["ssd"] > 0
        for number, question in enumerate(questions[1:]):
            push_out(server, num_tokens=POOL_TOKENS, seed=("again", number))
            again.append(ask(server, question, max_new_tokens=12))
        after = settled_stats(server)
        assert after["tier_hit_pages"]["ssd"] == before["tier_hit_pages"]["ssd"]
        assert after["fetched_segments"] > before["fetched_segments"]
        assert after["failed_fetches"] == 0
        assert min(answer.host_tokens for answer in again) > 500
        assert_nothing_left_behind(server)
    assert_same([*kept["first"][:2], *kept["questions"]], [*answers, *again])


async def flood(server: ServerProcess, prompts: list[list[int]], num_requests: int) -> list[str]:
    """Ask many times, and abort each request while it waits; returns why each one ended."""

    async def ask_and_abort(client: httpx.AsyncClient, number: int) -> str:
        rid = f"flood-{number:04}"
        tail = random_prompt(rid, 20)
        # If one is admitted all the same, it runs until it is aborted.
        prompt = [*prompts[number % len(prompts)], *tail]
        payload = request_payload(prompt, rid=rid, max_new_tokens=1500)
        asked = asyncio.create_task(client.post(f"{server.url}/generate", json=payload))
        # Some are aborted before they were looked up, some long after.
        await asyncio.sleep(0.02 * (number % 50))
        while not asked.done():
            await client.post(f"{server.url}/abort_request", json={"rid": rid})
            # A request that had not come yet is not known.
            await asyncio.wait([asked], timeout=2.0)
        meta = asked.result().json()["meta_info"]
        return str(meta["finish_reason"]["type"])

    many = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, trust_env=False, verify=False, limits=many) as client:
        return await asyncio.gather(*(ask_and_abort(client, number) for number in range(num_requests)))


def test_what_a_host_stored_in_a_bucket_outlives_it(
    tiny_models: dict[str, Path], kept: dict[str, list[Answer]]
) -> None:
    """Server and daemon of the first host are gone when the second one asks S3."""
    options = {"planner": "full-load", "bucket": f"url=s3://{BUCKET}/krul,lookup_timeout_s=5"}
    args = small_krul_server_args(POOL_TOKENS, options)
    answers: list[Answer] = []
    with local_s3() as env:
        with ForkedServer(tiny_models["float32"], args=args, env={**STRICT, **env}) as server:
            converse(server, "first", answers, 2, evict=True)
            assert "true" in backend(
                "flush", "--endpoint", settled_stats(server)["daemon"]["endpoint"], "--json"
            )
        with ForkedServer(tiny_models["float32"], args=args, env={**STRICT, **env}) as server:
            converse(server, "first", answers, 1, evict=False)
            stats = settled_stats(server)
            assert_nothing_left_behind(server)
    assert answers[-1].host_tokens > 500
    assert stats["tier_hit_pages"]["bucket"] > 0
    assert_same(kept["first"][:3], answers)


def test_a_flood_of_aborted_requests_that_waited_leaves_nothing(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    options = {
        "host_memory": 1500 * TOKEN_BYTES,
        "ssd_dir": str(tmp_path / "ssd"),
        "ssd_capacity": "1GiB",
        "ssd_timeout": 10.0,
    }
    prompts = [random_prompt(("flood", number), 320) for number in range(12)]
    one_at_a_time = ("--max-running-requests", "1")
    with krul_server(tiny_models["float32"], options, tmp_path / "server.log", one_at_a_time) as server:
        for prompt in prompts:
            ask(server, prompt, max_new_tokens=1)
        before = settled_stats(server)
        assert before["evicted_segments"] > 0
        with ThreadPoolExecutor() as clients:
            running = clients.submit(
                ask, server, random_prompt("long answer", 64), max_new_tokens=1500, rid="long"
            )
            reasons = asyncio.run(flood(server, prompts, 1000))
            httpx.post(f"{server.url}/abort_request", json={"rid": "long"}, timeout=60).raise_for_status()
            running.result()
        assert reasons == ["abort"] * 1000
        stats = settled_stats(server)
        # They were looked up, and what they would have used was on its way.
        assert stats["lookups"] > before["lookups"]
        assert stats["fetched_segments"] > before["fetched_segments"]
        assert_nothing_left_behind(server)
        httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
        stats = settled_stats(server)
        # A pin of a prefetch or of a lease would still hold its bytes.
        assert (stats["used_bytes"], stats["num_segments"], stats["pinned_bytes"]) == (0, 0, 0)
        answer = ask(server, prompts[0], max_new_tokens=4)
        assert (answer.device_tokens, answer.host_tokens) == (0, 0)


def test_a_daemon_that_dies_costs_hits_and_not_answers(
    tiny_models: dict[str, Path], kept: dict[str, list[Answer]], tmp_path: Path
) -> None:
    answers: dict[str, list[Answer]] = {name: [] for name in NAMES}
    with krul_server(tiny_models["float32"], {}, tmp_path / "server.log") as server:
        converse(server, "first", answers["first"], 2, evict=True)
        assert answers["first"][-1].host_tokens > 500
        settled_stats(server)
        os.kill(daemon_pid(server), signal.SIGKILL)
        converse(server, "first", answers["first"], 1, evict=True)
        assert answers["first"][-1].host_tokens == 0
        stats = wait_until_connected(server)
        assert (stats["daemon"]["lost"], stats["daemon"]["reconnects"]) == (1, 1)
        ask(server, random_prompt("keep", 200), sampling_params=KEPT)
        assert settled_stats(server)["pinned_bytes"] > 0
        # The new daemon knows nothing of before, and works.
        converse(server, "second", answers["second"], 2, evict=True)
        assert answers["second"][-1].host_tokens > 500
        assert_nothing_left_behind(server)
        said = re.findall(r"daemon at \S+ is (gone|back)", server.log_text())
        assert said == ["gone", "back"]
    assert_same(kept["first"][:3], answers["first"])
    assert_same(kept["second"][:2], answers["second"])


def test_servers_share_a_daemon_that_outlives_them(
    tiny_models: dict[str, Path], kept: dict[str, list[Answer]], tmp_path: Path
) -> None:
    answers: list[Answer] = []
    with running_daemon("--host-memory", "256MiB") as (runtime_dir, _):
        options = {"endpoint": str(runtime_dir), "host_memory": "auto"}
        for number in range(2):
            log_path = tmp_path / f"server-{number}.log"
            with krul_server(tiny_models["float32"], options, log_path) as server:
                converse(server, "third", answers, 2, evict=number == 0)
                assert_nothing_left_behind(server)
        listed = json.loads(backend("list", "--endpoint", str(runtime_dir), "--json"))
        assert listed["num_segments"] >= NUM_TURNS
        found = json.loads(backend("verify", "--endpoint", str(runtime_dir), "--json"))
        assert found["bad_segments"] == []
        assert found["num_blocks"] >= 4 * NUM_TURNS
    assert answers[2].device_tokens == 0
    assert answers[2].host_tokens > 500
    assert_same(kept["third"], answers)


def stored_turns(server: ServerProcess) -> int:
    """Of all replicas."""
    states = [state["krul"] for state in server.server_info()["internal_states"]]
    return sum(state["offload"]["turns"] - state["offload"]["pending"] for state in states)


def test_replicas_of_a_server_find_each_others_conversations(
    tiny_models: dict[str, Path], kept: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """Nothing is evicted: what comes from the host is what the other replica computed."""
    answers: list[Answer] = []
    with running_daemon("--host-memory", "256MiB") as (runtime_dir, _):
        options = {"endpoint": str(runtime_dir), "host_memory": "auto", "planner": "random"}
        args = (*small_krul_server_args(POOL_TOKENS, options), "--dp-size", "2")
        args = (*args, "--load-balance-method", "round_robin")
        env = {**STRICT, **WITH_PLUGIN, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        log_path = tmp_path / "replicas.log"
        with ForkedServer(tiny_models["float32"], args=args, env=env, log_path=log_path) as server:
            for _ in range(NUM_TURNS):
                num_stored = stored_turns(server)
                converse(server, "first", answers, 1, evict=False)
                deadline_s = time.monotonic() + 30.0
                while stored_turns(server) == num_stored:
                    assert time.monotonic() < deadline_s, "the turn was never stored"
                    time.sleep(0.05)
            assert len(server.server_info()["internal_states"]) == 2
    assert_same(kept["first"], answers)
    assert answers[1].device_tokens == 0
    assert answers[1].host_tokens > 500
    # Its own turn before the last is on the device, the other replica's last turn is not.
    assert answers[2].device_tokens > 500
    assert answers[2].host_tokens > 0


def test_a_daemon_that_is_not_there_stops_the_server(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    options = {"endpoint": str(tmp_path / "nothing"), "host_memory": "auto"}
    args = small_krul_server_args(POOL_TOKENS, options)
    server = ForkedServer(tiny_models["float32"], args=args, log_path=tmp_path / "server.log")
    with pytest.raises(ServerError):
        server.start()
    assert "no krul-backend answers" in server.log_text()
