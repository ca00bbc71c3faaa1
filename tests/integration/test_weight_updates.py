"""Weights that change under a running server: KV of the old ones is never found again, by nobody."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.server import ServerError, ServerProcess
from tests.support.daemon_process import running_daemon, start_daemon
from tests.support.forked_server import ForkedServer
from tests.support.scenario import (
    STRICT,
    Answer,
    ask,
    assert_nothing_left_behind,
    assert_same,
    krul_stats,
    push_out,
    random_prompt,
    settled_stats,
    small_krul_server_args,
)
from tests.support.tiny_model import build_tiny_model

POOL_TOKENS = 2048
PROMPT = random_prompt("weights", 600)
STORED_TOKENS = 592


@contextmanager
def krul_server(model: Path, runtime_dir: Path, log_path: Path) -> Iterator[ServerProcess]:
    options = {"planner": "full-load", "endpoint": str(runtime_dir), "host_memory": "auto"}
    args = (*small_krul_server_args(POOL_TOKENS, options), "--enable-streaming-session")
    with ForkedServer(model, args=args, env=STRICT, log_path=log_path) as server:
        yield server


def weights(server: ServerProcess) -> dict[str, Any]:
    of_server: dict[str, Any] = krul_stats(server)["weights"]
    return of_server


def flush(server: ServerProcess) -> None:
    settled_stats(server)
    assert httpx.post(f"{server.url}/flush_cache", timeout=60, trust_env=False).status_code == 200


def update(server: ServerProcess, model: Path, **fields: Any) -> None:
    server.post_json("/update_weights_from_disk", {"model_path": str(model), **fields})


def ask_after_eviction(server: ServerProcess, prompt: list[int], seed: object) -> Answer:
    push_out(server, num_tokens=POOL_TOKENS, seed=seed)
    settled_stats(server)
    return ask(server, prompt)


def test_kv_of_old_weights_is_never_found_again(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    old, new = tiny_models["float32"], build_tiny_model(tmp_path / "new", seed=1)
    ssd = ("--ssd-dir", str(tmp_path / "ssd"), "--ssd-capacity", "1GiB", "--ssd-timeout", "20")
    arguments = ("--host-memory", "256MiB", *ssd)
    with running_daemon(*arguments) as (runtime_dir, daemon):
        with krul_server(old, runtime_dir, tmp_path / "updated.log") as server:
            of_old = ask(server, PROMPT)
            assert ask_after_eviction(server, PROMPT, "old").host_tokens == STORED_TOKENS
            of_new = updated_and_flushed(server, new)
            updated_and_not_flushed(server, old, of_old)
            updated_in_a_session(server)
            update_that_fails(server, tmp_path / "nowhere")
            assert_nothing_left_behind(server)
        command = (sys.executable, "-m", "krul_backend.daemon", "flush", "--endpoint", str(runtime_dir))
        subprocess.run(command, check=True, capture_output=True)
        daemon.kill()
        daemon.wait()
        daemon = start_daemon(runtime_dir, *arguments)
        try:
            with krul_server(new, runtime_dir, tmp_path / "new.log") as server:
                started_with_new = ask(server, PROMPT)
                assert started_with_new.host_tokens == 0
                assert_same([started_with_new], [of_new])
            # What the first server stored before its weights changed is what this one computes.
            with krul_server(old, runtime_dir, tmp_path / "old.log") as server:
                started_with_old = ask(server, PROMPT)
                assert started_with_old.host_tokens == STORED_TOKENS
                assert_same([of_old], [started_with_old])
        finally:
            daemon.kill()
            daemon.wait()


def updated_and_flushed(server: ServerProcess, model: Path) -> Answer:
    before = weights(server)
    assert (before["is_lasting"], before["is_settled"]) == (True, True)
    update(server, model)
    after = weights(server)
    assert after["fingerprint"] != before["fingerprint"]
    assert (after["is_lasting"], after["is_settled"]) == (False, True)
    cold = ask(server, PROMPT)
    assert (cold.device_tokens, cold.host_tokens) == (0, 0)
    again = ask_after_eviction(server, PROMPT, "new")
    assert again.host_tokens == STORED_TOKENS
    assert_same([cold], [again])
    return cold


def updated_and_not_flushed(server: ServerProcess, model: Path, expected: Answer) -> None:
    """SGLang keeps its tree then: what grows from it is KV of both weights."""
    ask(server, PROMPT)
    before, stored = weights(server), settled_stats(server)["committed_segments"]
    update(server, model, flush_cache=False)
    after = weights(server)
    assert after["fingerprint"] != before["fingerprint"]
    assert not after["is_settled"]
    mixed = ask(server, PROMPT + random_prompt("mixed", 60))
    assert mixed.device_tokens == STORED_TOKENS
    push_out(server, num_tokens=POOL_TOKENS, seed="mixed")
    assert settled_stats(server)["committed_segments"] == stored
    cold = ask(server, PROMPT)
    assert (cold.device_tokens, cold.host_tokens) == (0, 0)
    assert_same([expected], [cold])
    flush(server)
    assert weights(server) == {**after, "is_settled": True}
    ask(server, PROMPT)
    again = ask_after_eviction(server, PROMPT, "flushed")
    assert again.host_tokens == STORED_TOKENS
    assert_same([expected], [again])


def updated_in_a_session(server: ServerProcess) -> None:
    """Between its two calls a trainer may write into the weights by itself; a flush does not change that."""
    flush(server)
    before, stored = weights(server), settled_stats(server)["committed_segments"]
    server.post_json("/begin_weight_update", {})
    opened = weights(server)
    assert opened["fingerprint"] != before["fingerprint"]
    flush(server)
    assert not weights(server)["is_settled"]
    ask(server, PROMPT)
    server.post_json("/end_weight_update", {})
    assert not weights(server)["is_settled"]
    assert settled_stats(server)["committed_segments"] == stored
    flush(server)
    assert weights(server) == {**opened, "is_settled": True}


def update_that_fails(server: ServerProcess, nowhere: Path) -> None:
    ask(server, PROMPT)
    before = weights(server)
    with pytest.raises(ServerError):
        update(server, nowhere)
    after = weights(server)
    assert after["fingerprint"] != before["fingerprint"]
    assert not after["is_settled"]
    flush(server)
    assert weights(server)["is_settled"]


def test_every_turn_of_a_streaming_session_is_stored(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    with (
        running_daemon("--host-memory", "256MiB") as (runtime_dir, _),
        krul_server(tiny_models["float32"], runtime_dir, tmp_path / "server.log") as server,
    ):
        session = {"session_id": "s", "capacity_of_str_len": 100_000, "streaming": True}
        assert server.post_json("/open_session", session) == "s"
        history: list[int] = []
        stored_before = settled_stats(server)["stored_tokens"]
        # The first prompt is less than a page, so that the tree owns nothing of the session.
        for turn, num_tokens in enumerate((9, 203, 203)):
            prompt = random_prompt(("session", turn), num_tokens)
            answer = ask(server, prompt, session_params={"id": "s"})
            history += [*prompt, *answer.output_ids]
            if turn < 2:
                # Of the last token of an answer there is no KV for certain.
                stored = settled_stats(server)["stored_tokens"] - stored_before
                assert stored >= (len(history) - 1) // 16 * 16
        # The last turn is being stored when its slots are given back.
        httpx.post(f"{server.url}/close_session", json={"session_id": "s"}, timeout=60, trust_env=False)
        push_out(server, num_tokens=POOL_TOKENS, seed="session")
        prompt = history + random_prompt("after", 50)
        restored = ask(server, prompt)
        assert restored.device_tokens == 0
        assert restored.host_tokens >= (len(history) - 1) // 16 * 16
        flush(server)
        assert_same([ask(server, prompt)], [restored])
        assert_nothing_left_behind(server)
