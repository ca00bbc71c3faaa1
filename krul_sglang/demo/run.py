"""Runs the demo: three servers, one after the other, get the same prompts, and are compared."""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import orjson

from krul_backend.errors import KrulError
from krul_sglang.config import KrulConfig
from krul_sglang.demo import environment
from krul_sglang.demo.conversations import Conversation
from krul_sglang.demo.player import Answers, Player, PlayError, TurnResult
from krul_sglang.demo.result import (
    Row,
    Summary,
    TurnKey,
    krul_states,
    make_row,
    stored_amounts,
    summarize,
    verdict,
)
from krul_sglang.demo.server import ServerProcess, default_device_args
from krul_sglang.demo.sizing import PoolSizes, needed_pool_tokens

PHASES = ("reference", "baseline", "krul")

_LOG_INTERVAL_S = 0.3


class DemoError(KrulError):
    """The demo cannot go on; the message says why, and what to change."""


@dataclass(frozen=True)
class DemoConfig:
    """The settings that all three servers share, and those of the requests.

    ``krul_options`` are further keys of ``KrulConfig`` for the krul server. ``dtype`` None: see
    ``default_dtype``.
    """

    model_path: str
    conversations_path: str
    max_tokens: int = 48
    page_size: int = 16
    host_memory: str = "512MiB"
    krul_options: dict[str, str] = field(default_factory=dict)
    dtype: str | None = None
    server_args: tuple[str, ...] = ()
    ready_timeout_s: float = 600.0


@dataclass(frozen=True)
class DemoResult:
    """Everything that one run measured."""

    rows: tuple[Row, ...]
    summary: Summary
    samples: dict[str, list[TurnResult]]
    server_commands: dict[str, str]
    krul_states: list[dict[str, Any]]
    config: DemoConfig
    pools: PoolSizes
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def verdict(self) -> str:
        return verdict(self.summary, self.rows)

    def to_json(self) -> dict[str, Any]:
        config = {
            name: environment.without_cwd(value) if isinstance(value, str) else value
            for name, value in {**asdict(self.config), **asdict(self.pools)}.items()
        }
        commands = {
            phase: environment.without_cwd(command) for phase, command in self.server_commands.items()
        }
        return {
            "rows": [asdict(row) for row in self.rows],
            "summary": {**asdict(self.summary), "passed": self.summary.passed, "verdict": self.verdict},
            "samples": {phase: [asdict(turn) for turn in turns] for phase, turns in self.samples.items()},
            "configuration": config,
            "command": environment.without_cwd(shlex.join(sys.argv)),
            "server_commands": commands,
            "krul": self.krul_states,
            "git_revision": environment.git_revision(),
            "versions": environment.versions(),
            "machine": environment.machine(),
            "timestamp": self.timestamp,
        }


class Reporter(Protocol):
    """Is told about the progress of the run."""

    def phase_started(self, phase: str, server: ServerProcess) -> None: ...

    def phase_ready(self, phase: str, ready_after_s: float) -> None: ...

    def turn_answered(self, phase: str, result: TurnResult) -> None: ...

    def row_finished(self, row: Row) -> None: ...

    def log_line(self, phase: str, line: str) -> None: ...


def run_demo(
    config: DemoConfig,
    pools: PoolSizes,
    conversations: Sequence[Conversation],
    reporter: Reporter,
    *,
    verbose: bool = False,
) -> DemoResult:
    """Play ``conversations`` against the three servers.

    Raises:
        ServerError: a server did not start, or did not answer.
        DemoError: a pool has another size than asked for, or a conversation grew beyond the small pool.
    """
    by_name = {conversation.conversation_id: conversation for conversation in conversations}
    results: dict[str, dict[TurnKey, TurnResult]] = {}
    answers: Answers | None = None
    rows: list[Row] = []
    commands: dict[str, str] = {}
    states: list[dict[str, Any]] = []
    for phase in PHASES:
        server = ServerProcess(
            config.model_path,
            args=server_args(phase, config, pools),
            ready_timeout_s=config.ready_timeout_s,
        )
        commands[phase] = server.command_line
        results[phase] = {}
        reporter.phase_started(phase, server)
        with ExitStack() as stack:
            if verbose:
                stack.enter_context(_LogFollower(server, partial(reporter.log_line, phase)))
            stack.enter_context(server)
            _check_pool(phase, server, pools)
            player = stack.enter_context(Player(server.url, max_tokens=config.max_tokens))
            player.warm_up()
            reporter.phase_ready(phase, server.ready_after_s or 0.0)
            for result in _quoting_the_log(server, player.play(conversations, answers)):
                key = (result.conversation, result.turn)
                results[phase][key] = result
                reporter.turn_answered(phase, result)
                if phase == "krul":
                    row = make_row(
                        by_name[result.conversation],
                        result,
                        baseline=results["baseline"][key],
                        reference=results["reference"][key],
                    )
                    rows.append(row)
                    reporter.row_finished(row)
            if phase == "krul":
                states = krul_states(server.server_info())
        if phase == "reference":
            answers = {key: result.answer for key, result in results[phase].items()}
            _check_lengths(results[phase].values(), config, pools)
    return DemoResult(
        rows=tuple(rows),
        summary=summarize(
            rows,
            stored=stored_amounts(states),
            lossless=KrulConfig.from_mapping(krul_values(config), "the demo's options").is_lossless,
        ),
        krul_states=states,
        samples={phase: list(turns.values()) for phase, turns in results.items()},
        server_commands=commands,
        config=config,
        pools=pools,
    )


def server_args(phase: str, config: DemoConfig, pools: PoolSizes) -> list[str]:
    """The flags of one server; the three differ in the pool size and in krul only."""
    num_tokens = pools.reference_tokens if phase == "reference" else pools.device_tokens
    args = [
        *("--page-size", str(config.page_size)),
        *("--dtype", default_dtype() if config.dtype is None else config.dtype),
        *config.server_args,
        *("--max-total-tokens", str(num_tokens)),
    ]
    if phase == "krul":
        krul_config = orjson.dumps(krul_values(config)).decode()
        args += ["--radix-cache-backend", "krul", "--unified-cache-external-linker-config", krul_config]
    return args


def krul_values(config: DemoConfig) -> dict[str, str]:
    """The krul server's configuration, as ``KrulConfig.from_mapping`` takes it."""
    return {"host_memory": config.host_memory, **config.krul_options}


def default_dtype() -> str:
    """float32 without a GPU (bfloat16 is slower on a CPU), else what the model's config says."""
    return "float32" if default_device_args() else "auto"


def _quoting_the_log(server: ServerProcess, results: Iterable[TurnResult]) -> Iterator[TurnResult]:
    """Yield ``results``; if a turn gets no answer, raise an error that quotes the server's log."""
    try:
        yield from results
    except PlayError as error:
        raise server.error(str(error)) from error


def _check_pool(phase: str, server: ServerProcess, pools: PoolSizes) -> None:
    asked = pools.reference_tokens if phase == "reference" else pools.device_tokens
    got = server.server_info().get("max_total_num_tokens")
    if got is None or got < asked:
        raise DemoError(
            f"the {phase} server has a device pool of {got} tokens where {asked} are needed; "
            "use fewer conversations or give it more memory (--server-arg --mem-fraction-static=...)"
        )


def _check_lengths(results: Iterable[TurnResult], config: DemoConfig, pools: PoolSizes) -> None:
    """Check the pool against the real answers.

    They can exceed the planned bounds: a tokenizer may encode a text in more tokens than the model wrote.
    """
    longest = max(result.prompt_tokens for result in results) + config.max_tokens
    needed = needed_pool_tokens(longest, page_size=config.page_size)
    if needed > pools.device_tokens:
        raise DemoError(
            f"with the model's real answers the longest conversation takes {longest} tokens; "
            f"use --device-tokens {needed} or more (now {pools.device_tokens})"
        )


class _LogFollower:
    """Calls ``on_line`` from a thread for each line that the server prints, while the context is open."""

    def __init__(self, server: ServerProcess, on_line: Callable[[str], None]) -> None:
        self._server = server
        self._on_line = on_line
        self._num_lines_seen = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="krul-log-follower", daemon=True)

    def __enter__(self) -> _LogFollower:
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stopped.wait(_LOG_INTERVAL_S):
            # The last piece has no newline yet: it may still grow.
            *lines, _ = self._server.log_text().split("\n")
            for line in lines[self._num_lines_seen :]:
                self._on_line(line)
            self._num_lines_seen = max(self._num_lines_seen, len(lines))
