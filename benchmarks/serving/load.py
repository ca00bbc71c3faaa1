"""Asks the servers: the same turns in the same order, the servers in turns, and each answer timed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from benchmarks.serving.configuration import Configuration, ServingBenchmarkError, has_variant
from benchmarks.serving.servers import Server
from demo.conversations import Conversation
from demo.player import play_order
from krul_sglang.cli.timed_answer import Message, TimedAnswer, TurnResult, request

_REQUEST_TIMEOUT_S = 1200.0


@dataclass(frozen=True)
class Arrival:
    """A turn, and when it is asked, in seconds after its batch began."""

    conversation: Conversation
    turn: int
    after_s: float = 0.0


@dataclass
class Answers:
    """What the servers answered, by name of the server; ``busy_s``: how long each had something to do."""

    turns: dict[str, list[TurnResult]] = field(default_factory=lambda: defaultdict(list))
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ended_at: dict[tuple[str, str], float] = field(default_factory=dict)
    history: dict[tuple[str, int], str] = field(default_factory=dict)
    """Answers of the reference by conversation and turn: what prompts hold."""


def schedule(
    conversations: Sequence[Conversation], *, rate: float | None, seed: int, rotates: bool = False
) -> list[tuple[Arrival, ...]]:
    """The turns in batches; in a batch they run at the same time, but for those of one conversation.

    With ``rotates`` all turns are one batch. Without ``rate`` a batch is one turn, in ``play_order``: between
    two turns of a conversation all the others run. With it a batch is a round, whose turns arrive as a
    Poisson process in a random order.
    """
    order = list(play_order(conversations))
    if rotates:
        return [tuple(Arrival(conversation, turn) for conversation, turn in order)]
    if rate is None:
        return [(Arrival(conversation, turn),) for conversation, turn in order]
    dice = random.Random(seed)
    batches = []
    for number in sorted({turn for _, turn in order}):
        of_round = [conversation for conversation, turn in order if turn == number]
        dice.shuffle(of_round)
        at_s = 0.0
        batch = []
        for conversation in of_round:
            at_s += dice.expovariate(rate)
            batch.append(Arrival(conversation, number, at_s))
        batches.append(tuple(batch))
    return batches


def order_of_servers(names: Sequence[str], batch: int) -> list[str]:
    """The servers in the order in which they play a batch: each begins once in as many batches as there are.

    The beginner changes by one more after each such cycle: no conversation meets the same order every round.
    """
    first = (batch + batch // len(names)) % len(names)
    return [*names[first:], *names[:first]]


async def play(
    servers: Sequence[Server],
    configuration: Configuration,
    batches: Sequence[Sequence[Arrival]],
    tell: Callable[[str, TurnResult], None],
    answers: Answers | None = None,
) -> Answers:
    """Let each server play each batch before the next batch begins. ``tell`` is given every answered turn.

    ``answers``: of other servers that have played before, to which those of these are added.

    Raises:
        ServingBenchmarkError, PlayError: a request got no answer, or an incomplete one.
    """
    by_name = {server.name: server for server in servers}
    clients = {server.name: client_of(server) for server in servers}
    answers = Answers() if answers is None else answers
    try:
        for server in servers:
            await warm_up(clients[server.name], configuration)
            server.settle()
            server.mark()
        for number, batch in enumerate(batches):
            for name in order_of_servers(list(by_name), number):
                for turn in await _play_batch(name, clients[name], configuration, batch, answers):
                    tell(name, turn)
                if configuration.settles:
                    by_name[name].settle()
    except openai.OpenAIError as error:
        raise ServingBenchmarkError(f"a server gave no answer: {type(error).__name__}: {error}") from error
    finally:
        for client in clients.values():
            await client.close()
    return answers


def client_of(server: Server) -> openai.AsyncOpenAI:
    """A client that asks once and waits long."""
    return openai.AsyncOpenAI(
        base_url=f"{server.process.url}/v1", api_key="unused", max_retries=0, timeout=_REQUEST_TIMEOUT_S
    )


async def warm_up(client: openai.AsyncOpenAI, configuration: Configuration) -> None:
    """A request twice, which no conversation shares a prefix with: the first ones of a server are slower."""
    numbers = " ".join(str(number) for number in range(40))
    for _ in range(2):
        await ask(client, "warm-up", 1, [{"role": "user", "content": numbers}], configuration.max_tokens)


async def _play_batch(
    name: str,
    client: openai.AsyncOpenAI,
    configuration: Configuration,
    batch: Sequence[Arrival],
    answers: Answers,
) -> list[TurnResult]:
    began = time.perf_counter()
    first_sent = began

    async def play_turn(arrival: Arrival) -> TurnResult:
        nonlocal first_sent
        key = arrival.conversation.conversation_id
        ended_at = answers.ended_at.get((name, key))
        thought_at = began if ended_at is None else ended_at + configuration.think_time_s
        await asyncio.sleep(max(began + arrival.after_s, thought_at) - time.perf_counter())
        history = {turn: answers.history[key, turn] for turn in range(1, arrival.turn)}
        messages = arrival.conversation.messages(arrival.turn, history)
        if first_sent == began:
            first_sent = time.perf_counter()
        result = await ask(
            client, key, arrival.turn, messages, configuration.max_tokens, _hints(name, key, configuration)
        )
        answers.ended_at[name, key] = time.perf_counter()
        if name == configuration.reference:
            answers.history[key, arrival.turn] = result.answer
        return result

    async def play_turns(arrivals: Sequence[Arrival]) -> list[TurnResult]:
        return [await play_turn(arrival) for arrival in arrivals]

    of_conversations: dict[str, list[Arrival]] = defaultdict(list)
    for arrival in batch:
        of_conversations[arrival.conversation.conversation_id].append(arrival)
    played = await asyncio.gather(*map(play_turns, of_conversations.values()))
    turns = [turn for of_conversation in played for turn in of_conversation]
    answers.busy_s[name] += time.perf_counter() - first_sent
    answers.turns[name] += turns
    return turns


def _hints(name: str, conversation: str, configuration: Configuration) -> dict[str, Any]:
    """What a request says to a server of hints beside its prompt."""
    if not has_variant(name, "hints"):
        return {}
    hint = {"next_use_s": configuration.think_time_s}
    return {"session_id": conversation, "custom_params": {"krul_hints": hint}}


async def ask(
    client: openai.AsyncOpenAI,
    conversation: str,
    turn: int,
    messages: list[Message],
    max_tokens: int,
    more: Mapping[str, Any] | None = None,
) -> TurnResult:
    """One request, greedy and streamed, with ``more`` fields in its body."""
    fields = request(messages, max_tokens)
    fields["extra_body"] |= more or {}
    answer = TimedAnswer(conversation, turn)
    async for chunk in await client.chat.completions.create(**fields):
        answer.take(chunk)
    return answer.result()
