"""Puts SGLang's own load generator, ``sglang.bench_serving``, in the place of this benchmark's.

It sends prompts in groups that share a long beginning, shuffled by a seed: the first prompt of a group stands
for a first turn, the others for returning ones. Given conversations, it plays them as an agentic trace
instead, side by side, with the answers of the server in the history. Each server gets all of its requests
before the next one.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.conversations import RecordedConversation
from benchmarks.serving.rows import of_ttft, ratios
from benchmarks.serving.servers import Server
from demo.conversations import Conversation, UserTurn
from demo.sizing import PoolSizes, needed_pool_tokens

QUESTION_TOKENS = 32

_RETOKENIZED = 1.5
"""Its prompts are random tokens made into text: of that text a tokenizer makes more tokens again."""


def plan_pools_of_groups(configuration: Configuration) -> PoolSizes:
    """Pools for prompts of which only the wanted length is known."""
    page_size, tail = configuration.page_size, QUESTION_TOKENS + configuration.max_tokens
    longest = int(_RETOKENIZED * (configuration.longest_history_tokens + tail))
    per_group = int(_RETOKENIZED * (configuration.longest_history_tokens + configuration.rounds * tail))
    total = configuration.users * per_group
    small = configuration.device_tokens or needed_pool_tokens(longest, page_size=page_size)
    if configuration.users * configuration.longest_history_tokens <= small:
        raise ServingBenchmarkError(
            f"{configuration.users} groups of {configuration.longest_history_tokens} tokens fit into the "
            f"device pool of {small}: nothing would leave it; use more --users or a smaller --device-tokens"
        )
    return PoolSizes(small, needed_pool_tokens(total, page_size=page_size), longest, total)


def as_chat(conversation: Conversation) -> Conversation:
    """A recorded conversation as a chat: each message is what its prompt adds to the one before."""
    if not isinstance(conversation, RecordedConversation):
        return conversation
    prompts = [turn.text for turn in conversation.turns]
    messages = [prompts[0], *(later.removeprefix(earlier) for earlier, later in pairwise(prompts))]
    return Conversation(conversation.conversation_id, tuple(map(UserTurn, messages)))


def write_trace(conversations: Sequence[Conversation], path: Path) -> None:
    """The file of an agentic trace: per conversation and turn the messages that are new."""
    turns = [
        [{"messages": [{"role": "user", "content": turn.text}]} for turn in conversation.turns]
        for conversation in conversations
    ]
    path.write_text(json.dumps({"conversations": turns}))


def command(configuration: Configuration, url: str, output: Path, trace: Path | None = None) -> list[str]:
    if configuration.rate is not None:
        load = ["--request-rate", str(configuration.rate), "--max-concurrency", str(configuration.users)]
    else:
        # A place is a request of a group, and a whole conversation of a trace.
        load = ["--max-concurrency", "1" if trace is None else str(configuration.users)]
    if trace is None:
        data = [
            *("--dataset-name", "generated-shared-prefix"),
            *("--gsp-num-groups", str(configuration.users)),
            *("--gsp-prompts-per-group", str(configuration.rounds)),
            *("--gsp-system-prompt-len", str(configuration.longest_history_tokens)),
            *("--gsp-question-len", str(QUESTION_TOKENS)),
            *("--gsp-output-len", str(configuration.max_tokens)),
        ]
    else:
        data = [
            *("--dataset-name", "agentic-trace", "--dataset-path", str(trace)),
            *("--num-prompts", str(configuration.users)),
            *("--sharegpt-output-len", str(configuration.max_tokens)),
        ]
    return [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", "--base-url", url),
        *("--model", configuration.model_path, "--seed", str(configuration.seed)),
        *data,
        *load,
        # It would send the first prompt twice.
        *("--warmup-requests", "0"),
        *("--cache-report", "--output-details", "--disable-tqdm", "--output-file", str(output)),
    ]


def run_bench_serving(
    server: Server, configuration: Configuration, conversations: Sequence[Conversation], folder: Path
) -> dict[str, Any]:
    """Let it ask one server; what it wrote into its file. Without conversations it generates groups.

    Raises:
        ServingBenchmarkError: it failed, or a request did.
    """
    output = folder / f"bench-serving-{server.name}.jsonl"
    trace = folder / "agentic-trace.json" if conversations else None
    if trace is not None:
        write_trace(conversations, trace)
    arguments = command(configuration, server.process.url, output, trace)
    # It keeps generated prompts in the home directory, under a name that does not tell models apart.
    env = {**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(arguments, env=env, capture_output=True, text=True, check=False)
    if ran.returncode != 0 or not output.exists():
        lines = (ran.stderr or ran.stdout).strip().splitlines()
        raise ServingBenchmarkError(
            f"{shlex.join(arguments)}\nended with status {ran.returncode}: {lines[-1] if lines else ''}"
        )
    # Not orjson: without a rate it writes Infinity.
    report: dict[str, Any] = json.loads(output.read_text())
    turns = sum(len(conversation.turns) for conversation in conversations)
    expected = turns or configuration.users * configuration.rounds
    if report["completed"] != expected:
        error = next((error for error in report["errors"] if error), "no error was given")
        raise ServingBenchmarkError(
            f"{server.name}: {report['completed']} of {expected} requests were answered: {error}"
        )
    return report


def rows_of_reports(
    reports: Mapping[str, Mapping[str, Any]],
    bytes_stored: Mapping[str, int | None],
    *,
    with_answers: bool = False,
) -> list[dict[str, Any]]:
    """Rows of what it reports, and ratios over the requests whose beginning came before.

    These are the requests of which any server found more than half in its cache. ``with_answers``: prompts
    hold the servers' own answers, which may differ.

    Raises:
        ServingBenchmarkError: the servers did not get the same prompts.
    """
    first = next(iter(reports.values()))
    if not with_answers and any(report["input_lens"] != first["input_lens"] for report in reports.values()):
        raise ServingBenchmarkError("bench_serving did not send the same prompts to each server")
    found_by_all = zip(*(report["cached_tokens"] for report in reports.values()), strict=True)
    returning = [
        max(found) > length / 2 for found, length in zip(found_by_all, first["input_lens"], strict=True)
    ]
    ttft_s = {
        name: [seconds for seconds, returns in zip(report["ttfts"], returning, strict=True) if returns]
        for name, report in reports.items()
    }
    return [
        {
            "configuration": name,
            "requests": report["completed"],
            "returning_turns": sum(returning),
            **of_ttft(ttft_s[name]),
            **ratios(ttft_s, name),
            "all_requests_mean_ttft_s": report["mean_ttft_ms"] / 1e3,
            "all_requests_p50_ttft_s": report["median_ttft_ms"] / 1e3,
            "all_requests_p99_ttft_s": report["p99_ttft_ms"] / 1e3,
            "tpot_s": report["median_tpot_ms"] / 1e3,
            "tokens_per_s": report["output_throughput"],
            "hit_rate_by_tier": {
                tier: (report["cache_report"][f"{tier}_cached_tokens"] or 0)
                / report["cache_report"]["total_prompt_tokens"]
                for tier in ("device", "host")
            },
            "bytes_stored": bytes_stored[name],
        }
        for name, report in reports.items()
    ]
