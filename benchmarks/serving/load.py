"""Asks the servers: the same turns in the same order, the servers in turns, and each answer timed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import openai

from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.servers import Server
from krul_sglang.demo.conversations import Conversation, Message
from krul_sglang.demo.player import TurnResult, play_order

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
    conversations: Sequence[Conversation], *, rate: float | None, seed: int
) -> list[tuple[Arrival, ...]]:
    """The turns in batches; in a batch they run at the same time.

    Without ``rate`` a batch is one turn, in ``play_order``: between two turns of a conversation all the
    others run. With it a batch is a round, whose turns arrive as a Poisson process in a random order.
    """
    order = list(play_order(conversations))
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
) -> Answers:
    """Let each server play each batch before the next batch begins. ``tell`` is given every answered turn.

    Raises:
        ServingBenchmarkError: a request got no answer.
    """
    by_name = {server.name: server for server in servers}
    clients = {
        server.name: openai.AsyncOpenAI(
            base_url=f"{server.process.url}/v1", api_key="unused", max_retries=0, timeout=_REQUEST_TIMEOUT_S
        )
        for server in servers
    }
    answers = Answers()
    try:
        for server in servers:
            await _warm_up(clients[server.name], configuration)
            server.settle()
            server.mark()
        for number, batch in enumerate(batches):
            for name in order_of_servers(list(by_name), number):
                for turn in await _play_batch(name, clients[name], configuration, batch, answers):
                    tell(name, turn)
                if configuration.settles:
                    by_name[name].settle()
            for turn in answers.turns[configuration.reference][-len(batch) :]:
                answers.history[turn.conversation, turn.turn] = turn.answer
    except openai.OpenAIError as error:
        raise ServingBenchmarkError(f"a server gave no answer: {type(error).__name__}: {error}") from error
    finally:
        for client in clients.values():
            await client.close()
    return answers


async def _warm_up(client: openai.AsyncOpenAI, configuration: Configuration) -> None:
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
        result = await ask(client, key, arrival.turn, messages, configuration.max_tokens)
        answers.ended_at[name, key] = time.perf_counter()
        return result

    turns = await asyncio.gather(*map(play_turn, batch))
    answers.busy_s[name] += time.perf_counter() - first_sent
    answers.turns[name] += turns
    return turns


async def ask(
    client: openai.AsyncOpenAI, conversation: str, turn: int, messages: list[Message], max_tokens: int
) -> TurnResult:
    """One request, greedy and streamed. The clock starts before it is sent and stops at the first text."""
    pieces: list[str] = []
    first_piece_at: float | None = None
    usage: Any = None
    cached: dict[str, int] = {}
    started = time.perf_counter()
    stream = await client.chat.completions.create(
        model="default",
        messages=cast(Any, messages),
        temperature=0.0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_cached_tokens_details": True},
    )
    async for chunk in stream:
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            if first_piece_at is None:
                first_piece_at = time.perf_counter()
            pieces.append(text)
        usage = chunk.usage or usage
        # SGLang's extension: sent once, and only if anything was cached.
        extension = (chunk.model_extra or {}).get("sglext") or {}
        cached = extension.get("cached_tokens_details") or cached
    ended = time.perf_counter()
    if usage is None:
        raise ServingBenchmarkError(
            f"conversation {conversation!r}, turn {turn}: an answer without its usage"
        )
    return TurnResult(
        conversation=conversation,
        turn=turn,
        prompt_tokens=usage.prompt_tokens,
        device_tokens=cached.get("device", 0),
        host_tokens=cached.get("host", 0),
        completion_tokens=usage.completion_tokens,
        # An answer may be empty: then its end is its first sign.
        ttft_s=(ended if first_piece_at is None else first_piece_at) - started,
        total_s=ended - started,
        answer="".join(pieces),
    )
