"""``krul-sglang chat`` with servers that answer by a script: what is asked of whom, and what is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import orjson
import pytest
from textual.pilot import Pilot
from typer.testing import CliRunner

from krul_sglang.cli import app as cli
from krul_sglang.cli.chat import ChatApp, Talk
from krul_sglang.cli.server_client import CannotRunError

USAGE = {"prompt_tokens": 1200, "completion_tokens": 2, "total_tokens": 1202}
CACHED = {"cached_tokens_details": {"device": 16, "host": 1100}}


class ScriptedTalk(Talk):
    """A conversation whose server says ``pieces``, or refuses; notes what it was asked."""

    def __init__(self, name: str, url: str, *pieces: str, fails: bool = False) -> None:
        super().__init__(name, url, api_key=None, max_tokens=8)
        self.pieces = pieces
        self.fails = fails
        self.asked: list[Any] = []
        self.evictions: list[int] = []
        transport = httpx.MockTransport(self._answer)
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key="x", max_retries=0, http_client=httpx.AsyncClient(transport=transport)
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(orjson.loads(request.content)["messages"])
        if self.fails:
            return httpx.Response(503, json={"message": "no room"})
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]}
            for piece in self.pieces
        ]
        chunks.append({"choices": [], "usage": USAGE, "sglext": CACHED})
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "default"}
        lines = [b"data: " + orjson.dumps({**head, **chunk}) for chunk in chunks]
        return httpx.Response(
            200,
            content=b"\n\n".join([*lines, b"data: [DONE]", b""]),
            headers={"content-type": "text/event-stream"},
        )

    def evict(self, max_noise_tokens: int) -> int:
        self.evictions.append(max_noise_tokens)
        if self.fails:
            raise CannotRunError("the device pool is too large")
        return 1280


def in_app(
    check: Callable[[ChatApp, Pilot[None]], Any], *talks: Talk, size: tuple[int, int] = (80, 24)
) -> None:
    async def main() -> None:
        app = ChatApp(talks, max_noise_tokens=5000)
        async with app.run_test(size=size) as pilot:
            await check(app, pilot)

    asyncio.run(main())


async def wait_for(pilot: Pilot[None], is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not is_done():
        assert time.monotonic() < deadline_s
        await pilot.pause(0.01)


async def say(app: ChatApp, pilot: Pilot[None], text: str) -> None:
    """Type and send it, and wait for all answers."""
    app.entry.value = text
    await pilot.press("enter")
    await wait_for(pilot, lambda: not app.entry.disabled)


def test_both_servers_are_asked_and_answers_have_their_times() -> None:
    talks = (
        ScriptedTalk("with krul", "http://a", "Hel", "lo \x1b[2J"),
        ScriptedTalk("without", "http://b", "Hi"),
    )

    async def check(app: ChatApp, pilot: Pilot[None]) -> None:
        await say(app, pilot, "  Who are you?  ")
        first, second = (pane.said.plain for pane in app.panes)
        assert first.startswith("> Who are you?\nHello ?[2J\nfirst token after ")
        assert "of 1,200 prompt tokens 16 were on the device, 1,100 came from krul, 84 were computed" in first
        assert second.startswith("> Who are you?\nHi\nfirst token after ")
        await say(app, pilot, "And now?")
        assert str(app.panes[1].border_subtitle).count(" ms") == 2

    in_app(check, *talks)
    question = {"role": "user", "content": "Who are you?"}
    again = {"role": "user", "content": "And now?"}
    assert talks[0].asked == [
        [question],
        [question, {"role": "assistant", "content": "Hello \x1b[2J"}, again],
    ]
    assert talks[1].asked == [[question], [question, {"role": "assistant", "content": "Hi"}, again]]


def test_a_turn_without_an_answer_is_not_part_of_the_conversation() -> None:
    talk = ScriptedTalk("with krul", "http://a", "Hello", fails=True)

    async def check(app: ChatApp, pilot: Pilot[None]) -> None:
        await say(app, pilot, "first")
        assert "no answer: http://a: " in app.panes[0].said.plain
        talk.fails = False
        await say(app, pilot, "second")
        assert "Hello" in app.panes[0].said.plain

    in_app(check, talk)
    assert [len(messages) for messages in talk.asked] == [1, 1]


def test_the_key_evicts_on_both_servers_and_says_so() -> None:
    talks = ScriptedTalk("with krul", "http://a"), ScriptedTalk("without", "http://b", fails=True)

    async def check(app: ChatApp, pilot: Pilot[None]) -> None:
        await pilot.press("f2")
        await wait_for(pilot, lambda: bool(talks[1].evictions) and not app.entry.disabled)
        assert "1,280 other tokens have filled the device pool" in app.panes[0].said.plain
        assert "not evicted: the device pool is too large" in app.panes[1].said.plain

    in_app(check, *talks)
    assert [talk.evictions for talk in talks] == [[5000], [5000]]


def test_a_new_conversation_begins_empty() -> None:
    talk = ScriptedTalk("with krul", "http://a", "Hello")

    async def check(app: ChatApp, pilot: Pilot[None]) -> None:
        await say(app, pilot, "first")
        await pilot.press("f3")
        await pilot.pause()
        assert app.panes[0].said.plain == ""
        await say(app, pilot, "second")

    in_app(check, talk)
    assert [len(messages) for messages in talk.asked] == [1, 1]


@pytest.mark.parametrize(("width", "are_beside"), [(60, False), (140, True)])
def test_panes_lie_below_each_other_in_a_narrow_terminal(width: int, are_beside: bool) -> None:
    talks = ScriptedTalk("with krul", "http://a"), ScriptedTalk("without", "http://b")

    async def check(app: ChatApp, pilot: Pilot[None]) -> None:
        await pilot.pause()
        first, second = (pane.region for pane in app.panes)
        assert (first.right == second.x, first.bottom == second.y) == (are_beside, not are_beside)

    in_app(check, *talks, size=(width, 24))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "here"], "--url 'here' is not an address"),
        (["--url", "http://a", "--baseline", "there"], "--baseline 'there' is not an address"),
        (["--url", "http://a"], "chat needs a terminal"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["chat", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
