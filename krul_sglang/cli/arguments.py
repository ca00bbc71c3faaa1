"""Options that several commands take, and what is checked of them before anything starts."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from krul_backend.errors import ConfigError
from krul_backend.memory import parse_bytes

Url = Annotated[str, typer.Option(help="Address of the running server, such as http://127.0.0.1:30000.")]
ApiKey = Annotated[str | None, typer.Option(envvar="SGLANG_API_KEY", help="The server's --api-key.")]
Options = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="One more option of krul's configuration, as --option strategy=subspace. Repeatable.",
    ),
]
ModelPath = Annotated[str, typer.Option(help="Folder or hub name of the model, smollm2 or bundled.")]
TpSize = Annotated[
    int, typer.Option(help="Ranks that share the model's heads, as the server's --tp-size.", min=1)
]


def tell(line: str) -> None:
    typer.echo(line, err=True)


def check_timeout(seconds: float) -> None:
    if not seconds > 0:
        raise ConfigError(f"--timeout {seconds} is not possible; expected a number greater than 0")


def parse_size(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def parse_options(options: list[str]) -> dict[str, str]:
    pairs = [option.partition("=") for option in options]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise ConfigError(f"--option {name!r}: give KEY=VALUE")
    return {name: value for name, _, value in pairs}


def check_url(url: str, option: str = "--url") -> None:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{option} {url!r} is not an address; expected something like http://127.0.0.1:30000"
        )


def check_writable(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a directory; expected a file name")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: the directory {path.absolute().parent} does not exist")


def check_drawable(option: str, path: Path | None) -> None:
    check_writable(option, path)
    if path is not None and find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib, which is not installed: pip install matplotlib")
