"""``python -m benchmarks.serving --json FILE``: returning turns on real servers, without krul and with it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from benchmarks import runner
from benchmarks.runner import Result, names, numbers
from benchmarks.serving import divergence, rows, tables
from benchmarks.serving.configuration import (
    ALGORITHMS,
    CLIENTS,
    SPECULATIVE,
    Configuration,
    ServingBenchmarkError,
)
from benchmarks.serving.run import run
from benchmarks.tables import Columns, table_of
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    given = make_serving_parser(
        "serving",
        "Returning turns on real SGLang servers, without krul and with it, side by side.",
        Configuration(model_path=""),
    ).parse_args(argv)
    return run_serving(given, divergence.COLUMNS if given.client == "divergence" else tables.COLUMNS)


def run_serving(
    given: argparse.Namespace, columns: Columns, summarize: Callable[[Result], Result] = rows.summarize
) -> int:
    """Run what was asked for, write its summary and show its rows; returns the exit status."""

    def measure() -> Result:
        options = {
            option.name: getattr(given, option.name)
            for option in fields(Configuration)
            if option.name != "model_path"
        }
        for name in ("krul_options", "compressed_options"):
            options[name] = _json_object(f"--{name.replace('_', '-')}", options[name])
        if given.speculative is not None:
            options["servers"] = (*given.servers, *(f"{name}+{SPECULATIVE}" for name in given.servers))
        options |= {
            "model_path": find_model(given.model, logger.info, option="--model"),
            "server_args": tuple(given.server_args),
        }
        return run(Configuration(**options))

    return runner.run(given, measure, lambda result, _: table_of(columns, result["rows"]), summarize)


def make_serving_parser(name: str, description: str, defaults: Configuration) -> argparse.ArgumentParser:
    """A parser whose destinations are the fields of ``Configuration``."""
    parser = runner.make_parser(name, description, model="smollm2", dtype=defaults.dtype, seed=defaults.seed)

    def add(option: str, text: str, *, to: str | None = None, **how: Any) -> None:
        name = option.removeprefix("--").replace("-", "_") if to is None else to
        how = {"default": getattr(defaults, name, None), **how}
        shown = (
            f" ({how['default']})" if how.get("type") in (int, float) and how["default"] is not None else ""
        )
        parser.add_argument(option, dest=name, help=text + shown, **how)

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
    add("--turn-tokens", "of later messages, not short questions; with --data, of whole sessions", type=int)
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
    add("--speculative", "each server a second time, drafting: " + ", ".join(ALGORITHMS))
    add("--draft-model", "its folder, instead of the model itself, or of random weights", type=Path)
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
    add(
        "--server-arg",
        "one more argument of every server, repeatable",
        to="server_args",
        action="append",
        default=list(defaults.server_args),
    )
    return parser


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ServingBenchmarkError(f"{option} {text!r} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ServingBenchmarkError(f"{option} {text!r} is not a JSON object")
    return values


if __name__ == "__main__":
    sys.exit(main())
