"""One server with a small pool and a small arena: isolation, partial hits, budget, faults, aborts."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from demo.server import ServerProcess
from krul_sglang.cli.doctor import check_server
from krul_sglang.cli.why import fetch_reasons, pieces_of, sentences
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    KRUL,
    STRICT,
    abort_side_by_side,
    ask,
    assert_nothing_left_behind,
    krul_stats,
    push_out,
    random_prompt,
    request_payload,
    settled_stats,
    small_krul_server_args,
    wait_until_idle,
)

PAGE_SIZE = 16
POOL_TOKENS = 2048
TOKEN_BYTES = 4096  # 4 layers x 2 KV heads x 64 channels x (K, V) x 4 bytes
HOST_BYTES = 6000 * TOKEN_BYTES


@pytest.fixture(scope="module")
def server(tiny_models: dict[str, Path]) -> Iterator[ServerProcess]:
    args = (
        *("--dtype", "float32"),
        *("--page-size", str(PAGE_SIZE)),
        *("--max-total-tokens", str(POOL_TOKENS)),
        *(
            "--unified-cache-external-linker-config",
            # By last use: what a segment is worth by value depends on measured times.
            f'{{"host_memory": {HOST_BYTES}, "planner": "full-load", "eviction": "lru"}}',
        ),
        "--enable-cache-report",
        *KRUL,
    )
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left_behind(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[None]:
    flush(server)
    failed_before = krul_stats(server)["load"]["failed_batches"]
    yield
    # A damaged block makes one load fail.
    is_damaging = "corrupted" in request.node.name
    assert_nothing_left_behind(server, failed_batches=failed_before + is_damaging)


def flush(server: ServerProcess) -> None:
    settled_stats(server)
    assert httpx.post(f"{server.url}/flush_cache", timeout=60, trust_env=False).status_code == 200


def test_the_budget_is_the_one_configured(server: ServerProcess) -> None:
    assert krul_stats(server)["capacity_bytes"] == HOST_BYTES


def test_stored_bytes_are_the_raw_bytes_of_the_pages(server: ServerProcess) -> None:
    ask(server, random_prompt("bytes", 333), max_new_tokens=10)
    stats = settled_stats(server)
    # The last output token is never fed back, so 342 tokens have KV: 21 whole pages.
    assert stats["stored_tokens"] == 336
    assert stats["stored_bytes"] == 336 * TOKEN_BYTES
    assert stats["num_segments"] == 1


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_tenants_with_the_same_text_never_share(server: ServerProcess, field: str) -> None:
    prompt = random_prompt(("tenants", field), 600)
    ask(server, prompt, **{field: "tenant-a"})
    push_out(server, num_tokens=POOL_TOKENS, seed=field)
    assert ask(server, prompt, **{field: "tenant-b"}).host_tokens == 0
    assert ask(server, prompt).host_tokens == 0
    again = ask(server, prompt, **{field: "tenant-a"})
    assert (again.device_tokens, again.host_tokens) == (0, 592), krul_stats(server)


def test_partial_hit_on_device_and_host(server: ServerProcess) -> None:
    prompt = random_prompt("partial", 700)
    cold = ask(server, prompt)
    push_out(server, num_tokens=POOL_TOKENS, seed="partial")
    short = ask(server, prompt[:330], max_new_tokens=1)
    assert (short.device_tokens, short.host_tokens) == (0, 320)
    whole = ask(server, prompt)
    assert (whole.device_tokens, whole.host_tokens) == (320, 368)
    assert whole.output_ids == cold.output_ids


def test_a_turn_is_stored_once_and_grows_by_segments(server: ServerProcess) -> None:
    history = random_prompt("grows", 400)
    segments = []
    for turn in range(4):
        answer = ask(server, history)
        history += [*answer.output_ids, *random_prompt(("more", turn), 60)]
        push_out(server, num_tokens=POOL_TOKENS, seed=("grows", turn))
        ask(server, random_prompt("other", 20), max_new_tokens=1)
        segments.append(settled_stats(server)["offload"]["tokens"])
    # The noise is the same number of tokens each time; each turn adds its own new pages and no old ones.
    added = [after - before for before, after in itertools.pairwise(segments)]
    assert len(set(added)) <= 2
    assert max(added) - min(added) <= PAGE_SIZE


def test_the_doctor_finds_nothing_wrong_with_this_server(server: ServerProcess) -> None:
    rows = {row.check: row for row in check_server(server.url)}
    assert {row.state for row in rows.values()} == {"ok"}, rows
    # Its model computes in float32, which FlashInfer does not.
    assert "heads by torch" in rows["server: kernels"].found
    assert "scatter by torch" in rows["server: kernels"].found


def told_of(server: ServerProcess, rid: str) -> list[str]:
    """What ``krul-sglang why`` says of a request."""
    (found,) = fetch_reasons(server.url, rid=rid, last=1, api_key=None, timeout_s=30)
    assert sum(piece.end - piece.first for piece in pieces_of(found[0])) == found[0].num_tokens
    return sentences(*found)


def test_a_restored_prompt_says_where_its_tokens_came_from(server: ServerProcess) -> None:
    prompt = random_prompt("where from", 700)
    ask(server, prompt, max_new_tokens=1)
    push_out(server, num_tokens=POOL_TOKENS, seed="where from")
    ask(server, prompt[:330], max_new_tokens=1)
    ask(server, [*prompt[:600], *random_prompt("another end", 50)], max_new_tokens=1, rid="half")
    on_device, loaded, parted = told_of(server, "half")
    assert on_device == "Tokens 0 to 319 were on the device."
    assert loaded == "Tokens 320 to 591 came from dram."
    assert parted.startswith(
        "Tokens 592 to 649 were computed: the prompt parts from what was stored at token 6"
    )
    flush(server)
    ask(server, prompt, max_new_tokens=1, rid="flushed")
    assert told_of(server, "flushed")[0] == (
        "Tokens 0 to 687 were computed: they were stored, and a flush dropped them."
    )


def test_flush_leaves_nothing_stale(server: ServerProcess) -> None:
    prompt = random_prompt("flush", 500)
    cold = ask(server, prompt)
    flush(server)
    stats = settled_stats(server)
    assert (stats["num_segments"], stats["stored_bytes"], stats["used_bytes"]) == (0, 0, 0)
    again = ask(server, prompt)
    assert (again.device_tokens, again.host_tokens) == (0, 0)
    assert again.output_ids == cold.output_ids


def test_a_full_arena_lets_whole_conversations_go_in_order(server: ServerProcess) -> None:
    prompts = [random_prompt(("full", i), 600) for i in range(14)]
    evicted_before = krul_stats(server)["evicted_segments"]
    for prompt in prompts:
        ask(server, prompt, max_new_tokens=1)
        stats = settled_stats(server)
        assert stats["used_bytes"] <= HOST_BYTES
    assert stats["evicted_segments"] - evicted_before == len(prompts) - HOST_BYTES // (592 * TOKEN_BYTES)
    push_out(server, num_tokens=POOL_TOKENS, seed="full")
    assert ask(server, prompts[0], max_new_tokens=1).host_tokens == 0
    # Four of the noise prompts took the place of four more; the newest of ours are still there.
    assert ask(server, prompts[-1], max_new_tokens=1).host_tokens == 592


def test_a_corrupted_block_is_a_miss_and_not_an_answer(server: ServerProcess) -> None:
    prompt = random_prompt("corrupt", 600)
    cold = ask(server, prompt)
    push_out(server, num_tokens=POOL_TOKENS, seed="corrupt")
    before = settled_stats(server)
    flip_bytes_of_the_arena(server)
    again = ask(server, prompt)
    # It was promised, then found damaged by its reader, and recomputed.
    assert (again.device_tokens, again.host_tokens) == (0, 592)
    assert again.output_ids == cold.output_ids
    assert again.logprobs == pytest.approx(cold.logprobs, abs=2e-4)
    after = settled_stats(server)
    assert after["corrupted_segments"] == before["corrupted_segments"] + 1
    assert rescued_requests(after) == rescued_requests(before) + 1
    # The bad copy is gone and the fresh one restores again.
    push_out(server, num_tokens=POOL_TOKENS, seed="corrupt again")
    assert ask(server, prompt).host_tokens == 592


def rescued_requests(stats: dict[str, Any]) -> int:
    """Requests whose loads failed and that were recomputed."""
    count: int = stats["restore"]["forward"]["rescued_requests"]
    return count


def test_disconnect_while_a_restored_request_decodes(server: ServerProcess) -> None:
    prompt = random_prompt("disconnect", 600)
    ask(server, prompt)
    push_out(server, num_tokens=POOL_TOKENS, seed="disconnect")
    payload = request_payload(prompt, max_new_tokens=1000, stream=True)
    with httpx.stream("POST", f"{server.url}/generate", json=payload, timeout=60, trust_env=False) as reply:
        next(reply.iter_lines())
    wait_until_idle(server)
    push_out(server, num_tokens=POOL_TOKENS, seed="after disconnect")
    assert ask(server, prompt).host_tokens == 592


def test_abort_of_waiting_and_running_requests(server: ServerProcess) -> None:
    # 600 + 600 tokens each: the pool holds one or two at a time, the others wait.
    abort_side_by_side(server, 6, max_new_tokens=600)
    wait_until_idle(server)


def test_many_conversations_at_once_in_a_pool_for_two(server: ServerProcess) -> None:
    def converse(index: int) -> int:
        history = random_prompt(("many", index), 350)
        host_tokens = 0
        for turn in range(4):
            answer = ask(server, history, max_new_tokens=24)
            host_tokens += answer.host_tokens
            history += [*answer.output_ids, *random_prompt(("turn", index, turn), 40)]
        return host_tokens

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(converse, range(8))) > 0


def flip_bytes_of_the_arena(server: ServerProcess) -> None:
    """Invert one byte in every 512 of the arena, from outside, as a stray write would."""
    for process in psutil.Process(server.pid).children(recursive=True):
        directory = Path(f"/proc/{process.pid}/fd")
        for entry in directory.iterdir():
            if entry.is_symlink() and "memfd:krul-arena" in os.readlink(entry):
                with entry.open("r+b") as file, mmap.mmap(file.fileno(), HOST_BYTES) as arena:
                    for offset in range(0, HOST_BYTES, 512):
                        arena[offset] ^= 0xFF
                return
    raise AssertionError("no process of the server holds an arena")


def test_misses_are_explained(tiny_models: dict[str, Path]) -> None:
    """Through a link that is slower than computing, with host memory for six prompts."""
    slow = {"link_mbs": 0.5, "max_head_tokens": PAGE_SIZE, "store_full_tail": True}
    options = {"host_memory": 3600 * TOKEN_BYTES, "eviction": "lru", **slow}
    args = small_krul_server_args(POOL_TOKENS, options)
    first, second = random_prompt("first", 600), random_prompt("second", 600)
    with ForkedServer(tiny_models["float32"], args=args, env=STRICT) as server:
        ask(server, first, max_new_tokens=1, rid="new")
        ask(server, first, max_new_tokens=1, rid="again")
        answer = ask(server, second, max_new_tokens=40)
        settled_stats(server)
        other = 300 + (answer.output_ids[9] == 300)
        changed = [*second, *answer.output_ids[:9], other, *random_prompt("changed", 40)]
        ask(server, changed, max_new_tokens=1, rid="parted")
        push_out(server, num_tokens=3000, seed="misses")
        ask(server, first, max_new_tokens=1, rid="evicted")
        ask(server, random_prompt(("noise", "misses", 2), 600), max_new_tokens=1, rid="sooner")
        told = {rid: told_of(server, rid) for rid in ("new", "again", "parted", "evicted", "sooner")}
    end = "Tokens 592 to 599 were computed: the last token always is, and only whole pages are restored."
    assert told.pop("parted")[1].startswith(
        "Tokens 608 to 649 were computed: the prompt parts from what was stored at token 609. After "
    )
    assert told == {
        "new": ["Tokens 0 to 599 were computed: nothing that was stored goes on like this."],
        "again": ["Tokens 0 to 591 were on the device.", end],
        "evicted": [
            "Tokens 0 to 591 were computed: they were stored, and have left every tier since, because others "
            "needed the room.",
            end,
        ],
        "sooner": [
            "Tokens 0 to 591 were computed: they were stored, but computing them was planned to be sooner "
            "than loading them.",
            end,
        ],
    }
