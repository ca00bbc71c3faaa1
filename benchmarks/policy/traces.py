"""Sessions of agents: when each request came, which pages its prompt had, how long its answer took."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from krul_backend.errors import KrulError

PAGE_TOKENS = 512
"""Of a page in a replay. Traces name the content of every 64 tokens; whole multiples of them are one page."""

_BLOCK_TOKENS = 64
_PAGE_BLOCKS = PAGE_TOKENS // _BLOCK_TOKENS


class TraceError(KrulError):
    """A trace file cannot be used."""


@dataclass(frozen=True)
class Request:
    """One request of a session.

    ``pause_s``: seconds from the end of the answer before it until it comes; of the first one 0.
    ``pages``: the numbers of the whole pages of its prompt. A number stands for the page and all pages before
    it, within one session.
    """

    pause_s: float
    answer_s: float
    pages: tuple[int, ...]

    @cached_property
    def page_set(self) -> frozenset[int]:
        return frozenset(self.pages)


Session = tuple[Request, ...]


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a JSON-lines file, one session a line.

    Each line has ``requests``, with ``t`` (seconds), ``in`` and ``out`` (tokens), ``blocks`` (ranges of the
    numbers of blocks of 64 tokens, both ends included), and maybe ``api_time`` (seconds until the answer
    ended). Where that is missing, it is guessed from the tokens by what the others took.

    Raises:
        TraceError: the file is not of this form.
    """
    try:
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
        if any(line["block_size"] != _BLOCK_TOKENS for line in lines):
            raise TraceError(f"{path}: blocks must have {_BLOCK_TOKENS} tokens")
        answer_token_s = _answer_token_s([request for line in lines for request in line["requests"]])
        sessions = [_session(line["requests"], answer_token_s) for line in lines]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} holds no sessions: {type(error).__name__}: {error}") from error
    sessions = [session for session in sessions if session]
    if not sessions:
        raise TraceError(f"{path} holds no request")
    return sessions


def _answer_token_s(requests: list[dict[str, Any]]) -> float:
    """Seconds per answer token: the median over the requests that say how long they took."""
    known = sorted(each["api_time"] / each["out"] for each in requests if "api_time" in each and each["out"])
    return known[len(known) // 2] if known else 0.02


def _session(requests: list[dict[str, Any]], answer_token_s: float) -> Session:
    session: list[Request] = []
    end_s = None
    for request in sorted(requests, key=lambda each: each["t"]):
        answer_s = request.get("api_time") or request["out"] * answer_token_s
        blocks = [block for first, last in request["blocks"] for block in range(first, last + 1)]
        # A block's number stands for all before it, too: the last one of a page names the page.
        pages = tuple(blocks[_PAGE_BLOCKS - 1 :: _PAGE_BLOCKS])
        if pages:
            pause_s = 0.0 if end_s is None else max(0.0, request["t"] - end_s)
            session.append(Request(pause_s, answer_s, pages))
            end_s = request["t"] + answer_s
    return tuple(session)


def synthetic_sessions(count: int, seed: int = 0) -> list[Session]:
    """Made-up sessions: prompts that grow by a few pages, short pauses and now and then a long one."""
    chance = random.Random(seed)
    sessions = []
    for _ in range(count):
        num_pages = chance.randint(5, 60)
        requests = []
        for number in range(chance.randint(2, 20)):
            is_long = chance.random() < 0.2
            pause_s = chance.expovariate(1 / 600 if is_long else 1 / 10) if number else 0.0
            requests.append(Request(pause_s, chance.uniform(1, 20), tuple(range(1, num_pages + 1))))
            num_pages += chance.randint(0, 8)
        sessions.append(tuple(requests))
    return sessions
