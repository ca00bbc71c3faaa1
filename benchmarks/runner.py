"""What all benchmarks share: common options, what a result says of its run, failures, files and printing."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measured_code import code_of
from demo import environment
from demo.summary import quantiles, write_result
from krul_backend.errors import KrulError

Result = Mapping[str, Any]

PACKAGES = ("torch", "transformers", "sglang", "numpy", "numba", "msgspec", "xxhash")
"""Their versions are in every result."""

_SHARED: dict[str, dict[str, Any]] = {
    "model": {"help": "smollm2, bundled, a folder or a hub name"},
    "dtype": {"help": "what the model computes in"},
    "seed": {"type": int, "help": "of all that is drawn at random"},
}


def names(text: str) -> tuple[str, ...]:
    """The parts between commas: the value of an option that takes several."""
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers between commas. Raises ValueError, which argparse turns into its own message."""
    return tuple(map(int, names(text)))


def make_parser(name: str, description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of ``python -m benchmarks.NAME`` with ``--json`` and ``--raw``.

    ``defaults``: of those of ``--model``, ``--dtype`` and ``--seed`` that the benchmark has.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--json", type=Path, help="file for the summary of the result")
    parser.add_argument("--raw", type=Path, help="file for the result with every sample")
    for option, default in defaults.items():
        how = _SHARED[option]
        text = how["help"] if default is None else f"{how['help']} ({default})"
        parser.add_argument(f"--{option}", **{**how, "default": default, "help": text})
    return parser


def run(
    given: argparse.Namespace,
    measure: Callable[[], Result],
    show: Callable[[Result, Path | None], str],
    summarize: Callable[[Result], Result] = dict,
) -> int:
    """Measure, write the result where ``given`` says, and print its table; returns the exit status.

    ``show`` is given the summary and where it was written. A KrulError is printed, and nothing is written. A
    result that names a ``failure`` has what was measured before it: it is written, and the status is 1.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    started = time.monotonic()
    try:
        measured = measure()
    except KrulError as error:
        print(error, file=sys.stderr)
        return 1
    duration_s = round(time.monotonic() - started, 1)
    result = {**about(getattr(given, "data", None)), "duration_s": duration_s, **measured}
    summary = summarize(result)
    write_result(result, summary, json=given.json, raw=given.raw)
    print(show(summary, given.json))
    if result.get("failure") is not None:
        print(f"not all was measured: {result['failure']}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def failures_kept(result: dict[str, Any]) -> Iterator[None]:
    """A KrulError within ends the measuring; ``result`` then names it as its ``failure``, if it has rows."""
    result["failure"] = None
    try:
        yield
    except KrulError as error:
        if not result["rows"]:
            raise
        result["failure"] = str(error).splitlines()[0]


def about(data: Path | None = None) -> dict[str, Any]:
    """What a result says of its run; of the folder ``data`` the command has the name only."""
    command = environment.without_cwd(shlex.join([_interpreter(), *sys.orig_argv[1:]]))
    if data is not None and data.name:
        command = command.replace(str(data), data.name)
    return {
        "git_revision": environment.git_revision(),
        "code": code_of(command),
        "versions": environment.versions(PACKAGES),
        "machine": environment.machine(),
        "command": command,
    }


def _interpreter() -> str:
    """What Python was started as; only its name if it lies outside the working directory."""
    path = Path(sys.orig_argv[0])
    return str(path) if not path.is_absolute() or path.is_relative_to(Path.cwd()) else path.name


def without_samples(value: Any) -> Any:
    """``value`` with quantiles in the place of samples.

    Samples are the lists of numbers at keys ``samples``, ``samples_s`` and ``*_samples_s``, or the lists
    inside an object at such a key; of samples that are no plain numbers only the count stays.
    """
    if isinstance(value, dict):
        return {
            name: _of_samples(each) if _holds_samples(name) else without_samples(each)
            for name, each in value.items()
        }
    return [without_samples(each) for each in value] if isinstance(value, list | tuple) else value


def _holds_samples(name: object) -> bool:
    return isinstance(name, str) and (name in ("samples", "samples_s") or name.endswith("_samples_s"))


def _of_samples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _of_samples(each) for name, each in value.items()}
    is_plain = all(isinstance(each, int | float) for each in value)
    return quantiles(value) if value and is_plain else {"n": len(value)}
