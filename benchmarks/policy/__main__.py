"""``python -m benchmarks.policy --traces FILE --json FILE``: eviction policies on replayed sessions."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.policy.run import Configuration, run, summarize
from benchmarks.policy.traces import read_sessions
from krul_backend.errors import KrulError
from krul_sglang.demo import environment
from krul_sglang.json_file import write_result

logger = logging.getLogger(__name__)

_DEFAULTS = Configuration()


def main(
    traces: Annotated[Path, typer.Option(help="File of recorded sessions, one JSON object a line.")],
    json: Annotated[Path, typer.Option(help="File for the summary of the result.")],
    raw: Annotated[Path | None, typer.Option(help="File for the result with every number.")] = None,
    figure: Annotated[Path | None, typer.Option(help="PNG file: hit rate by DRAM and by users.")] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="DRAM as a share of the working set; repeatable.")
    ] = None,
    users: Annotated[int, typer.Option(help="Users while the share varies.", min=1)] = _DEFAULTS.users,
    many_users: Annotated[
        list[int] | None, typer.Option(help="Users at one share of DRAM; repeatable.")
    ] = None,
    share_of_many: Annotated[float, typer.Option(help="That share.")] = _DEFAULTS.share_of_many,
    turns: Annotated[int, typer.Option(help="Turns of each replay.", min=1)] = _DEFAULTS.turns,
    slots: Annotated[
        int, typer.Option(help="Requests answered at once where others wait.", min=1)
    ] = _DEFAULTS.slots,
    size_spread: Annotated[
        float, typer.Option(help="Bytes per token differ by up to this factor either way.", min=1)
    ] = _DEFAULTS.size_spread,
    seed: Annotated[int, typer.Option(help="Of the order of sessions and the sizes.")] = _DEFAULTS.seed,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    configuration = Configuration(
        shares=tuple(share or _DEFAULTS.shares),
        users=users,
        many_users=tuple(many_users or _DEFAULTS.many_users),
        share_of_many=share_of_many,
        turns=turns,
        slots=slots,
        size_spread=size_spread,
        seed=seed,
    )
    try:
        result = {
            # Files by their names: where they lie says nothing of the result.
            "command": shlex.join(
                ["python", "-m", "benchmarks.policy", *(Path(word).name for word in sys.argv[1:])]
            ),
            "git_revision": environment.git_revision(),
            "versions": environment.versions(("numpy",)),
            **run(read_sessions(traces), configuration, logger.info),
        }
    except KrulError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    summary = summarize(result)
    write_result(result, summary, json=json, raw=raw)
    if figure is not None:
        from benchmarks.figures.policy import draw

        draw(summary, figure)


if __name__ == "__main__":
    typer.run(main)
