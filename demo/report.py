"""What the demo shows: bars and a progress line on a terminal, plain lines anywhere else, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from demo.result import SERVERS, Quantiles, Round, Row, ServerName, Summary, make_rounds
from demo.run import DemoResult
from demo.server import ServerProcess
from krul_backend.atomic_file import replacing
from krul_sglang.cli.timed_answer import format_seconds

_SHOWN: tuple[ServerName, ...] = ("recompute", "krul", "device")
_COLOURS: dict[ServerName, str] = {"recompute": "yellow", "krul": "green", "device": "blue"}
_BAR_WIDTH = 30
_COLUMNS = (
    "turn",
    "prompt tokens",
    "from krul",
    "recompute",
    "krul",
    "device hit",
    "times sooner",
    "held by krul",
)
_DRAWN_BARS = (
    ("recompute", "recompute (evicted)", "tab:orange"),
    ("krul", "krul (evicted, restored from host memory)", "tab:green"),
    ("device", "device hit (never evicted)", "tab:blue"),
)
_DRAWN_BAR_WIDTH = 0.27


class LiveReporter:
    """Prints each turn as three bars, the longest over the whole width, above a progress line."""

    def __init__(self, console: Console, num_turns: int) -> None:
        self._console = console
        self._num_ready = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=num_turns)

    def __enter__(self) -> LiveReporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def servers_starting(self, servers: Mapping[ServerName, ServerProcess]) -> None:
        self._describe(f"starting {len(servers)} servers")

    def server_ready(self, name: ServerName, ready_after_s: float) -> None:
        self._num_ready += 1
        is_last = self._num_ready == len(SERVERS)
        self._describe("turns" if is_last else f"starting: {self._num_ready} of {len(SERVERS)} are ready")

    def turn_finished(self, row: Row, question: str) -> None:
        longest_s = max(row.of(server).ttft_s for server in SERVERS)
        head = f"{row.conversation}, turn {row.turn}: "
        asked = shortened(question, self._console.width - len(head))
        self._print(Text(head + asked, style="bold"))
        for server, said in _said(row).items():
            ttft_s = row.of(server).ttft_s
            bar = "█" * max(1, round(_BAR_WIDTH * ttft_s / longest_s))
            line = Text(f"  {server:<10}")
            line.append(f"{bar:<{_BAR_WIDTH}}", style=_COLOURS[server])
            line.append(f"{format_seconds(ttft_s):>8}  {said}")
            self._print(line)
        self._progress.advance(self._task)

    def log_line(self, name: ServerName, line: str) -> None:
        self._console.print(Text(f"{name} | {line}", style="dim"), soft_wrap=True)

    def _print(self, line: Text) -> None:
        self._console.print(line, no_wrap=True, overflow="ellipsis")

    def _describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)


class PlainReporter:
    """Prints one line per event, without control codes: for files and CI logs."""

    def __init__(self, console: Console, num_turns: int) -> None:
        self._console = console
        self._num_turns = num_turns
        self._num_finished = 0

    def __enter__(self) -> PlainReporter:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def servers_starting(self, servers: Mapping[ServerName, ServerProcess]) -> None:
        for name, server in servers.items():
            self._print(f"{name}: starting {server.command_line}")

    def server_ready(self, name: ServerName, ready_after_s: float) -> None:
        self._print(f"{name}: ready after {ready_after_s:.0f} s")

    def turn_finished(self, row: Row, question: str) -> None:
        self._num_finished += 1
        times = ", ".join(f"{server} {format_seconds(row.of(server).ttft_s)}" for server in _SHOWN)
        krul = row.krul
        self._print(
            f"[{self._num_finished}/{self._num_turns}] {row.conversation} turn {row.turn}: TTFT {times}; "
            f"prompt {krul.prompt_tokens} = device {krul.device_tokens} + krul {krul.host_tokens} + "
            f"computed {krul.computed_tokens}; saved in {format_seconds(row.save_s)}; "
            + ("same answer" if row.is_same("krul") else "DIFFERENT answer")
        )

    def log_line(self, name: ServerName, line: str) -> None:
        self._print(f"{name} | {line}")

    def _print(self, text: str) -> None:
        _print_line(self._console, text)


def make_reporter(console: Console, num_turns: int) -> LiveReporter | PlainReporter:
    return LiveReporter(console, num_turns) if console.is_terminal else PlainReporter(console, num_turns)


def print_result(console: Console, result: DemoResult) -> None:
    """Print a line for each round, what there is to say about all answers, and, last, the verdict."""
    rounds = make_rounds(result.rows)
    if console.is_terminal:
        console.print(_table(rounds))
    else:
        for each in rounds:
            cells = zip(_COLUMNS, _cells(each), strict=True)
            _print_line(console, "; ".join(f"{name} {cell}" for name, cell in cells))
    for line in [*_answer_lines(result.summary), *result.verdict]:
        _print_line(console, line)


def shortened(text: str, width: int) -> str:
    """``text`` on one line of at most ``width``; of a long one its beginning and its last sentence."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    question = line[max(line.rfind(mark, 0, -1) for mark in ".?!:") + 1 :].strip()
    room = width - len(question) - len(" ... ")
    if room < width // 3:
        return f"{line[: max(0, width - 3)]}..."
    return f"{line[:room]} ... {question}"


def _said(row: Row) -> dict[ServerName, str]:
    """Beside each server's bar: its answer, or that it is the same, and what krul did."""
    krul = row.krul
    said: dict[ServerName, str] = {}
    for server in _SHOWN:
        is_same = server != "device" and row.is_same(server)
        said[server] = "same answer" if is_same else " ".join(row.of(server).answer.split())
    if krul.host_tokens:
        said["krul"] = f"{krul.host_tokens} of {krul.prompt_tokens} tokens from krul, {said['krul']}"
    return said


def _table(rounds: Sequence[Round]) -> Table:
    title = f"time to first token: medians of {rounds[0].num_turns} conversations, with krul and without"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for column in _COLUMNS:
        table.add_column(column.replace(" ", "\n", 1), justify="right")
    for each in rounds:
        table.add_row(*_cells(each), style="bold" if each.turn is None else None)
    return table


def _cells(each: Round) -> tuple[str, ...]:
    return (
        "2+" if each.turn is None else str(each.turn),
        str(round(each.prompt_tokens / each.num_turns)),
        f"{each.restored_tokens / each.prompt_tokens:.0%}",
        *(format_seconds(each.ttft_s[server]["median"]) for server in _SHOWN),
        ratio_text(each.speedup),
        f"{each.stored.num_bytes / 2**20:.0f} MiB",
    )


def ratio_text(ratio: Quantiles) -> str:
    """The median and the quartiles, such as ``3.10 (2.85 to 3.30)``."""
    return f"{ratio['median']:.2f} ({ratio['q25']:.2f} to {ratio['q75']:.2f})"


def _answer_lines(summary: Summary) -> list[str]:
    lines = [
        f"tokens restored: {summary.restored_tokens}",
        f"answers of recompute that are those of device: {summary.same_answers['recompute']} of "
        f"{summary.answers}",
    ]
    if summary.recall is not None:
        recall = ", ".join(f"{server} {summary.recall[server]:.0%}" for server in _SHOWN)
        lines.append(f"recall of stated facts: {recall}")
    return lines


def _print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def draw_demo(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: the median time to the first token of each turn, with quartiles.

    Above the bars of krul stands how many times sooner it is than ``recompute``. ``result`` is what
    ``DemoResult.to_json`` gives.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: ``path`` cannot be written.
    """
    # Without pyplot no display and no global state is needed.
    from matplotlib.figure import Figure

    rounds = [each for each in result["rounds"] if each["turn"] is not None]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axis = figure.subplots()
    for place, (server, label, colour) in enumerate(_DRAWN_BARS):
        times = [each["ttft_s"][server] for each in rounds]
        medians = [time["median"] for time in times]
        spread = [
            [time["median"] - time["q25"] for time in times],
            [time["q75"] - time["median"] for time in times],
        ]
        places = [number + (place - 1) * _DRAWN_BAR_WIDTH for number in range(len(rounds))]
        axis.bar(places, medians, _DRAWN_BAR_WIDTH, yerr=spread, label=label, color=colour, capsize=3)
        if server == "krul":
            for x, time, each in zip(places, times, rounds, strict=True):
                ratio = f"{each['speedup']['median']:.1f}x"
                axis.annotate(
                    ratio, (x, time["q75"]), (0, 3), textcoords="offset points", ha="center", weight="bold"
                )
    names = [_drawn_name(each) for each in rounds]
    axis.set_xticks(range(len(rounds)), names)
    axis.set_ylabel("time to first token [s]")
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.margins(y=0.12)
    figure.legend(loc="outside upper center", ncols=len(_DRAWN_BARS), fontsize=9, frameon=False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)


def _drawn_name(each: Mapping[str, Any]) -> str:
    tokens = round(each["prompt_tokens"] / each["num_turns"])
    share = each["restored_tokens"] / each["prompt_tokens"]
    return f"turn {each['turn']}\n{tokens} tokens,\n{share:.0%} from krul"
