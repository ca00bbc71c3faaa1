"""``python -m benchmarks.serving --json FILE``: returning turns on real servers, without krul and with it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress
from rich.table import Table

from benchmarks.options import names, numbers
from benchmarks.serving import divergence, rows
from benchmarks.serving.configuration import CLIENTS, Configuration, ServingBenchmarkError
from benchmarks.serving.run import Tell, run
from krul_backend.errors import KrulError
from krul_sglang.json_file import write_result
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)

_DEFAULTS = Configuration(model_path="")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(
        _DEFAULTS,
        prog="python -m benchmarks.serving",
        description="Returning turns on real SGLang servers, without krul and with it, side by side.",
    ).parse_args(argv)
    shown = divergence if arguments.client == "divergence" else rows
    return measure(arguments, shown.COLUMNS, shown.table_cells)


def measure(
    arguments: argparse.Namespace,
    columns: Sequence[str],
    table_cells: Callable[[Mapping[str, Any]], list[str]],
    summarize: Callable[[Mapping[str, Any]], dict[str, Any]] = rows.summarize,
) -> int:
    """Run what was asked for, write its summary and show its rows; returns the exit status."""
    console = Console(stderr=True)
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        options = {option.name: getattr(arguments, option.name) for option in fields(Configuration)}
        for name in ("krul_options", "compressed_options"):
            options[name] = _json_object(f"--{name.replace('_', '-')}", options[name])
        options |= {
            "model_path": find_model(arguments.model_path, logger.info, option="--model"),
            "server_args": tuple(arguments.server_args),
        }
        configuration = Configuration(**options)
        if arguments.figure is not None and configuration.client == "divergence":
            raise ServingBenchmarkError("--figure draws times, which --client divergence does not take")
        with _progress(console) as tell:
            result = run(configuration, tell)
    except KrulError as error:
        print(error, file=sys.stderr)
        return 1
    summary = summarize(result)
    write_result(result, summary, json=arguments.json, raw=arguments.raw)
    if arguments.figure is not None:
        from benchmarks.figures.charts import draw_serving

        draw_serving(summary, arguments.figure)
    table = Table(*columns)
    for row in summary["rows"]:
        table.add_row(*table_cells(row))
    # A file has no width: rich would fold the table into 80 columns.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0


def parser(defaults: Configuration, *, prog: str, description: str) -> argparse.ArgumentParser:
    """A parser whose destinations are the fields of ``Configuration``."""
    parser = argparse.ArgumentParser(prog=prog, description=description)

    def add(option: str, text: str, *, to: str | None = None, **how: Any) -> None:
        name = option.removeprefix("--").replace("-", "_") if to is None else to
        how = {"default": getattr(defaults, name, None), **how}
        shown = (
            f" ({how['default']})" if how.get("type") in (int, float) and how["default"] is not None else ""
        )
        parser.add_argument(option, dest=name, help=text + shown, **how)

    add("--json", "file for the summary of the result", type=Path)
    add("--raw", "file for the result with every turn", type=Path)
    add("--figure", "PNG file: time to the first token by turn", type=Path)
    add("--model", "smollm2, bundled, a folder or a hub name (smollm2)", to="model_path", default="smollm2")
    add("--configurations", "what to compare (" + ",".join(defaults.servers) + ")", to="servers", type=names)
    add("--at-once", "servers that run at the same time, instead of all", type=int)
    add(
        "--client",
        "this benchmark's own, sglang.bench_serving, or one that compares what servers predict",
        choices=CLIENTS,
    )
    add("--conversations", "ShareGPT or OpenAI file, JSON or JSONL, instead of generated ones", type=Path)
    add("--data", "folder of JSONL files with session_id, timestamp and input (whole prompts)", type=Path)
    add(
        "--history",
        "tokens of first prompts, as 1000 or 64,256,1024; with --data, of the longest "
        f"({','.join(map(str, defaults.history_tokens))})",
        to="history_tokens",
        type=numbers,
    )
    add("--turn-tokens", "tokens of later messages that are generated, instead of short questions", type=int)
    add("--users", "conversations", type=int)
    add("--rounds", "turns of each", type=int)
    add("--rate", "Poisson arrivals per second in a round, instead of one request at a time", type=float)
    add(
        "--rotate",
        "each conversation asks again when it was answered; all turns of a server, then the next server",
        to="rotates",
        action="store_true",
    )
    add("--think-time", "least seconds from an answer to the next turn", to="think_time_s", type=float)
    add("--no-settle", "ask while a server may still store a turn", to="settles", action="store_false")
    add("--device-tokens", "small pool, instead of 1.25 x the longest conversation", type=int)
    add("--host-memory", "of each krul server, as 256MiB, instead of enough for all")
    add("--host-share", "the same, as a share of what all conversations take uncompressed", type=float)
    add("--ssd", "capacity of an SSD tier for each krul server, as 2GiB")
    add("--ssd-share", "the same, as a share of what all conversations take uncompressed", type=float)
    add("--ssd-read-mbs", "hold reads of the SSD tier to so many MB per second", type=float)
    common = orjson.dumps(defaults.krul_options).decode()
    add("--krul-options", f"JSON object: options of every krul server ({common})", default=common)
    compressed = orjson.dumps(defaults.compressed_options).decode()
    add("--compressed-options", f"JSON object: those of 'compressed' ({compressed})", default=compressed)
    add("--max-tokens", "longest answer", type=int)
    add("--page-size", "tokens per page", type=int)
    add("--dtype", "SGLang's, instead of float32 without a GPU and the model's own with one")
    add(
        "--server-arg",
        "one more argument of every server, repeatable",
        to="server_args",
        action="append",
        default=list(defaults.server_args),
    )
    add("--seed", "of generated conversations and arrivals", type=int)
    return parser


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ServingBenchmarkError(f"{option} {text!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ServingBenchmarkError(f"{option} {text!r} is not a JSON object")
    return values


@contextmanager
def _progress(console: Console) -> Iterator[Tell]:
    with Progress(console=console, refresh_per_second=2) as progress:
        task = progress.add_task("turns", total=None)

        def tell(text: str, num_answers: int) -> None:
            progress.update(task, advance=1, total=num_answers, description=text)

        yield tell


if __name__ == "__main__":
    sys.exit(main())
