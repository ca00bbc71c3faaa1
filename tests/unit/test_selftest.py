"""The sentinel probe against a small fake server that plays the cases."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from krul_sglang.cli import app as cli
from krul_sglang.cli import selftest
from krul_sglang.cli.selftest import SelftestConfig, run_selftest
from krul_sglang.cli.server_client import CannotRunError

ANSWER = tuple(range(100, 124))


@dataclass
class FakeServer:
    """What the fake answers; ``again_*`` is for a prompt that it has seen before."""

    pool_tokens: int = 4096
    info: dict[str, Any] = field(default_factory=dict)
    again_host_tokens: int = 592
    again_device_tokens: int = 0
    again_answer: tuple[int, ...] = ANSWER
    top_logprobs: dict[int, float] = field(default_factory=dict)
    drafts_again: int | None = None
    api_key: str | None = None
    not_found: bool = False
    seen: list[list[int]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        if path == "/server_info":
            info = {
                "max_total_num_tokens": self.pool_tokens,
                "max_req_input_len": self.pool_tokens - 6,
                "page_size": 16,
                "radix_cache_backend": "krul",
                "internal_states": [{}],
            }
            if self.drafts_again is not None:
                is_again = self.seen.count(self.seen[-1]) == 2 if self.seen else False
                restored = 100 + self.drafts_again * is_again
                info["internal_states"] = [{"krul": {"draft": {"restored_tokens": restored}}}]
            return {**info, **self.info}
        if path == "/tokenize":
            return {"tokens": list(range(300, 380)), "count": 80, "max_model_len": 8192}
        assert path == "/generate"
        prompt = payload["input_ids"]
        again = prompt in self.seen
        self.seen.append(prompt)
        output_ids = self.again_answer if again else ANSWER
        cached = {"device": self.again_device_tokens, "host": self.again_host_tokens} if again else None
        top = [[logprob, token_id, None] for token_id, logprob in self.top_logprobs.items()]
        return {
            "text": " ".join(map(str, output_ids)),
            "output_ids": output_ids,
            "meta_info": {
                "prompt_tokens": len(prompt),
                "cached_tokens_details": cached,
                "output_token_logprobs": [[-0.5, token_id, None] for token_id in output_ids],
                "output_top_logprobs": [top] * len(output_ids),
            },
        }


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(selftest, "_STORE_DELAY_S", 0.0)
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, payload: dict[str, Any]) -> None:
            status, answer = 200, {}
            if fake.api_key is not None and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
                status = 401
            elif fake.not_found:
                status = 404
            else:
                answer = fake.answer(self.path, payload)
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        fake.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield fake
        http_server.shutdown()
        thread.join()


def test_passes_when_host_memory_gives_the_same_answer(server: FakeServer) -> None:
    result = run_selftest(SelftestConfig(server.url))
    assert result.passed
    assert result.verdict.startswith("PASSED: the second run took 592 of 600 prompt tokens from host memory")
    assert server.seen[0] == server.seen[-1]
    assert len(server.seen[0]) == 600
    assert set(server.seen[0]) <= set(range(300, 380)), "only ids that the tokenizer made of plain text"
    noise = server.seen[1:-1]
    assert sum(map(len, noise)) >= 1.25 * server.pool_tokens
    assert max(map(len, noise)) <= server.pool_tokens // 2


@pytest.mark.parametrize(("num_drafts", "came"), [(592, "all of"), (16, "16 of the tokens: fewer drafts")])
def test_it_says_whether_drafts_came_back(server: FakeServer, num_drafts: int, came: str) -> None:
    server.drafts_again = num_drafts
    result = run_selftest(SelftestConfig(server.url))
    assert (result.passed, result.draft_tokens) == (True, num_drafts)
    assert f"Draft KV came back for {came}" in result.verdict


def test_two_probes_use_different_prompts(server: FakeServer) -> None:
    run_selftest(SelftestConfig(server.url))
    first = server.seen[0]
    server.seen.clear()
    run_selftest(SelftestConfig(server.url))
    assert server.seen[0] != first


def test_a_short_context_shortens_the_prompt(server: FakeServer) -> None:
    server.info = {"max_req_input_len": 200}
    server.again_host_tokens = 160
    result = run_selftest(SelftestConfig(server.url))
    assert result.again.prompt_tokens == 200 - 24 - 1
    assert result.passed


def test_fails_when_nothing_comes_from_host_memory(server: FakeServer) -> None:
    server.again_host_tokens = 0
    result = run_selftest(SelftestConfig(server.url))
    assert not result.passed
    assert "took only 0 of 600 prompt tokens" in result.verdict
    assert "computed again" in result.verdict


def test_fails_when_the_prompt_never_left_the_device(server: FakeServer) -> None:
    server.again_host_tokens, server.again_device_tokens = 0, 592
    result = run_selftest(SelftestConfig(server.url))
    assert not result.passed
    assert "592 were still in the device pool" in result.verdict


def test_the_required_share_can_be_set(server: FakeServer) -> None:
    server.again_host_tokens = 240
    assert not run_selftest(SelftestConfig(server.url)).passed
    assert run_selftest(SelftestConfig(server.url, min_host_share=0.4)).passed


def test_fails_when_the_answer_differs(server: FakeServer) -> None:
    server.again_answer = (*ANSWER[:7], 9, *ANSWER[8:])
    server.top_logprobs = {ANSWER[7]: -1.0, 9: -1.5}
    result = run_selftest(SelftestConfig(server.url))
    assert not result.passed
    assert result.first_difference == 7
    assert result.tie_margin == pytest.approx(0.5)
    assert "differs from output token 7 on" in result.verdict


def test_a_tie_at_the_first_difference_passes_and_is_named(server: FakeServer) -> None:
    server.again_answer = (*ANSWER[:7], 9, 1, 2, 3)
    server.top_logprobs = {ANSWER[7]: -1.0, 9: -1.03}
    result = run_selftest(SelftestConfig(server.url))
    assert result.passed
    assert not result.equal
    assert "equal within a tie" in result.verdict


def test_a_token_that_was_never_a_rival_is_no_tie(server: FakeServer) -> None:
    server.again_answer = (*ANSWER[:7], 9, *ANSWER[8:])
    server.top_logprobs = {ANSWER[7]: -1.0, 55: -1.0}
    result = run_selftest(SelftestConfig(server.url))
    assert not result.passed
    assert result.tie_margin is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"info": {"radix_cache_backend": None}}, "runs without krul"),
        ({"info": {"internal_states": [{}, {}]}}, "2 data-parallel ranks"),
        ({"info": {"page_size": None, "internal_states": None}}, "not as an SGLang server does"),
        ({"info": {"page_size": 256}}, "too short for pages of 256 tokens"),
        ({"pool_tokens": 900_000}, "too large to be flushed by noise: 1125000 tokens"),
        ({"not_found": True}, "is not an SGLang server"),
        ({"api_key": "secret"}, "give --api-key"),
    ],
)
def test_says_why_it_cannot_run(server: FakeServer, changes: dict[str, Any], problem: str) -> None:
    for name, value in changes.items():
        setattr(server, name, value)
    with pytest.raises(CannotRunError, match=problem):
        run_selftest(SelftestConfig(server.url))


def test_the_deadline_ends_the_noise(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which each reading is 250 s after the one before."""
    readings = itertools.count(step=250.0)
    clock = SimpleNamespace(
        monotonic=lambda: next(readings), perf_counter=time.perf_counter, sleep=time.sleep
    )
    monkeypatch.setattr(selftest, "time", clock)
    with pytest.raises(CannotRunError, match=r"takes too long: 2048 of 5120 tokens of noise"):
        run_selftest(SelftestConfig(server.url, timeout_s=600.0))


def test_the_command_line_gives_status_sentence_and_json(server: FakeServer, tmp_path: Path) -> None:
    server.api_key = "secret"
    path = tmp_path / "result.json"
    args = ["selftest", "--url", f"{server.url}/", "--api-key", "secret", "--json", str(path)]
    passed = CliRunner().invoke(cli.app, args)
    assert (passed.exit_code, passed.stdout.count("\n")) == (0, 1)
    assert json.loads(path.read_text())["passed"] is True

    server.again_host_tokens = 0
    failed = CliRunner().invoke(cli.app, args)
    assert failed.exit_code == 1
    assert failed.stdout.startswith("FAILED: ")
    assert json.loads(path.read_text())["host_share"] == 0.0

    server.api_key = "other"
    refused = CliRunner().invoke(cli.app, args)
    assert refused.exit_code == 2
    assert "give --api-key" in refused.stderr
