"""What the server tests share: prompts, requests, and the state that must be left behind."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.app import BUNDLED_CONVERSATIONS
from demo.conversations import Conversation, load_conversations
from demo.player import Player, play_order
from demo.server import ServerProcess, default_device_args, wait_for_saves
from krul_sglang.cli.timed_answer import TurnResult

KRUL = ("--radix-cache-backend", "krul")
PAGE_SIZE = 16
POOL_TOKENS = 2560
"""Of a device pool that holds one conversation of ``play``, but no second one."""
NUM_TURNS = 5
"""Of a conversation of ``play``."""
TOGETHER = tuple(f"together {i}" for i in range(3))
"""Conversations of ``play_all`` that return at the same time."""
NGRAM = (
    *("--speculative-algorithm", "NGRAM"),
    *("--speculative-num-draft-tokens", "6"),
    # SGLang's default takes 2 GB.
    *("--speculative-ngram-capacity", "100000"),
)
MTP = (
    *("--speculative-algorithm", "NEXTN"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
"""Makes SGLang's own idle check end the server when a slot or a lock leaks."""
STRICT_ON_TWO_CORES = {**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
"""For two ranks: each has a core of its own."""


def small_krul_server_args(pool_tokens: int, options: dict[str, Any]) -> tuple[str, ...]:
    """A float32 server with a device pool of so many tokens, and krul with these options.

    Loads are waited for: computing again is sooner for so small a model whenever this machine stalls.
    """
    defaults = {"host_memory": "256MiB", "load_timeout": 2.0}
    return (
        *("--dtype", "float32"),
        # On a GPU SGLang's own choice may be one for 16 bits only.
        *(() if default_device_args() else ("--attention-backend", "triton")),
        *("--page-size", str(PAGE_SIZE)),
        *("--max-total-tokens", str(pool_tokens)),
        *("--unified-cache-external-linker-config", json.dumps(defaults | options)),
        "--enable-cache-report",
        *KRUL,
    )


def bases_server_args(
    pool_tokens: int, cache_dir: Path, *, error_budget: float, **options: Any
) -> tuple[str, ...]:
    """As ``small_krul_server_args``, with turns stored in the bases of ``cache_dir``, without fast copies
    beside them; all that is stored of a prefix is loaded."""
    bases = {"strategy": "subspace", "error_budget": error_budget, "cache_dir": str(cache_dir)}
    given = {**bases, "planner": "full-load", "fast_copies": "never", **options}
    return small_krul_server_args(pool_tokens, given)


@dataclass(frozen=True)
class Answer:
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    device_tokens: int
    host_tokens: int


def random_prompt(seed: object, num_tokens: int) -> list[int]:
    """Token ids above the special tokens of the tiny model."""
    rng = random.Random(repr(seed))
    return [rng.randrange(300, 500) for _ in range(num_tokens)]


def request_payload(input_ids: list[int], *, max_new_tokens: int = 16, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, **fields}


def ask(server: ServerProcess, input_ids: list[int], **fields: Any) -> Answer:
    result = server.post_json("/generate", request_payload(input_ids, **fields))
    meta = result["meta_info"]
    cached = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
    return Answer(
        output_ids=tuple(result["output_ids"]),
        logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
        device_tokens=cached["device"],
        host_tokens=cached["host"],
    )


LOGPROBS_WITHIN = 2e-4
"""How far logprobs of an fp32 model may differ: recomputed KV is rounded differently, by about 1e-6 of its
size."""


def assert_same(
    expected: Sequence[Answer], actual: Sequence[Answer], within: float = LOGPROBS_WITHIN
) -> None:
    """The same tokens, and logprobs ``within`` so much."""
    for wanted, found in zip(expected, actual, strict=True):
        assert found.output_ids == wanted.output_ids
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=within)


def push_out(server: ServerProcess, *, num_tokens: int, seed: object, **fields: Any) -> None:
    """Fill the device pool with other prompts, so that everything idle is stored and evicted from it.
    ``fields`` are of their requests."""
    length = 600
    for i in range(num_tokens // length + 1):
        # Else the scheduler waits for what is being stored only as long as it is worth with a tiny model.
        if i % 3 == 0:
            wait_for_saves(server)
        ask(server, random_prompt(("noise", seed, i), length), max_new_tokens=2, **fields)
    wait_for_saves(server)


def play(server: ServerProcess, name: str, *, evict: bool) -> list[Answer]:
    """One conversation of ``NUM_TURNS`` turns; between them everything leaves the pool, or nothing."""
    answers: list[Answer] = []
    history = random_prompt(name, 611)
    for turn in range(NUM_TURNS):
        answers.append(ask(server, history, max_new_tokens=12))
        history = [*history, *answers[-1].output_ids, *random_prompt((name, turn), 37)]
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=(name, turn))
    return answers


def partial_hit(server: ServerProcess, *, evict: bool) -> Answer:
    """The first third of a conversation is in the pool, the rest is not."""
    prompt = random_prompt("partial", 900)
    ask(server, prompt, max_new_tokens=1)
    if evict:
        push_out(server, num_tokens=POOL_TOKENS, seed="partial")
        ask(server, prompt[:300], max_new_tokens=1)
    return ask(server, [*prompt, *random_prompt("more", 20)], max_new_tokens=12)


def return_together(server: ServerProcess, *, evict: bool) -> list[Answer]:
    """Conversations that come back at the same time, so that one batch restores several."""
    prompts = [random_prompt(name, 400 + 130 * i) for i, name in enumerate(TOGETHER)]
    for prompt in prompts:
        ask(server, prompt, max_new_tokens=1)
        wait_for_saves(server)
    if evict:
        push_out(server, num_tokens=POOL_TOKENS, seed="together")
    with ThreadPoolExecutor(len(prompts)) as pool:
        # The first one keeps the scheduler busy, so that the others wait for one batch.
        return list(pool.map(lambda prompt: ask(server, [*prompt, *prompt[:19]], max_new_tokens=12), prompts))


@dataclass(frozen=True)
class Played:
    """The answers of ``play_all``."""

    turns: list[Answer]
    partial: Answer
    together: list[Answer]

    def all(self) -> list[Answer]:
        return [*self.turns, self.partial, *self.together]


def play_all(server: ServerProcess, *, evict: bool) -> Played:
    """Turns one after another, a prefix half on the device, and conversations that return together."""
    return Played(
        play(server, "conversation", evict=evict),
        partial_hit(server, evict=evict),
        return_together(server, evict=evict),
    )


def recall_facts(server: ServerProcess, num_conversations: int) -> tuple[list[bool], int]:
    """Play bundled conversations; for each asked fact whose history came from the host, whether it was right.

    Also the number of facts that were asked for after the first turn.
    """
    bundled = load_conversations(BUNDLED_CONVERSATIONS)
    conversations = bundled.select(num_conversations=num_conversations, turns=None)
    expected = {
        (conversation.conversation_id, number): turn.expected
        for conversation in conversations
        for number, turn in enumerate(conversation.turns, start=1)
        if number > 1 and turn.expected is not None
    }
    with Player(server.url, max_tokens=48) as player:
        results = {(turn.conversation, turn.turn): turn for turn in play_chats(player, conversations)}
    restored = [key for key in expected if results[key].host_tokens > results[key].prompt_tokens // 2]
    return [expected[key] in results[key].answer for key in restored], len(expected)


def play_chats(
    player: Player,
    conversations: Sequence[Conversation],
    reference_answers: Mapping[tuple[str, int], str] | None = None,
) -> Iterator[TurnResult]:
    """Ask every turn in the demo's order.

    The history of a prompt holds ``reference_answers``; None takes this server's own answers.
    """
    own_answers: dict[tuple[str, int], str] = {}
    history = own_answers if reference_answers is None else reference_answers
    for conversation, turn in play_order(conversations):
        result = player.ask(conversation, turn, history)
        own_answers[conversation.conversation_id, turn] = result.answer
        yield result


@dataclass(frozen=True)
class Drafted:
    """An answer that ``num_forwards`` verified, and of which so many tokens were drafted."""

    output_ids: tuple[int, ...]
    host_tokens: int
    num_forwards: int
    num_accepted: int


def ask_drafted(server: ServerProcess, input_ids: list[int], *, max_new_tokens: int) -> Drafted:
    result = server.post_json("/generate", request_payload(input_ids, max_new_tokens=max_new_tokens))
    meta = result["meta_info"]
    host_tokens = (meta.get("cached_tokens_details") or {"host": 0})["host"]
    counts = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    return Drafted(tuple(result["output_ids"]), host_tokens, *counts)


def ask_again(server: ServerProcess, turns: list[Answer], *, evict: bool) -> list[Drafted]:
    """The conversation that ``play`` plays, with the answers that it got as its history."""
    again = []
    history = random_prompt("conversation", 611)
    for number, turn in enumerate(turns):
        again.append(ask_drafted(server, history, max_new_tokens=12))
        history = [*history, *turn.output_ids, *random_prompt(("conversation", number), 37)]
        if evict:
            push_out(server, num_tokens=POOL_TOKENS, seed=("again", number))
    return again


def abort_side_by_side(server: ServerProcess, num_prompts: int, *, max_new_tokens: int) -> None:
    """Abort requests that come back from the host: some while they run, some while they wait with a lease."""
    prompts = {f"abort-{i}": random_prompt(("abort", i), 600) for i in range(num_prompts)}
    for prompt in prompts.values():
        ask(server, prompt, max_new_tokens=1)
    push_out(server, num_tokens=POOL_TOKENS, seed="abort")

    def post(path: str, payload: dict[str, Any]) -> int:
        return httpx.post(f"{server.url}{path}", json=payload, timeout=120, trust_env=False).status_code

    with ThreadPoolExecutor(num_prompts) as pool:
        futures = [
            pool.submit(post, "/generate", request_payload(prompt, max_new_tokens=max_new_tokens, rid=rid))
            for rid, prompt in prompts.items()
        ]
        time.sleep(1.0)
        for rid in prompts:
            assert post("/abort_request", {"rid": rid}) == 200
            time.sleep(0.05)
        for future in futures:
            future.result()


def krul_stats(server: ServerProcess) -> dict[str, Any]:
    return dict(server.server_info()["internal_states"][0]["krul"])


def settled_stats(server: ServerProcess) -> dict[str, Any]:
    """Krul's counters once no copy is under way."""
    return wait_for_saves(server)[0]


def wait_until_idle(server: ServerProcess, timeout_s: float = 60.0) -> None:
    """The server answers a new request at once when nothing runs any more; its counters then settle."""
    deadline = time.monotonic() + timeout_s
    while True:
        stats = settled_stats(server)
        if stats["num_leases"] == 0:
            return
        assert time.monotonic() < deadline, stats
        time.sleep(0.1)


def wait_until_written(server: ServerProcess) -> None:
    """Wait until something that the server has stored is in a lower tier."""
    wait_until(
        lambda: any(tier["written_segments"] for tier in settled_stats(server)["tiers"]),
        "a turn to be written",
    )


def daemon_pid(server: ServerProcess) -> int:
    """Of the daemon that the server started last."""
    return int(re.findall(r"krul.*daemon(?: restarted, process)? (\d+)", server.log_text())[-1])


def wait_until_connected(server: ServerProcess, timeout_s: float = 60.0) -> dict[str, Any]:
    wait_until(lambda: krul_stats(server)["daemon"]["is_connected"], "the daemon to come back", timeout_s)
    return krul_stats(server)


def assert_aborts_leave_nothing(server: ServerProcess, *, can_fail: bool) -> None:
    """No lease outlives aborted requests; unless loads ``can_fail``, nothing at all does."""
    abort_side_by_side(server, 4, max_new_tokens=1000)
    wait_until(lambda: not settled_stats(server)["num_leases"], "leases of aborted requests")
    if not can_fail:
        assert_nothing_left_behind(server)


def assert_nothing_left_behind(server: ServerProcess, failed_batches: int = 0) -> None:
    """No lease, lock, reservation or slot outlives the requests, and the bytes add up.

    ``failed_batches`` of loads were made to fail since the server started.
    """
    stats = settled_stats(server)
    assert stats["num_leases"] == 0
    assert stats["waiting_leases"] == 0
    assert stats["num_reservations"] == 0
    assert stats["used_bytes"] + stats["free_bytes"] == stats["capacity_bytes"]
    assert stats["stored_bytes"] <= stats["used_bytes"] <= stats["capacity_bytes"]
    assert "error" not in stats["offload"]["dropped_turns"]
    assert stats["offload"]["failed_encodings"] == 0
    assert (stats["offload"]["waiting_copies"], stats["offload"]["waiting_bytes"]) == (0, 0)
    assert stats["load"]["failed_batches"] == failed_batches
    # The idle check of SGLang (strict here) has run by now: a leak would have ended the server.
    ask(server, random_prompt("alive", 20), max_new_tokens=1)
    settled_stats(server)
    # Without FFmpeg SGLang reads sounds by another library, and quotes why.
    log = re.sub("torchcodec AudioDecoder failed.*?falling back", "", server.log_text(), flags=re.DOTALL)
    for sign in ("memory leak", "use-after-free", "double free", "Traceback"):
        assert sign not in log, sign


def wait_for_probes(server: ServerProcess, num_probes: int, timeout_s: float = 60.0) -> int:
    """Wait until an idle server has run more probes than ``num_probes``; returns how many."""

    def probes() -> int:
        return int(krul_stats(server)["compression"]["budget"]["probes"])

    wait_until(lambda: probes() > num_probes, f"a probe after {num_probes}", timeout_s)
    return probes()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
