"""``python -m tests.fuzz --cases 100000``."""

from __future__ import annotations

from typing import Annotated

import typer

from tests.fuzz.run import run_cases
from tests.support.daemon_process import running_daemon


def main(cases: Annotated[int, typer.Option(min=1, help="How many messages are sent.")] = 100_000) -> None:
    """Random bytes and broken messages must neither end nor stall a daemon."""
    with running_daemon("--host-memory", "16MiB") as (runtime_dir, process):
        run_cases(runtime_dir, process.pid, cases)
        assert process.poll() is None
    typer.echo(f"{cases} cases: the daemon answered all the time")


if __name__ == "__main__":
    typer.run(main)
