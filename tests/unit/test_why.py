"""``krul-sglang why``: what it prints and writes, and its errors; and the line of each minute."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sglang.srt.managers.schedule_batch import MM_PAD_SHIFT_VALUE, _compute_pad_values
from typer.testing import CliRunner, Result

from krul_sglang.adapter.minute_log import MINUTE_S, MinuteLog
from krul_sglang.cli import app as cli
from krul_sglang.cli import server_client
from krul_sglang.engine.restore import LoadCounters
from krul_sglang.engine.save import OffloadCounters
from krul_sglang.reasons import MEDIA_IDS_FROM, Parting, RequestReasons, Run
from tests.support.store_builders import Clock

RESTORED = RequestReasons(
    "a1", 231, 32, 192, loaded=[Run(32, 192, "dram")], head_ends=(80, 48), missing=[Run(192, 224, "new")]
)
PARTED = RequestReasons(
    "b2", 100, 0, 48, "sooner", missing=[Run(48, 96, "parted")], parting=Parting(50, (1, 2), (3,), (4, 5))
)
WORDS = {1: "<s>", 2: " and", 3: " then", 4: " so", 5: "\n"}


class FakeServer:
    """Answers ``/server_info`` and ``/detokenize``; each state is one data-parallel rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: list[dict[str, Any]] = []
        self.backend = "krul"
        self.has_tokenizer = True
        client = httpx.Client
        transport = httpx.MockTransport(self.answer)
        monkeypatch.setattr(
            server_client.httpx, "Client", lambda **kwargs: client(**kwargs, transport=transport)
        )
        self.know([RESTORED, PARTED])

    def know(self, *of_ranks: list[RequestReasons]) -> None:
        self.states = [{"krul_reasons": msgspec.json.encode(told).decode()} for told in of_ranks]

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            content = {"radix_cache_backend": self.backend, "internal_states": self.states}
            return httpx.Response(200, json=content)
        if not self.has_tokenizer:
            return httpx.Response(400, json={"message": "no tokenizer"})
        asked = json.loads(request.content)
        assert (request.url.path, asked["skip_special_tokens"]) == ("/detokenize", False)
        return httpx.Response(
            200, json={"text": ["".join(WORDS[token] for token in run) for run in asked["tokens"]]}
        )


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    return FakeServer(monkeypatch)


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["why", "--url", "http://server:1", *map(str, args)])


def test_one_request_is_told_in_sentences(server: FakeServer) -> None:
    result = run("b2")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "Request b2 had 100 tokens.",
        "Tokens 0 to 47 were computed: they were stored, but computing them was planned to be sooner than "
        "loading them.",
        "Tokens 48 to 99 were computed: the prompt parts from what was stored at token 50. After '<s> and' "
        "it has ' then', where ' so\\n' was stored.",
    ]


def test_a_server_without_a_tokenizer_shows_token_ids(server: FakeServer) -> None:
    server.has_tokenizer = False
    assert "After the tokens 1, 2 it has the tokens 3, where the tokens 4, 5 was stored." in run("b2").output


def test_images_are_named_and_not_decoded(server: FakeServer) -> None:
    """The server's tokenizer would refuse ids of no token, and with them all others."""
    image, other = (_compute_pad_values(bytes([number] * 8)) for number in (1, 2))
    assert min(*image, *other) >= MEDIA_IDS_FROM == MM_PAD_SHIFT_VALUE
    parting = Parting(50, (1, *image, 2), (*image[:2],), (4, *other))
    server.know([msgspec.structs.replace(PARTED, parting=parting)])
    assert (
        "After '<s>' and an image or sound and ' and' it has an image or sound, where ' so' and an image or "
        "sound was stored."
    ) in run("b2").output


def test_a_prompt_that_ends_where_it_parts_is_told(server: FakeServer) -> None:
    server.know([msgspec.structs.replace(PARTED, parting=Parting(50, (1, 2), (), (4, 5)))])
    assert "it has '', where ' so\\n' was stored." in run("b2").output


def test_the_last_requests_are_a_table(server: FakeServer) -> None:
    rows = [line.split() for line in run().output.splitlines() if line.split()[:1] in (["a1"], ["b2"])]
    assert [row[:6] for row in rows] == [
        ["a1", "231", "32", "112", "48", "39"],
        ["b2", "100", "0", "0", "0", "100"],
    ]
    assert max(map(len, run().output.splitlines())) <= 160
    output = run("--last", 1).output
    assert "b2" in output
    assert "a1" not in output


def test_json_goes_to_a_file_or_to_standard_output(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "why.json"
    assert run("--json", path).exit_code == 0
    (restored, parted) = json.loads(path.read_text())
    assert restored["pieces"][1] == {"first": 32, "end": 80, "source": "head", "why": ""}
    assert parted["parting"] == {"token": 50, "common": "'<s> and'", "here": "' then'", "stored": "' so\\n'"}
    assert json.loads(run("b2", "--json", "-").output) == [parted]


@pytest.mark.parametrize(
    ("change", "args", "message"),
    [
        (lambda server: None, ["c3"], "does not know request 'c3': it keeps the last 2"),
        (lambda server: server.know([]), [], "has had no request yet"),
        (lambda server: setattr(server, "backend", None), [], "runs without krul"),
        (lambda server: setattr(server, "states", [{"krul": {}}]), [], "runs another version of krul-sglang"),
        (lambda server: None, ["--timeout", 0], "--timeout 0.0 is not possible"),
        (lambda server: None, ["--json", "/no/such/folder/file"], "does not exist"),
    ],
)
def test_errors_are_one_line(
    server: FakeServer, change: Callable[[FakeServer], object], args: list[object], message: str
) -> None:
    if "without krul" in message:
        server.states = [{}]
    change(server)
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert message in line


def test_a_server_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(cli.app, ["why", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "cannot be reached" in result.stderr


def test_ranks_are_searched_and_each_shows_its_last(server: FakeServer) -> None:
    server.know([RESTORED], [PARTED])
    assert "Request b2" in run("b2").output
    output = run("--last", 1).output
    assert "a1" in output
    assert "b2" in output


def test_a_minute_is_logged_if_something_was_saved_or_restored(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "krul_sglang")
    clock, saved, restored = Clock(), OffloadCounters(), LoadCounters()
    minute = MinuteLog(saved, restored, clock)
    saved.turns, saved.tokens, saved.num_bytes = 3, 320, 4096
    saved.drop("no room")
    restored.requests, restored.tokens, restored.num_bytes = 1, 160, 2048
    minute.tick()
    assert caplog.messages == []
    clock.now_s += MINUTE_S
    minute.tick()
    minute.tick()
    clock.now_s += MINUTE_S
    minute.tick()
    assert caplog.messages == [
        "krul: in the last minute 3 turns ended, 1 were not saved whole, 0 B were saved as is and 320 tokens "
        "for good in 4.0 KiB; 1 requests got 160 tokens back, for which 2.0 KiB were loaded"
    ]
