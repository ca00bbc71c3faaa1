"""The command line ``krul-backend``, with its command ``serve``."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from krul_backend.daemon.cli.commands import add_commands
from krul_backend.daemon.protocol.runtime_dir import remove_if_embedded
from krul_backend.daemon.server.config import DaemonConfig
from krul_backend.errors import ConfigError
from krul_backend.memory import parse_bytes
from krul_backend.one_line_errors import OneLineErrors

EMBEDDED_PATIENCE_S = 20.0

app = typer.Typer(
    name="krul-backend",
    cls=OneLineErrors,
    help="The process that keeps the KV of conversations that left the device.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """The process that keeps the KV of conversations that left the device."""


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _tier_options(tier: str, pairs: list[str]) -> dict[str, str] | None:
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ConfigError(f"--{tier}: got {pair!r}, accepted is <name>=<value>")
        if name in options:
            raise ConfigError(f"--{tier}: {name!r} is given twice")
        options[name] = value
    return options or None


@app.command("serve")
def serve_command(
    runtime_dir: Annotated[
        Path, typer.Option(help="Directory of the sockets: private to this user, and to one daemon.")
    ],
    host_memory: Annotated[int, typer.Option(parser=_size, metavar="SIZE", help="Memory for KV, as 64GiB.")],
    ssd_dir: Annotated[
        list[Path] | None,
        typer.Option(help="Keep committed KV on this disk, too; may be repeated, for a directory per disk."),
    ] = None,
    ssd_capacity: Annotated[
        int | None,
        typer.Option(
            parser=_size, metavar="SIZE", help="What the files may take; half of what is free if not given."
        ),
    ] = None,
    ssd_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="A read that takes longer is a miss.")
    ] = DaemonConfig.ssd_timeout_s,
    ssd_queue: Annotated[
        int,
        typer.Option(
            parser=_size, metavar="SIZE", help="What may wait to be written; the rest is offered again."
        ),
    ] = DaemonConfig.ssd_queue_bytes,
    mooncake: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the Mooncake tier; may be repeated."),
    ] = None,
    bucket: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the bucket tier; may be repeated."),
    ] = None,
    eviction: Annotated[str, typer.Option(help="What leaves first: value or lru.")] = DaemonConfig.eviction,
    tenant_quota: Annotated[
        float, typer.Option(help="Share of the memory that one tenant may take.")
    ] = DaemonConfig.tenant_quota,
    exit_when_unused: Annotated[
        bool, typer.Option("--exit-when-unused", help="End when the last client has gone.")
    ] = False,
    embedded: Annotated[
        bool,
        typer.Option(
            "--embedded",
            help="As an engine starts it: nobody's child, ends when unused, removes a directory made for it.",
        ),
    ] = False,
    metrics_port: Annotated[
        int, typer.Option(help="Serve metrics for Prometheus on this port of 127.0.0.1; 0: do not.")
    ] = DaemonConfig.metrics_port,
    hints_port: Annotated[
        int, typer.Option(help="Take hints, and serve a web page, on this port of 127.0.0.1; 0: do not.")
    ] = DaemonConfig.hints_port,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every detail.")] = False,
) -> None:
    """Run a daemon that keeps stored KV, until a signal; with --exit-when-unused until no client is left."""
    if embedded and os.fork():
        # An engine ends by killing all its descendants. The daemon must not be one: it has to write what was
        # just committed. Forking is safe: no thread was started, and only the standard streams are open.
        os._exit(0)
    # Imported late, so that the other commands do not load the store.
    from krul_backend.daemon.server.serve import serve

    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s krul-backend %(levelname)s: %(message)s",
    )
    serve(
        DaemonConfig(
            arena_bytes=host_memory,
            runtime_dir=runtime_dir,
            ssd_dirs=tuple(ssd_dir or ()),
            ssd_capacity_bytes=ssd_capacity,
            ssd_timeout_s=ssd_timeout,
            ssd_queue_bytes=ssd_queue,
            # If the engine was just restarted, its earlier daemon may still be writing to the disk.
            ssd_patience_s=EMBEDDED_PATIENCE_S if embedded else 0.0,
            mooncake=_tier_options("mooncake", mooncake or []),
            bucket=_tier_options("bucket", bucket or []),
            eviction=eviction,
            tenant_quota=tenant_quota,
            exit_when_unused=exit_when_unused or embedded,
            metrics_port=metrics_port,
            hints_port=hints_port,
        )
    )
    if embedded:
        remove_if_embedded(runtime_dir)


add_commands(app)


def main() -> None:
    app()
