"""Plays conversations against one server, one request at a time, and measures each turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import openai

from demo.conversations import Conversation
from krul_sglang.cli.timed_answer import Message, PlayError, TimedAnswer, TurnResult, request

Answers = dict[tuple[str, int], str]
"""``answers[conversation_id, turn]``, turns counted from 1."""

_REQUEST_TIMEOUT_S = 600.0


def play_order(conversations: Sequence[Conversation]) -> Iterator[tuple[Conversation, int]]:
    """Turn 1 of every conversation, then turn 2 of every conversation that has one, and so on.

    Between two turns of a conversation all the others run, so that a small device pool has to give it up.
    """
    longest = max((len(conversation.turns) for conversation in conversations), default=0)
    for turn in range(1, longest + 1):
        for conversation in conversations:
            if turn <= len(conversation.turns):
                yield conversation, turn


class Player:
    """Asks one server through its OpenAI-compatible endpoint. Use it as a context manager.

    It sends one request at a time, so that requests do not slow each other down and batches do not change the
    numerics.
    """

    def __init__(self, url: str, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._client = openai.OpenAI(
            base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=_REQUEST_TIMEOUT_S
        )

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def warm_up(self) -> None:
        """Send a request twice, so that the first turn does not pay for the server's first requests.

        No conversation shares its prefix. The second time warms the path of a cache hit.
        """
        numbers = " ".join(str(number) for number in range(40))
        for _ in range(2):
            self._send("warm-up", 1, [{"role": "user", "content": numbers}])

    def ask(
        self, conversation: Conversation, turn: int, answers: Mapping[tuple[str, int], str]
    ) -> TurnResult:
        """Ask one turn (1-based); ``answers`` has those to the turns of this conversation before it.

        Raises:
            PlayError: there was no answer.
        """
        name = conversation.conversation_id
        history = {number: answers[name, number] for number in range(1, turn)}
        return self._send(name, turn, conversation.messages(turn, history))

    def _send(self, conversation: str, turn: int, messages: list[Message]) -> TurnResult:
        answer = TimedAnswer(conversation, turn)
        try:
            for chunk in self._client.chat.completions.create(**request(messages, self._max_tokens)):
                answer.take(chunk)
        except openai.OpenAIError as error:
            raise PlayError(f"no answer to conversation {conversation!r}, turn {turn}: {error}") from error
        return answer.result()
