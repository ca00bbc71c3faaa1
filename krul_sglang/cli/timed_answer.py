"""Asks a server through its OpenAI-compatible endpoint for an answer, and times how it comes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from krul_backend.errors import KrulError

Message = dict[str, str]
"""One message of the OpenAI chat format: ``role`` and ``content``."""


class PlayError(KrulError):
    """A request got no answer; the message names the conversation and the turn."""


@dataclass(frozen=True)
class TurnResult:
    """One answered turn. ``ttft_s`` runs from before the request is sent to the first piece of text.

    ``device_tokens`` and ``host_tokens`` are the prompt tokens whose KV was found in the device pool and in
    host memory; the other prompt tokens were computed.
    """

    conversation: str
    turn: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    answer: str

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.device_tokens - self.host_tokens

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first one; None for an answer of one token."""
        num_more = self.completion_tokens - 1
        return (self.total_s - self.ttft_s) / num_more if num_more > 0 else None


def request(messages: list[Message], max_tokens: int) -> dict[str, Any]:
    """Arguments of the OpenAI client for a greedy, streamed answer that says what was cached."""
    return {
        "model": "default",
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"return_cached_tokens_details": True},
    }


class TimedAnswer:
    """Collects the pieces of a streamed answer. Its clock starts when it is made: make it before you ask."""

    def __init__(self, conversation: str, turn: int) -> None:
        self._conversation = conversation
        self._turn = turn
        self._started = time.perf_counter()
        self._first_piece_at: float | None = None
        self._pieces: list[str] = []
        self._usage: Any = None
        self._cached: dict[str, int] = {}

    def take(self, chunk: Any) -> None:
        """Add the next chunk of the stream."""
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            if self._first_piece_at is None:
                self._first_piece_at = time.perf_counter()
            self._pieces.append(text)
        self._usage = chunk.usage or self._usage
        # SGLang's extension: sent once, after the text, and only if anything was cached.
        extension = (chunk.model_extra or {}).get("sglext") or {}
        self._cached = extension.get("cached_tokens_details") or self._cached

    def result(self) -> TurnResult:
        """Returns the timed turn. Call it once the stream has ended.

        Raises:
            PlayError: the stream did not say how many tokens there were.
        """
        ended = time.perf_counter()
        if self._usage is None:
            raise PlayError(
                f"the answer to conversation {self._conversation!r}, turn {self._turn} came without its usage"
            )
        return TurnResult(
            conversation=self._conversation,
            turn=self._turn,
            prompt_tokens=self._usage.prompt_tokens,
            device_tokens=self._cached.get("device", 0),
            host_tokens=self._cached.get("host", 0),
            completion_tokens=self._usage.completion_tokens,
            # An answer may be empty: then its end is its first sign.
            ttft_s=(ended if self._first_piece_at is None else self._first_piece_at) - self._started,
            total_s=ended - self._started,
            answer="".join(self._pieces),
        )


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1000 * seconds:.0f} ms"
