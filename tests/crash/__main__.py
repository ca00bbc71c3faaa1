"""``python -m tests.crash --rounds 200 --seed 1``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.crash.rounds import describe, run_rounds


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often something is killed.")] = 200,
    seed: Annotated[int, typer.Option(help="Decides what is killed when.")] = 1,
) -> None:
    """Kill daemon, engines or both at random moments under load; nothing wrong may ever be found."""
    with tempfile.TemporaryDirectory(prefix="krul-crash-", dir="/tmp") as directory:
        typer.echo(describe(run_rounds(Path(directory), rounds, seed)))


if __name__ == "__main__":
    typer.run(main)
