"""What the demo shows: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from krul_sglang.demo.player import TurnResult
from krul_sglang.demo.result import Row, Summary, format_seconds
from krul_sglang.demo.run import PHASES, DemoResult
from krul_sglang.demo.server import ServerProcess

_PHASE_TEXT = {
    "reference": "reference: a pool that holds everything",
    "baseline": "baseline: a small pool, without krul",
    "krul": "krul: the same small pool, with krul",
}
_COLUMNS = (
    "conversation",
    "turn",
    "prompt",
    "on device",
    "from krul",
    "recomputed",
    "TTFT",
    "baseline",
    "answer equal",
)
_LINES_AROUND_TABLE = 7


class LiveReporter:
    """Shows a table that grows while the krul server plays, above a progress bar over all three phases."""

    def __init__(self, console: Console, num_turns: int) -> None:
        self._console = console
        self._rows: list[Row] = []
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._task = self._progress.add_task("starting", total=num_turns * len(PHASES))
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> LiveReporter:
        self._live.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The whole table, which the screen may have been too small for, is printed at the end.
        self._live.transient = True
        self._live.stop()
        if self._rows:
            self._console.print(row_table(self._rows))

    def phase_started(self, phase: str, server: ServerProcess) -> None:
        self._describe(f"{_PHASE_TEXT[phase]} (server is starting)")

    def phase_ready(self, phase: str, ready_after_s: float) -> None:
        self._describe(_PHASE_TEXT[phase])

    def turn_answered(self, phase: str, result: TurnResult) -> None:
        self._progress.advance(self._task)

    def row_finished(self, row: Row) -> None:
        self._rows.append(row)

    def log_line(self, phase: str, line: str) -> None:
        self._console.print(f"[dim]{phase} | {escape(line)}[/dim]", highlight=False)

    def _describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def _render(self) -> Group:
        if not self._rows:
            return Group(self._progress)
        visible = max(1, self._console.height - _LINES_AROUND_TABLE)
        return Group(row_table(self._rows[-visible:]), self._progress)


class PlainReporter:
    """Prints one line per event, without control codes: for files and CI logs."""

    def __init__(self, console: Console, num_turns: int) -> None:
        self._console = console
        self._num_requests = num_turns * len(PHASES)
        self._num_answered = 0

    def __enter__(self) -> PlainReporter:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def phase_started(self, phase: str, server: ServerProcess) -> None:
        self._print(f"{_PHASE_TEXT[phase]}: starting {server.command_line}")

    def phase_ready(self, phase: str, ready_after_s: float) -> None:
        self._print(f"{phase}: ready after {ready_after_s:.0f} s")

    def turn_answered(self, phase: str, result: TurnResult) -> None:
        self._num_answered += 1
        if phase != "krul":
            self._print(
                f"[{self._num_answered}/{self._num_requests}] {phase}: {result.conversation} "
                f"turn {result.turn}: prompt {result.prompt_tokens} = device {result.device_tokens} + "
                f"recomputed {result.computed_tokens}, TTFT {format_seconds(result.ttft_s)}"
            )

    def row_finished(self, row: Row) -> None:
        self._print(
            f"[{self._num_answered}/{self._num_requests}] krul: {row.conversation} turn {row.turn}: "
            f"prompt {row.prompt_tokens} = device {row.device_tokens} + krul {row.host_tokens} + "
            f"recomputed {row.computed_tokens}, TTFT {format_seconds(row.ttft_s)} "
            f"(baseline {format_seconds(row.baseline_ttft_s)}), "
            f"answer {'equal' if row.answer_equal else 'DIFFERENT'}"
        )

    def log_line(self, phase: str, line: str) -> None:
        self._print(f"{phase} | {line}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_reporter(console: Console, num_turns: int) -> LiveReporter | PlainReporter:
    return LiveReporter(console, num_turns) if console.is_terminal else PlainReporter(console, num_turns)


def print_result(console: Console, result: DemoResult) -> None:
    """Print the summary table and, last, one plain sentence."""
    if console.is_terminal:
        console.print(_summary_table(result.summary))
    else:
        for name, value in summary_lines(result.summary):
            console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
    console.print(result.verdict, markup=False, highlight=False, soft_wrap=True)


def row_table(rows: Sequence[Row]) -> Table:
    table = Table(title="the krul server, turn by turn (prompt tokens by where their KV came from)")
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(
            escape(row.conversation),
            str(row.turn),
            str(row.prompt_tokens),
            str(row.device_tokens),
            f"[bold green]{row.host_tokens}[/bold green]" if row.host_tokens else "0",
            str(row.computed_tokens),
            format_seconds(row.ttft_s),
            format_seconds(row.baseline_ttft_s),
            "yes" if row.answer_equal else "[bold red]NO[/bold red]",
        )
    return table


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Names and values of the summary, ready to print; values that do not exist are "-"."""
    return [
        ("returning turns restored", f"{summary.restored_turns} of {summary.returning_turns}"),
        ("tokens restored", str(summary.host_hit_tokens)),
        ("answers equal to the reference", f"{summary.answers_equal} of {summary.answers}"),
        ("  the same for the baseline", f"{summary.baseline_answers_equal} of {summary.answers}"),
        ("recall of stated facts", _percent(summary.recall)),
        ("  the same for the baseline", _percent(summary.baseline_recall)),
        ("median TTFT of returning turns", _seconds(summary.median_ttft_s)),
        ("  the same for the baseline", _seconds(summary.baseline_median_ttft_s)),
        ("median TTFT of restored turns", _seconds(summary.median_restored_ttft_s)),
        ("  the same for the baseline", _seconds(summary.baseline_median_restored_ttft_s)),
        ("median TTFT of first turns (control)", _seconds(summary.median_first_ttft_s)),
        ("  the same for the baseline", _seconds(summary.baseline_median_first_ttft_s)),
        ("stored in host memory", _stored(summary)),
    ]


def _summary_table(summary: Summary) -> Table:
    table = Table(title="summary", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in summary_lines(summary):
        table.add_row(name, value)
    return table


def _stored(summary: Summary) -> str:
    if summary.bytes_stored is None or summary.tokens_stored is None:
        return "-"
    return f"{summary.bytes_stored / 2**20:.1f} MiB for {summary.tokens_stored} tokens"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"
