"""A real server with little memory and a disk: what requests and applications say of the future is heeded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import ServerProcess, find_free_port
from krul_backend.daemon.client.admin import AdminClient
from krul_sglang.hints import HintClient, tenant_of
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    STRICT,
    STRICT_ON_TWO_CORES,
    Answer,
    ask,
    assert_nothing_left_behind,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
)
from tests.support.store_builders import wait_until

POOL_TOKENS = 2048
TOKEN_BYTES = 4096  # 4 layers x 2 KV heads x 64 channels x (K, V) x 4 bytes
HOST_TOKENS = 3000
PROMPT_TOKENS = 600
STORED_TOKENS = 592
"""Whole pages of a prompt and an answer."""


def server_args(ssd_dir: Path, hints_port: int) -> tuple[str, ...]:
    options = {
        "host_memory": HOST_TOKENS * TOKEN_BYTES,
        "ssd_dir": str(ssd_dir),
        "ssd_capacity": "2GiB",
        "ssd_timeout": 10.0,
        "planner": "full-load",
        "hints_port": hints_port,
    }
    return small_krul_server_args(POOL_TOKENS, options)


@pytest.fixture(scope="module")
def hints_port() -> int:
    return find_free_port()


@pytest.fixture(scope="module")
def server(
    tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, hints_port: int
) -> Iterator[ServerProcess]:
    args = server_args(tmp_path_factory.mktemp("ssd"), hints_port)
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT) as running:
        yield running


@pytest.fixture
def hints(server: ServerProcess, hints_port: int) -> Iterator[HintClient]:
    token_file = Path(settled_stats(server)["daemon"]["endpoint"]) / "hints.token"
    with HintClient(f"http://127.0.0.1:{hints_port}", token_file) as client:
        yield client
    assert_nothing_left_behind(server)


def envelope(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


def fill_host_memory(server: ServerProcess, seed: object) -> None:
    """Store so many other conversations that everything leaves host memory which nothing keeps there."""
    for number in range(2 * HOST_TOKENS // PROMPT_TOKENS):
        ask(server, random_prompt(("fill", seed, number), PROMPT_TOKENS), max_new_tokens=2)
        # A turn that ends while others wait to be stored may be skipped.
        settled_stats(server)


def come_back(server: ServerProcess, prompt: list[int]) -> tuple[Answer, int]:
    """The prompt's answer, and how many of its pages were on the disk alone."""
    before = settled_stats(server)["tier_hit_pages"]["ssd"]
    answer = ask(server, prompt, max_new_tokens=2)
    return answer, settled_stats(server)["tier_hit_pages"]["ssd"] - before


def test_an_action_keeps_a_conversation_that_would_leave_host_memory(
    server: ServerProcess, hints: HintClient
) -> None:
    kept, other = random_prompt("kept", PROMPT_TOKENS), random_prompt("other", PROMPT_TOKENS)
    cold = ask(server, kept, max_new_tokens=2, session_id="kept", kv_hints=envelope("krul.hint", ttl_s=600))
    ask(server, other, max_new_tokens=2)
    assert settled_stats(server)["pinned_bytes"] > 0
    fill_host_memory(server, "kept")
    again, num_below = come_back(server, kept)
    assert (again.device_tokens, again.host_tokens, num_below) == (0, STORED_TOKENS, 0)
    assert again.output_ids == cold.output_ids
    again, num_below = come_back(server, other)
    assert (again.host_tokens, num_below) == (STORED_TOKENS, STORED_TOKENS // 16)
    # A later hint ends it.
    assert hints.send("kept", ttl_s=0) == 0
    assert settled_stats(server)["pinned_bytes"] == 0


def test_a_priority_keeps_a_conversation_too(server: ServerProcess, hints: HintClient) -> None:
    prompt = random_prompt("dear", PROMPT_TOKENS)
    ask(server, prompt, max_new_tokens=2, kv_hints=envelope("kv.retain", priority=100))
    fill_host_memory(server, "dear")
    again, num_below = come_back(server, prompt)
    assert (again.host_tokens, num_below) == (STORED_TOKENS, 0)


def test_a_conversation_is_prefetched_before_its_request(server: ServerProcess, hints: HintClient) -> None:
    prompt = random_prompt("agent", PROMPT_TOKENS)
    cold = ask(server, prompt, max_new_tokens=2, session_id="agent")
    fill_host_memory(server, "agent")
    before = settled_stats(server)
    assert hints.send("agent", prefetch=True) == STORED_TOKENS // 16
    wait_until(lambda: settled_stats(server)["fetched_segments"] > before["fetched_segments"])
    assert settled_stats(server)["comeback_pages"] - before["comeback_pages"] == STORED_TOKENS // 16
    again, num_below = come_back(server, prompt)
    assert (again.device_tokens, again.host_tokens, num_below) == (0, STORED_TOKENS, 0)
    assert again.output_ids == cold.output_ids


def test_a_conversation_comes_back_by_itself_when_it_is_expected(
    server: ServerProcess, hints: HintClient
) -> None:
    prompt = random_prompt("timed", PROMPT_TOKENS)
    params = {"max_new_tokens": 2, "temperature": 0, "custom_params": {"krul_hints": {"next_use_s": 3600}}}
    ask(server, prompt, session_id="timed", sampling_params=params)
    fill_host_memory(server, "timed")
    before = settled_stats(server)
    # The tool ends sooner than was thought.
    assert hints.send("timed", next_use_s=1.0) is not None
    wait_until(lambda: settled_stats(server)["fetched_segments"] > before["fetched_segments"])
    assert settled_stats(server)["comeback_pages"] - before["comeback_pages"] == STORED_TOKENS // 16
    again, num_below = come_back(server, prompt)
    assert (again.host_tokens, num_below) == (STORED_TOKENS, 0)


def test_what_is_dropped_is_forgotten(server: ServerProcess, hints: HintClient) -> None:
    by_name, by_request = random_prompt("by name", PROMPT_TOKENS), random_prompt("by request", PROMPT_TOKENS)
    ask(server, by_name, max_new_tokens=2, session_id="dropped")
    ask(server, by_request, max_new_tokens=2, kv_hints=envelope("krul.hint", drop=True))
    settled_stats(server)
    assert hints.send("dropped", drop=True) == 0
    assert hints.send("dropped", drop=True) is None
    push_out(server, num_tokens=POOL_TOKENS, seed="dropped")
    for prompt in (by_name, by_request):
        again = ask(server, prompt, max_new_tokens=2)
        assert (again.device_tokens, again.host_tokens) == (0, 0)


def test_a_closed_session_leaves_host_memory_first(server: ServerProcess, hints: HintClient) -> None:
    fill_host_memory(server, "closed")
    prompt = random_prompt("closed", PROMPT_TOKENS)
    ask(server, prompt, max_new_tokens=2, session_id="closed", extra_key="team")
    wait_until(lambda: settled_stats(server)["tiers"][0]["queued_segments"] == 0)
    before = settled_stats(server)["hints"]
    assert tiers_of_tenant(server, "team") == ("dram", "ssd")
    assert server_post(server, "/close_session", {"session_id": "closed"}) == 200
    wait_until(lambda: settled_stats(server)["hints"] == before + 1)
    # It was used last, and leaves for the next turn that is stored.
    ask(server, random_prompt("next", PROMPT_TOKENS), max_new_tokens=2)
    settled_stats(server)
    assert tiers_of_tenant(server, "team") == ("ssd",)
    # Of a session that nobody knows nothing is said.
    assert server_post(server, "/close_session", {"session_id": "nobody"}) == 200


def test_a_session_of_sglangs_own_has_a_name_too(server: ServerProcess, hints: HintClient) -> None:
    session = server.post_json("/open_session", {"capacity_of_str_len": 1000})
    prompt = random_prompt("own session", PROMPT_TOKENS)
    ask(server, prompt, max_new_tokens=2, session_params={"id": session})
    settled_stats(server)
    before = settled_stats(server)["hints"]
    assert hints.send(session, priority=60) == STORED_TOKENS // 16
    assert server_post(server, "/close_session", {"session_id": session}) == 200
    wait_until(lambda: settled_stats(server)["hints"] == before + 2)


def test_a_name_stands_for_the_kv_of_all_ranks(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    port = find_free_port()
    args = (*server_args(tmp_path, port), "--tp", "2")
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT_ON_TWO_CORES) as server:
        prompt = random_prompt("two ranks", PROMPT_TOKENS)
        cold = ask(server, prompt, max_new_tokens=2, session_id="agent")
        fill_host_memory(server, "two ranks")
        before = settled_stats(server)
        token_file = Path(before["daemon"]["endpoint"]) / "hints.token"
        with HintClient(f"http://127.0.0.1:{port}", token_file) as hints:
            assert hints.send("agent", prefetch=True) == STORED_TOKENS // 16
            wait_until(lambda: settled_stats(server)["fetched_segments"] - before["fetched_segments"] == 2)
            assert settled_stats(server)["comeback_pages"] == 2 * STORED_TOKENS // 16
            again, num_below = come_back(server, prompt)
            assert (again.host_tokens, num_below) == (STORED_TOKENS, 0)
            assert again.output_ids == cold.output_ids
            assert hints.send("agent", drop=True) == 0
            assert hints.send("agent", drop=True) is None
        assert_nothing_left_behind(server)


def tiers_of_tenant(server: ServerProcess, extra_key: str) -> tuple[str, ...]:
    """Where the only segment of a tenant lies."""
    with AdminClient(settled_stats(server)["daemon"]["endpoint"]) as admin:
        (info,) = (info for info in admin.list_segments() if info.tenant == tenant_of(extra_key, None))
    return info.tiers


def test_the_openai_endpoint_passes_names_and_hints(server: ServerProcess, hints: HintClient) -> None:
    body = {
        "model": "default",
        "prompt": random_prompt("openai", PROMPT_TOKENS),
        "max_tokens": 2,
        "session_id": "openai",
        "custom_params": {"krul_hints": {"ttl_s": 60}},
    }
    assert server_post(server, "/v1/completions", body) == 200
    assert settled_stats(server)["pinned_bytes"] > 0
    assert hints.send("openai", ttl_s=0) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_hints": envelope("krul.hint", ttl_s="soon")},
        {"kv_hints": envelope("krul.hint", version="9.9", ttl_s=1)},
        {"kv_hints": envelope("krul.hint", next_use_s=-1, priority=1e300)},
        {"kv_hints": envelope("krul.hint", drop=True, demote=True)},
        {"kv_hints": envelope("krul.hint", **{"x" * 1000: [[[[]]]]})},
        {"kv_hints": envelope("kv.retain", directives=[{"start": 0, "priority": 5}])},
        {"session_id": "n" * 1000},
        {"custom_params": {"krul_hints": {"ttl_s": "soon"}}},
        {"custom_params": {"krul_hints": "soon"}},
        {"custom_params": {"krul_keep_s": True}},
    ],
)
def test_nonsense_never_fails_a_request(
    server: ServerProcess, hints: HintClient, fields: dict[str, Any]
) -> None:
    def num_ignored() -> int:
        return sum(settled_stats(server)["request_hints"]["ignored"].values())

    before = num_ignored()
    custom_params = fields.pop("custom_params", None)
    sampling = {"max_new_tokens": 2, "temperature": 0, "custom_params": custom_params}
    answer = ask(server, random_prompt("nonsense", 100), sampling_params=sampling, **fields)
    assert len(answer.output_ids) == 2
    assert num_ignored() == before + 1


def test_actions_of_others_are_let_be(server: ServerProcess, hints: HintClient) -> None:
    before = settled_stats(server)["request_hints"]
    kv_hints = envelope("kv.fetch", source_control_endpoint="tcp://nobody:1", block_hashes=[1])
    ask(server, random_prompt("others", 100), max_new_tokens=2, kv_hints=kv_hints)
    assert settled_stats(server)["request_hints"] == before


def server_post(server: ServerProcess, path: str, body: dict[str, Any]) -> int:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, trust_env=False).status_code
