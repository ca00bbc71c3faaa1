"""Runs the demo: three servers, side by side, get the same prompts in turn, and are compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import orjson

from benchmarks.runner import about
from demo import environment
from demo.conversations import Conversation
from demo.player import Answers, Player, play_order
from demo.result import SERVERS, Row, ServerName, Summary, make_rounds, make_row, summarize, verdict
from demo.server import (
    KrulState,
    ServerProcess,
    default_device_args,
    start_servers,
    stop_servers,
    stored_amounts,
    wait_for_saves,
)
from demo.sizing import PoolSizes, needed_pool_tokens
from krul_backend.errors import KrulError
from krul_sglang.cli.timed_answer import PlayError, TurnResult
from krul_sglang.config import KrulConfig

_LOG_INTERVAL_S = 0.3
_MEMORY_SHARE = ("--mem-fraction-static", "0.7")
"""On a CPU. A server measures its share while the others load their weights; the pool has its own limit."""


class DemoError(KrulError):
    """The demo cannot go on; the message says why, and what to change."""


def default_dtype() -> str:
    """float32 without a GPU (bfloat16 is slower on a CPU), else what the model's config says."""
    return "float32" if default_device_args() else "auto"


@dataclass(frozen=True)
class DemoConfig:
    """The settings that all three servers share, and those of the requests.

    ``krul_options`` are further keys of ``KrulConfig`` for the krul server.
    """

    model_path: str
    conversations_path: str
    max_tokens: int = 24
    page_size: int = 16
    host_memory: str = "512MiB"
    krul_options: dict[str, str] = field(default_factory=dict)
    dtype: str = field(default_factory=default_dtype)
    server_args: tuple[str, ...] = ()
    ready_timeout_s: float = 600.0


@dataclass(frozen=True)
class DemoResult:
    """Everything that one run measured. ``krul_states`` are krul's counters at its end."""

    rows: tuple[Row, ...]
    summary: Summary
    server_commands: dict[str, str]
    krul_states: list[KrulState]
    config: DemoConfig
    pools: PoolSizes
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def verdict(self) -> list[str]:
        return verdict(self.summary, self.rows)

    def to_json(self) -> dict[str, Any]:
        """What is kept of a run: the summary and the rounds, without each turn."""
        config = {
            name: environment.without_cwd(value) if isinstance(value, str) else value
            for name, value in {**asdict(self.config), **asdict(self.pools)}.items()
        }
        commands = {name: environment.without_cwd(command) for name, command in self.server_commands.items()}
        return {
            "summary": {**asdict(self.summary), "passed": self.summary.passed, "verdict": self.verdict},
            "rounds": [asdict(each) for each in make_rounds(self.rows)],
            "configuration": config,
            "server_commands": commands,
            "krul": self.krul_states,
            **about(),
            "timestamp": self.timestamp,
        }

    def turns_to_json(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]


class Reporter(Protocol):
    """Is told about the progress of the run."""

    def servers_starting(self, servers: Mapping[ServerName, ServerProcess]) -> None: ...

    def server_ready(self, name: ServerName, ready_after_s: float) -> None: ...

    def turn_finished(self, row: Row, question: str) -> None: ...

    def log_line(self, name: ServerName, line: str) -> None: ...


def run_demo(
    config: DemoConfig,
    pools: PoolSizes,
    conversations: Sequence[Conversation],
    reporter: Reporter,
    *,
    verbose: bool = False,
) -> DemoResult:
    """Start the three servers side by side, and ask all of them each turn before the next turn comes.

    The order of the servers rotates from turn to turn. The history of a prompt holds the answers of
    ``device``. Nobody is asked while the krul server is still saving the turn before.

    Raises:
        ServerError: a server did not start, or did not answer. All three are ended then.
        DemoError: a pool has another size than asked for, or a conversation grew beyond the small pool.
    """
    servers = {
        name: ServerProcess(
            config.model_path, args=server_args(name, config, pools), ready_timeout_s=config.ready_timeout_s
        )
        for name in SERVERS
    }
    rows: list[Row] = []
    answers: Answers = {}
    with ExitStack() as stack:
        if verbose:
            for name, server in servers.items():
                stack.enter_context(_following_log(server, partial(reporter.log_line, name)))
        reporter.servers_starting(servers)
        stack.callback(stop_servers, list(servers.values()))
        names = {server: name for name, server in servers.items()}
        start_servers(
            list(servers.values()),
            lambda server: reporter.server_ready(names[server], server.ready_after_s or 0.0),
        )
        players = {}
        for name, server in servers.items():
            _check_pool(name, server, pools)
            players[name] = stack.enter_context(Player(server.url, max_tokens=config.max_tokens))
            players[name].warm_up()
        states = wait_for_saves(servers["krul"])
        for number, (conversation, turn) in enumerate(play_order(conversations)):
            results: dict[ServerName, TurnResult] = {}
            save_s = 0.0
            for name in _rotated(SERVERS, number):
                try:
                    results[name] = players[name].ask(conversation, turn, answers)
                except PlayError as error:
                    raise servers[name].error(f"the server {name!r} gave {error}") from error
                _check_length(results[name], config, pools)
                if name == "krul":
                    answered_at = time.perf_counter()
                    states = wait_for_saves(servers["krul"])
                    save_s = time.perf_counter() - answered_at
            row = make_row(conversation, **results, save_s=save_s, stored=stored_amounts(states))
            answers[row.conversation, turn] = row.device.answer
            rows.append(row)
            reporter.turn_finished(row, conversation.turns[turn - 1].text)
    return DemoResult(
        rows=tuple(rows),
        summary=summarize(rows, answers_must_be_same=_answers_must_be_same(config)),
        krul_states=states,
        server_commands={name: server.command_line for name, server in servers.items()},
        config=config,
        pools=pools,
    )


def _rotated(names: tuple[ServerName, ...], number: int) -> tuple[ServerName, ...]:
    start = number % len(names)
    return names[start:] + names[:start]


def _answers_must_be_same(config: DemoConfig) -> bool:
    """In 16 bits, two right ways to compute a token can differ."""
    krul_config = KrulConfig.from_mapping(krul_values(config), "the demo's options")
    return krul_config.is_lossless and config.dtype == "float32"


def server_args(name: ServerName, config: DemoConfig, pools: PoolSizes) -> list[str]:
    """The flags of one server; the three differ in the pool size and in krul only."""
    num_tokens = pools.reference_tokens if name == "device" else pools.device_tokens
    args = [
        *("--page-size", str(config.page_size)),
        *("--dtype", config.dtype),
        *(_MEMORY_SHARE if default_device_args() else ()),
        *config.server_args,
        *("--max-total-tokens", str(num_tokens)),
    ]
    if name == "krul":
        krul_config = orjson.dumps(krul_values(config)).decode()
        args += ["--radix-cache-backend", "krul", "--unified-cache-external-linker-config", krul_config]
    return args


def krul_values(config: DemoConfig) -> dict[str, str]:
    """The krul server's configuration, as ``KrulConfig.from_mapping`` takes it."""
    return {"host_memory": config.host_memory, **config.krul_options}


def _check_pool(name: ServerName, server: ServerProcess, pools: PoolSizes) -> None:
    asked = pools.reference_tokens if name == "device" else pools.device_tokens
    got = server.server_info().get("max_total_num_tokens")
    if got is None or got < asked:
        raise DemoError(
            f"the server {name!r} has a device pool of {got} tokens where {asked} are needed; use fewer "
            "conversations, or give each server another share of the memory that the three have together: "
            "--server-arg=--mem-fraction-static=..."
        )


def _check_length(result: TurnResult, config: DemoConfig, pools: PoolSizes) -> None:
    """Check the pool against the real answers.

    They can exceed the planned bounds: a tokenizer may encode a text in more tokens than the model wrote.
    """
    num_tokens = result.prompt_tokens + config.max_tokens
    needed = needed_pool_tokens(num_tokens, page_size=config.page_size)
    if needed > pools.device_tokens:
        raise DemoError(
            f"with the model's real answers conversation {result.conversation!r} takes {num_tokens} tokens; "
            f"use --device-tokens {needed} or more (now {pools.device_tokens})"
        )


@contextmanager
def _following_log(server: ServerProcess, on_line: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_line`` from a thread for each line that the server prints, until the block ends."""
    is_over = threading.Event()

    def follow() -> None:
        num_seen = 0
        while not is_over.wait(_LOG_INTERVAL_S):
            # The last piece has no newline yet: it may still grow.
            *lines, _ = server.log_text().split("\n")
            for line in lines[num_seen:]:
                on_line(line)
            num_seen = max(num_seen, len(lines))

    thread = threading.Thread(target=follow, name="krul-log-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
