"""Lets users have their conversations side by side, with one server after another."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import openai

from benchmarks.load.rows import Played, make_rows
from benchmarks.runner import failures_kept
from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.conversations import cut_conversations, recorded_prompts
from benchmarks.serving.load import ask, client_of, warm_up
from benchmarks.serving.rows import theoretical_hit_rate
from benchmarks.serving.servers import Server, check_pool, kv_token_bytes, make_server
from demo.app import BUNDLED_CONVERSATIONS
from demo.conversations import Conversation, load_conversations
from demo.server import ServerError
from demo.sizing import EncodeMessages, PoolSizes, load_token_encoder, plan_pools
from krul_sglang.cli.timed_answer import TurnResult

logger = logging.getLogger(__name__)

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "recompute": ("recompute", {}),
    "device": ("device", {}),
    "native": ("native", {}),
    "native-tenth": ("native", {"host_share": 0.1}),
    "compressed": ("compressed", {"host_share": 0.1}),
    "compressed-all-memory": ("compressed", {}),
}
"""What is compared: a server of ``benchmarks.serving``, and in what its ``Configuration`` differs."""


def find_configuration(name: str) -> tuple[str, dict[str, Any]]:
    """One of ``CONFIGURATIONS``, or ``native:SHARE`` or ``compressed:SHARE``: with host memory for that share
    of native KV.

    Raises:
        ServingBenchmarkError: there is none of that name.
    """
    server, _, share = name.partition(":")
    try:
        return (
            (server, {"host_share": float(share)})
            if server in ("native", "compressed") and share
            else CONFIGURATIONS[name]
        )
    except (KeyError, ValueError):
        accepted = ", ".join(CONFIGURATIONS)
        raise ServingBenchmarkError(
            f"--configurations: no {name}; accepted are {accepted}, native:SHARE, compressed:SHARE"
        ) from None


POOL_SHARE = 0.45
"""The small pool, as a share of what all conversations have in the end."""
_MOST_RUNNING = 8
_WHOLE_ANSWERS = {"ignore_eos": True, "skip_special_tokens": False}
"""All answers are equally long. An end within one stays in its text, and so comes back as the same token."""


def run(
    base: Configuration, names: Sequence[str], users: Sequence[int], dtypes: Sequence[str], num_blocks: int
) -> dict[str, Any]:
    """Measure every configuration with each number of users in each dtype: a block of all, then the next one.

    If a server fails, the result is what was measured before, and has the ``failure``.

    Raises:
        KrulError: the options fit nothing, or the first server fails.
    """
    encode, context_length = load_token_encoder(base.model_path)
    texts = list(choose_texts(base.data))
    # Where the data lie is of no use to others.
    data = "" if base.data is None else base.data.name
    of_run = {"data": data, "servers": names, "users": users, "dtype": dtypes, "blocks": num_blocks}
    given = {name: value for name, value in base.to_json().items() if value is not None}
    result: dict[str, Any] = {"configuration": given | of_run, "loads": [], "rows": [], "turns": []}
    with failures_kept(result):
        for dtype, num_users in product(dtypes, users):
            load: dict[str, Any] = {"users": num_users, "dtype": dtype}
            configuration = replace(base, **load)
            conversations = cut_conversations(texts, configuration, lambda messages: len(encode(messages)))
            pools = choose_pools(configuration, conversations, encode, context_length)
            running = most_running("device", pools, configuration.users)
            native_bytes = pools.total_tokens * kv_token_bytes(configuration)
            result["loads"].append(
                {**load, **asdict(pools), "native_bytes": native_bytes, "device_running": running}
            )
            played: dict[str, list[Played]] = {}
            try:
                for block, name in product(range(num_blocks), names):
                    logger.info("%s, block %d: %s", load, block + 1, name)
                    answered = _play_server(name, configuration, conversations, pools, encode)
                    played.setdefault(name, []).append(answered)
                    result["turns"].append(
                        {
                            **load,
                            "block": block,
                            "configuration": name,
                            "turns": [asdict(turn) for turn in answered.turns],
                            "krul": answered.when_settled,
                        }
                    )
            finally:
                result["rows"] += [{**load, **row} for row in make_rows(played)]
    return result


def choose_texts(data: Path | None) -> Iterable[tuple[str, str]]:
    """Each recorded session's longest prompt; without ``data`` what users say in bundled conversations."""
    if data is not None:
        return ((name, max(prompts, key=len)) for name, prompts in recorded_prompts(data) if prompts)
    bundled = load_conversations(BUNDLED_CONVERSATIONS).conversations
    return [("bundled", "\n".join(turn.text for each in bundled for turn in each.turns))]


def choose_pools(
    configuration: Configuration,
    conversations: Sequence[Conversation],
    encode: EncodeMessages,
    context_length: int | None,
) -> PoolSizes:
    """The pool that was asked for, or one for ``POOL_SHARE``."""
    page_size = configuration.page_size
    plan = partial(
        plan_pools,
        conversations,
        lambda messages: len(encode(messages)),
        max_tokens=configuration.max_tokens,
        page_size=page_size,
        context_length=context_length,
    )
    share = math.ceil(POOL_SHARE * plan(device_tokens=None).total_tokens / page_size) * page_size
    return plan(device_tokens=configuration.device_tokens or share)


def most_running(name: str, pools: PoolSizes, users: int) -> int:
    """How many requests a server may run; ``device`` as many as the small pool has room for at their end."""
    held = pools.device_tokens * users // pools.total_tokens
    return max(1, min(_MOST_RUNNING, held)) if name == "device" else _MOST_RUNNING


def _play_server(
    name: str,
    configuration: Configuration,
    conversations: Sequence[Conversation],
    pools: PoolSizes,
    encode: EncodeMessages,
) -> Played:
    """Start the server of a configuration, let all users have their conversations with it, and stop it."""
    server_name, changes = find_configuration(name)
    running = ("--max-running-requests", str(most_running(name, pools, configuration.users)))
    own = replace(configuration, **changes, server_args=(*running, *configuration.server_args))
    with tempfile.TemporaryDirectory(prefix="krul-load-") as folder:
        server = make_server(server_name, own, pools, Path(folder))
        with server.process:
            check_pool(server, configuration.page_size)
            turns, seconds = asyncio.run(play(server, configuration, conversations))
            when_answered = server.krul_states()
            try:
                server.settle()
            except ServerError as error:
                logger.warning("%s: %s", name, error)
            when_settled = server.krul_states()
    possible_share = theoretical_hit_rate(
        conversations,
        {(turn.conversation, turn.turn): turn for turn in turns},
        encode,
        page_size=configuration.page_size,
    )
    return Played(turns, seconds, possible_share, when_answered, when_settled)


async def play(
    server: Server, configuration: Configuration, conversations: Sequence[Conversation]
) -> tuple[list[TurnResult], float]:
    """All turns of all users, side by side, and the seconds from the first request to the last answer.

    Raises:
        ServingBenchmarkError, PlayError: a request got no answer, or an incomplete one.
    """
    rounds, mean_s = configuration.rounds, configuration.think_time_s
    pauses_s = list(think_times(len(conversations), rounds, mean_s, configuration.seed))

    async def play_user(conversation: Conversation, own_pauses_s: Sequence[float]) -> list[TurnResult]:
        turns: list[TurnResult] = []
        for turn, pause_s in enumerate(own_pauses_s, start=1):
            await asyncio.sleep(pause_s)
            messages = conversation.messages(turn, {each.turn: each.answer for each in turns})
            key = conversation.conversation_id
            turns.append(await ask(client, key, turn, messages, configuration.max_tokens, _WHOLE_ANSWERS))
        return turns

    client = client_of(server)
    try:
        await warm_up(client, configuration)
        first_asked = time.perf_counter() + min(own[0] for own in pauses_s)
        played = await asyncio.gather(*map(play_user, conversations, pauses_s))
        seconds = time.perf_counter() - first_asked
    except openai.OpenAIError as error:
        raise ServingBenchmarkError(f"{server.name}: no answer: {type(error).__name__}: {error}") from error
    finally:
        await client.close()
    return [turn for own in played for turn in own], seconds


def think_times(users: int, turns: int, mean_s: float, seed: int) -> Iterator[list[float]]:
    """Of each user the seconds before each of its turns; with more users those of the first stay the same."""
    for user in range(users):
        dice = random.Random(f"{seed} {user}")
        yield [dice.expovariate(1 / mean_s) if mean_s else 0.0 for _ in range(turns)]
