"""Runs one configuration and returns the result file's content."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.bench_serving import as_chat, plan_pools_of_groups, rows_of_reports, run_bench_serving
from benchmarks.serving.configuration import Configuration
from benchmarks.serving.conversations import choose_conversations
from benchmarks.serving.divergence import TOP_TOKENS, ask_and_compare, rows_of, whole_conversations
from benchmarks.serving.load import Answers, play, schedule
from benchmarks.serving.rows import of_tiers, row, theoretical_hit_rate
from benchmarks.serving.servers import Counts, Server, check_pool, dtype, host_memory_bytes, make_server
from demo.conversations import Conversation
from demo.environment import without_cwd
from demo.sizing import EncodeMessages, PoolSizes, load_token_encoder, plan_pools
from krul_sglang.cli.timed_answer import Message, TurnResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class End:
    """What a server said of itself when it had played; None without krul."""

    counts: Counts | None
    bytes_stored: int | None


def run(configuration: Configuration) -> dict[str, Any]:
    """Start the servers, ask them, and make rows.

    Raises:
        KrulError: the conversations do not fit the options, a server does not start, or does not answer.
    """
    encode, context_length = load_token_encoder(configuration.model_path)

    def count_tokens(messages: list[Message]) -> int:
        return len(encode(messages))

    conversations: Sequence[Conversation] = ()
    if configuration.client == "bench_serving" and not (configuration.conversations or configuration.data):
        pools = plan_pools_of_groups(configuration)
    else:
        conversations = choose_conversations(configuration, count_tokens)
        if configuration.client == "bench_serving":
            conversations = tuple(map(as_chat, conversations))
        pools = plan_pools(
            conversations,
            count_tokens,
            max_tokens=configuration.max_tokens,
            page_size=configuration.page_size,
            device_tokens=configuration.device_tokens,
            context_length=context_length,
        )
    measured: dict[str, Any] = {}
    about: list[dict[str, Any]] = []
    states: dict[str, Any] = {}
    answers = Answers()
    ends: dict[str, End] = {}
    with tempfile.TemporaryDirectory(prefix="krul-serving-") as name:
        folder = Path(name)
        for group in configuration.groups:
            with ExitStack() as stack:
                servers = _start(group, configuration, pools, folder, stack)
                if configuration.client == "bench_serving":
                    measured = _bench_serving(servers, configuration, conversations, folder)
                elif configuration.client == "divergence":
                    measured = _compare(servers, configuration, conversations, encode)
                else:
                    _play(servers, configuration, conversations, answers)
                    ends |= {server.name: End(server.counts(), server.bytes_stored()) for server in servers}
                about += [
                    {
                        "configuration": server.name,
                        "pool_tokens": server.pool_tokens,
                        "krul_options": server.options,
                        "command": without_cwd(server.process.command_line),
                        "restores": server.restores(),
                        "tiers_mbs": server.tiers_mbs(),
                        "ready_after_s": server.process.ready_after_s,
                        "memory_bytes": server.memory_bytes(),
                    }
                    for server in servers
                ]
                states |= {server.name: server.krul_states() for server in servers}
    if ends:
        measured = _rows(configuration, conversations, encode, answers, ends)
    return {
        "configuration": {
            **configuration.to_json(),
            "dtype": dtype(configuration),
            "reference": configuration.reference,
            "host_memory_bytes": host_memory_bytes(configuration, pools),
            **asdict(pools),
        },
        "servers": about,
        **measured,
        "krul": states,
    }


def _start(
    names: Sequence[str], configuration: Configuration, pools: PoolSizes, folder: Path, stack: ExitStack
) -> list[Server]:
    """One after the other: krul measures its costs as it starts, and nothing else may run meanwhile."""
    servers = []
    for name in names:
        server = make_server(name, configuration, pools, folder)
        logger.info("%s: starts", name)
        if server.daemon is not None:
            stack.enter_context(server.daemon)
        stack.enter_context(server.process)
        check_pool(server, configuration.page_size)
        logger.info("%s: ready after %.0f s", name, server.process.ready_after_s)
        servers.append(server)
    return servers


def _play(
    servers: Sequence[Server],
    configuration: Configuration,
    conversations: Sequence[Conversation],
    answers: Answers,
) -> None:
    """Let this benchmark's own client ask a group of servers, and add what they say to ``answers``."""
    batches = schedule(
        conversations, rate=configuration.rate, seed=configuration.seed, rotates=configuration.rotates
    )

    def tell(name: str, turn: TurnResult) -> None:
        logger.info("%s: %s, turn %d: %.0f ms", name, turn.conversation, turn.turn, 1e3 * turn.ttft_s)

    asyncio.run(play(servers, configuration, batches, tell, answers))


def _rows(
    configuration: Configuration,
    conversations: Sequence[Conversation],
    encode: EncodeMessages,
    answers: Answers,
    ends: Mapping[str, End],
) -> dict[str, Any]:
    """Rows of this benchmark's own client, and every turn."""
    of_reference = answers.turns[configuration.reference]
    hit_rate = theoretical_hit_rate(
        conversations,
        {(turn.conversation, turn.turn): turn for turn in of_reference},
        encode,
        page_size=configuration.page_size,
    )
    rows = [
        row(
            name,
            answers.turns,
            reference=configuration.reference,
            busy_s=answers.busy_s[name],
            hit_pages={} if end.counts is None else end.counts.hit_pages,
            theoretical_hit_rate=hit_rate,
            bytes_stored=end.bytes_stored,
        )
        | of_tiers(answers.turns[name], of_reference, end.counts, page_size=configuration.page_size)
        for name, end in ends.items()
    ]
    turns = {name: [asdict(turn) for turn in of_server] for name, of_server in answers.turns.items()}
    return {"rows": rows, "turns": turns}


def _compare(
    servers: Sequence[Server],
    configuration: Configuration,
    conversations: Sequence[Conversation],
    encode: EncodeMessages,
) -> dict[str, Any]:
    """Rows of what each server's predictions are worth, and every turn."""
    turns = ask_and_compare(servers, configuration, conversations, encode, logger.info)
    budgets = {name: configuration.error_budget_of(name) for name in turns}
    rows, whole = [], []
    for name, compared in turns.items():
        rows += rows_of(name, compared, budgets[name])
        whole += whole_conversations(name, compared, budgets[name])
    return {
        "top_tokens": TOP_TOKENS,
        "error_budgets": budgets,
        "bytes_stored": {server.name: server.bytes_stored() for server in servers},
        "rows": rows,
        "whole_conversations": whole,
        "turns": {name: [asdict(turn) for turn in compared] for name, compared in turns.items()},
    }


def _bench_serving(
    servers: Sequence[Server],
    configuration: Configuration,
    conversations: Sequence[Conversation],
    folder: Path,
) -> dict[str, Any]:
    """Rows of SGLang's client, and all that it reported."""
    reports = {}
    for server in servers:
        reports[server.name] = run_bench_serving(server, configuration, conversations, folder)
        server.settle()
        logger.info("%s: %s requests", server.name, reports[server.name]["completed"])
    stored = {server.name: server.bytes_stored() for server in servers}
    rows = rows_of_reports(reports, stored, with_answers=bool(conversations))
    return {"rows": rows, "turns": reports}
