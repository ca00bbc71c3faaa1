"""What many users ask of a server who replay recorded sessions of agents, and what it sees later."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from krul_backend.errors import KrulError
from krul_backend.segment import TokenIds

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


@dataclass(frozen=True)
class Cost:
    """Seconds of computing: ``token_s`` for a token, and ``position_s`` more for each one before it."""

    token_s: float = 3e-5
    position_s: float = 1e-9

    def pages_s(self, first_page: int, end_page: int) -> float:
        """Seconds to compute pages ``[first_page, end_page)`` of a prompt."""
        first, end = first_page * PAGE_TOKENS, end_page * PAGE_TOKENS
        return (end - first) * self.token_s + (end * end - first * first) / 2 * self.position_s


@dataclass(eq=False)
class Conversation:
    """One user's replay of one session, with page keys of its own. ``page_bytes``: stored size of a page."""

    number: int
    page_bytes: int
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Turn:
    """One request as the server sees it: it arrives, starts to be computed, and ends. All in seconds."""

    conversation: Conversation
    arrival_s: float
    start_s: float
    end_s: float
    request: Request

    @property
    def num_pages(self) -> int:
        return len(self.request.pages)

    @property
    def page_keys(self) -> tuple[str, ...]:
        number = self.conversation.number
        return tuple(f"{number}:{page}" for page in self.request.pages)

    @property
    def token_ids(self) -> TokenIds:
        """One number per page, in place of its tokens."""
        return np.array(self.request.pages, dtype=np.int32)


@dataclass(frozen=True)
class Workload:
    """All turns of a replay, by arrival."""

    turns: tuple[Turn, ...]

    @cached_property
    def conversations(self) -> dict[int, Conversation]:
        return {turn.conversation.number: turn.conversation for turn in self.turns}

    @cached_property
    def working_set_bytes(self) -> int:
        """Bytes of every page that any turn has, each counted once."""
        total = 0
        for conversation in self.conversations.values():
            pages = frozenset().union(*(turn.request.page_set for turn in conversation.turns))
            total += len(pages) * conversation.page_bytes
        return total


def make_workload(
    sessions: Sequence[Session],
    num_users: int,
    num_turns: int,
    *,
    page_bytes: int = 65536,
    size_spread: float = 1.0,
    num_slots: int | None = None,
    seed: int = 0,
) -> Workload:
    """The first ``num_turns`` turns of ``num_users`` users who replay sessions, one after the other.

    Each user begins somewhere in a session, so that all of them are active from the start, and goes on with
    the next one when it ends. Users take the sessions in orders of their own.

    Args:
        page_bytes: stored bytes of a page, times a factor for each conversation.
        size_spread: the factor is log-uniform between 1 / ``size_spread`` and ``size_spread``.
        num_slots: how many requests the server answers at once; others wait, in order. None: nobody waits.
    """
    chance = random.Random(seed)
    orders = [chance.sample(range(len(sessions)), len(sessions)) for _ in range(num_users)]
    turns: list[Turn] = []
    free_at_s = [0.0] * num_slots if num_slots is not None else None
    num_conversations = 0
    # (arrival, user, position of the session in the user's order, request in it, conversation)
    waiting: list[tuple[float, int, int, int, Conversation | None]] = []
    for user, order in enumerate(orders):
        session = sessions[order[0]]
        first = chance.randrange(len(session))
        heapq.heappush(waiting, (chance.uniform(0, 60), user, 0, first, None))
    while len(turns) < num_turns:
        arrival_s, user, place, number, conversation = heapq.heappop(waiting)
        session = sessions[orders[user][place % len(sessions)]]
        if conversation is None:
            factor = size_spread ** chance.uniform(-1, 1)
            conversation = Conversation(num_conversations, round(page_bytes * factor))
            num_conversations += 1
        request = session[number]
        start_s = arrival_s
        if free_at_s is not None:
            start_s = max(arrival_s, heapq.heappop(free_at_s))
            heapq.heappush(free_at_s, start_s + request.answer_s)
        turn = Turn(conversation, arrival_s, start_s, start_s + request.answer_s, request)
        conversation.turns.append(turn)
        turns.append(turn)
        if number + 1 < len(session):
            at_s = turn.end_s + session[number + 1].pause_s
            heapq.heappush(waiting, (at_s, user, place, number + 1, conversation))
        else:
            heapq.heappush(waiting, (turn.end_s + chance.expovariate(1 / 60), user, place + 1, 0, None))
    return Workload(tuple(turns))


class Future:
    """Knows when a page is asked for again: what an offline policy may look at."""

    def __init__(self, workload: Workload) -> None:
        self._conversations = workload.conversations

    def next_use_s(self, page_key: str, now_s: float) -> float:
        """When the first turn after ``now_s`` arrives that has the page; infinity if none does."""
        number, page = map(int, page_key.split(":"))
        for turn in self._conversations[number].turns:
            if turn.arrival_s > now_s and page in turn.request.page_set:
                return turn.arrival_s
        return math.inf

    def num_used_again(self, turn: Turn, now_s: float) -> int:
        """How many of the first pages of a turn any later turn has."""
        keys = turn.page_keys
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if self.next_use_s(keys[middle - 1], now_s) < math.inf:
                low = middle
            else:
                high = middle - 1
        return low
