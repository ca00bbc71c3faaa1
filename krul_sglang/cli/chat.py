"""``krul-sglang chat``: one conversation with a server, or with two side by side, and when answers begin."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import openai
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Footer, Input, Static

from krul_backend.errors import KrulError
from krul_sglang.cli.selftest import push_out
from krul_sglang.cli.server_client import CannotRunError, open_client, printable
from krul_sglang.cli.timed_answer import Message, TimedAnswer, TurnResult, format_seconds, request

_ANSWER_TIMEOUT_S = 600.0


class Talk:
    """The conversation with one server. What a turn that failed had asked is not part of it."""

    def __init__(self, name: str, url: str, *, api_key: str | None, max_tokens: int) -> None:
        self.name = name
        self.url = url
        self.turns: list[TurnResult] = []
        self._api_key = api_key
        self._max_tokens = max_tokens
        self._messages: list[Message] = []
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=api_key or "unused", max_retries=0, timeout=_ANSWER_TIMEOUT_S
        )

    async def ask(self, text: str, show: Any) -> TurnResult:
        """Ask, and call ``show`` with each piece of the answer.

        Raises:
            KrulError: there is no whole answer.
        """
        messages: list[Message] = [*self._messages, {"role": "user", "content": text}]
        timed = TimedAnswer(self.name, len(self.turns) + 1)
        try:
            async for chunk in await self._client.chat.completions.create(
                **request(messages, self._max_tokens)
            ):
                timed.take(chunk)
                show((chunk.choices[0].delta.content if chunk.choices else None) or "")
        except openai.OpenAIError as error:
            raise CannotRunError(f"{self.url}: {error}") from error
        turn = timed.result()
        self._messages = [*messages, {"role": "assistant", "content": turn.answer}]
        self.turns.append(turn)
        return turn

    def evict(self, max_noise_tokens: int) -> int:
        """Push the conversation out of the server's device pool; see ``push_out``."""
        with open_client(self.url, api_key=self._api_key, timeout_s=_ANSWER_TIMEOUT_S) as client:
            return push_out(client, max_noise_tokens=max_noise_tokens, timeout_s=_ANSWER_TIMEOUT_S)

    def forget(self) -> None:
        """Begin another conversation."""
        self._messages, self.turns = [], []


class Pane(Vertical):
    """What was said to one server and what it said, each answer with its times."""

    def __init__(self, talk: Talk) -> None:
        super().__init__()
        self.talk = talk
        self.said = Text()
        # Kept, not looked up: while the app ends, an answer may still come.
        self._shown = Static(markup=False)
        self._scroll = VerticalScroll(self._shown)

    def compose(self) -> ComposeResult:
        yield self._scroll

    def on_mount(self) -> None:
        self.border_title = f"{self.talk.name}: {self.talk.url}"

    def say(self, text: str, style: str = "") -> None:
        """Add to the end."""
        self.said.append(printable(text), style)
        self._shown.update(self.said)
        self._scroll.scroll_end(animate=False)

    def clear(self) -> None:
        self.said = Text()
        self.say("")

    async def ask(self, text: str) -> None:
        self.say(f"> {text}\n", "bold")
        try:
            turn = await self.talk.ask(text, self.say)
        except KrulError as error:
            self.say(f"\nno answer: {error}\n\n", "bold red")
            return
        self.say(
            f"\nfirst token after {format_seconds(turn.ttft_s)}; of {turn.prompt_tokens:,} prompt tokens "
            f"{turn.device_tokens:,} were on the device, {turn.host_tokens:,} came from krul, "
            f"{turn.computed_tokens:,} were computed\n\n",
            "green",
        )
        self.border_subtitle = ", ".join(format_seconds(each.ttft_s) for each in self.talk.turns[-8:])

    async def evict(self, max_noise_tokens: int) -> None:
        self.say("evicting ...", "yellow")
        try:
            num_tokens = await asyncio.to_thread(self.talk.evict, max_noise_tokens)
        except KrulError as error:
            self.say(f" not evicted: {error}\n\n", "bold red")
            return
        self.say(f" {num_tokens:,} other tokens have filled the device pool\n\n", "yellow")


class ChatApp(App[None]):
    """Sends what is typed to one server after the other, so that neither slows the other's answer."""

    CSS = """
    Pane { border: round $primary; padding: 0 1; }
    VerticalScroll { scrollbar-size-vertical: 1; }
    .-narrow #panes { layout: vertical; }
    """
    TITLE = "krul-sglang chat"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("f2", "evict", "Evict from the device"),
        ("f3", "forget", "New conversation"),
        ("ctrl+q", "quit", "Quit"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, talks: Sequence[Talk], *, max_noise_tokens: int) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self.panes = [Pane(talk) for talk in talks]
        self._max_noise_tokens = max_noise_tokens
        self.entry = Input(placeholder="Ask something")

    def compose(self) -> ComposeResult:
        yield Horizontal(*self.panes, id="panes")
        yield self.entry
        yield Footer()

    def on_mount(self) -> None:
        self.entry.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if text:
            event.input.clear()
            self._start(self._ask(text))

    def action_evict(self) -> None:
        self._start(self._evict())

    def action_forget(self) -> None:
        if not self.entry.disabled:
            for pane in self.panes:
                pane.talk.forget()
                pane.clear()

    def _start(self, work: Any) -> None:
        """Do one thing at a time: until it is done, nothing else can be asked."""
        if self.entry.disabled:
            work.close()
            return
        self.entry.disabled = True
        self.run_worker(self._finish(work))

    async def _finish(self, work: Any) -> None:
        await work
        self.entry.disabled = False
        self.entry.focus()

    async def _ask(self, text: str) -> None:
        for pane in self.panes:
            await pane.ask(text)

    async def _evict(self) -> None:
        for pane in self.panes:
            await pane.evict(self._max_noise_tokens)
