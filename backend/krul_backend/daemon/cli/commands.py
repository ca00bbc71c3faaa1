"""The commands of ``krul-backend`` that ask a running daemon: stats, list, inspect, verify, flush."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated, Any, NoReturn

import orjson
import typer
from msgspec import to_builtins
from rich.console import Console, RenderableType

from krul_backend.daemon.cli.reports import details_report, segments_report, stats_report
from krul_backend.daemon.client import AdminClient, resolve_endpoint
from krul_backend.errors import KrulError
from krul_backend.tiers.common.interface import SegmentInfo

EXIT_FOUND_BAD = 1
EXIT_CANNOT_RUN = 2


class SortKey(Enum):
    """What ``list`` sorts by. Numbers are sorted with the largest first, names from A on."""

    ID = "id"
    MODEL = "model"
    TENANT = "tenant"
    TOKENS = "tokens"
    BYTES = "bytes"
    IDLE = "idle"
    LEASES = "leases"


_SORT_BY: dict[SortKey, Callable[[SegmentInfo], Any]] = {
    SortKey.ID: lambda info: info.segment_id,
    SortKey.MODEL: lambda info: (info.model, info.segment_id),
    SortKey.TENANT: lambda info: (info.tenant, info.segment_id),
    SortKey.TOKENS: lambda info: -info.num_tokens,
    SortKey.BYTES: lambda info: -info.num_bytes,
    SortKey.IDLE: lambda info: -info.idle_s,
    SortKey.LEASES: lambda info: -info.num_leases,
}

Endpoint = Annotated[
    str | None,
    typer.Option(
        help="Runtime directory of the daemon, or ipc://DIR/daemon.sock.",
        show_default="the only daemon of this user",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Most seconds for the answer.")]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to an application."""
    app.command()(stats)
    app.command("list")(list_segments)
    app.command()(inspect)
    app.command()(verify)
    app.command()(flush)


def stats(endpoint: Endpoint = None, as_json: AsJson = False, timeout_s: Timeout = 5.0) -> None:
    """Show what each tier holds and has done, and how many leases and reservations hold it."""
    with _daemon(endpoint, timeout_s) as client:
        store, daemon = client.stats()
    _print(
        as_json,
        {"store": to_builtins(store), "daemon": to_builtins(daemon)},
        lambda: stats_report(store, daemon),
    )


def list_segments(
    endpoint: Endpoint = None,
    model: Annotated[
        str | None, typer.Option(help="Only of this model: its name, or the beginning of its fingerprint.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only of this tenant; '' is that of requests without one.")
    ] = None,
    sort: Annotated[SortKey, typer.Option(help="Largest number first, names from A on.")] = SortKey.ID,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Show the first N.", show_default="50, and all with --json")
    ] = None,
    as_json: AsJson = False,
    timeout_s: Timeout = 30.0,
) -> None:
    """List the segments that are stored: one for each turn of a conversation."""
    if limit is None and not as_json:
        limit = 50

    def is_meant(info: SegmentInfo) -> bool:
        has_model = model is None or info.model == model or info.fingerprint.startswith(model)
        return has_model and (tenant is None or info.tenant == tenant)

    with _daemon(endpoint, timeout_s) as client:
        meant = sorted(filter(is_meant, client.list_segments()), key=_SORT_BY[sort])
    shown = meant[:limit]
    _print(
        as_json,
        {"segments": [to_builtins(info) for info in shown], "num_segments": len(meant)},
        lambda: segments_report(shown, len(meant)),
    )


def inspect(
    segment: Annotated[int, typer.Argument(help="Id of a segment, as list shows it.", min=0)],
    endpoint: Endpoint = None,
    as_json: AsJson = False,
    timeout_s: Timeout = 30.0,
) -> None:
    """Show one segment in DRAM: its place in the conversation, and layer by layer how it is stored."""
    with _daemon(endpoint, timeout_s) as client:
        details = client.inspect(segment)
    if details is None:
        _fail(f"segment {segment} is not in DRAM (any more): krul-backend list shows what is where", 1)
    _print(as_json, to_builtins(details), lambda: details_report(details))


def verify(endpoint: Endpoint = None, as_json: AsJson = False, timeout_s: Timeout = 3600.0) -> None:
    """Read every block of the local tiers and compare its checksum; bad segments are taken out.

    Exit status: 0 all are right, 1 some were bad, 2 could not be done.
    """
    with _daemon(endpoint, timeout_s) as client:
        report = client.verify(timeout_s)
    num_bad = len(report.bad_segments)
    text = f"{report.num_blocks} blocks, {report.num_bytes / 2**20:.1f} MiB: "
    bad = ", ".join(map(str, report.bad_segments))
    text += f"{num_bad} bad segments, taken out: {bad}" if bad else "all are right"
    _print(as_json, to_builtins(report), lambda: text)
    raise typer.Exit(EXIT_FOUND_BAD if num_bad else 0)


def flush(endpoint: Endpoint = None, as_json: AsJson = False, timeout_s: Timeout = 60.0) -> None:
    """Wait until everything that was stored before is durable.

    Exit status: 0 it is, 1 it took longer than --timeout, 2 could not be done.
    """
    with _daemon(endpoint, timeout_s) as client:
        is_durable = client.flush(timeout_s)
    text = "durable" if is_durable else f"not durable after {timeout_s:g} s"
    _print(as_json, {"is_durable": is_durable}, lambda: text)
    raise typer.Exit(0 if is_durable else 1)


@contextmanager
def _daemon(endpoint: str | None, timeout_s: float) -> Iterator[AdminClient]:
    """A client of the daemon that is meant. Any error ends the command with one line and an exit status."""
    try:
        if not timeout_s > 0:
            _fail(f"--timeout {timeout_s:g} is not possible; expected a number greater than 0")
        with AdminClient(resolve_endpoint(endpoint), timeout_s=timeout_s) as client:
            yield client
    except KrulError as error:
        _fail(str(error))


def _print(as_json: bool, value: Any, report: Callable[[], RenderableType]) -> None:
    if as_json:
        typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2))
    else:
        # markup off: names of models and tenants come from outside.
        Console(markup=False, highlight=False, soft_wrap=False).print(report())


def _fail(message: str, status: int = EXIT_CANNOT_RUN) -> NoReturn:
    typer.echo(f"krul-backend: error: {message}", err=True)
    raise typer.Exit(status)
