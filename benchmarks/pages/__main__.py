"""``python -m benchmarks.pages``: brings every generated part of the documentation up to date."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import orjson

from benchmarks import support
from benchmarks.pages import ROOT, table
from benchmarks.pages.tables import DEMO_FIGURE, DEMO_RESULT, tables
from krul_sglang.config import CONFIG_FILE_VARIABLE, DAEMON_MARK, ENV_PREFIX, FLAG, KrulConfig
from krul_sglang.demo.report import draw_demo

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
ONLY_IN_README = ("load-summary", "overlap-summary")
TABLES_OF_README = ("demo", *ONLY_IN_README)

_CONFIGURATION_HEAD = f"""# Configuration

Written by `python -m benchmarks.pages` from `krul_sglang/config.py`; a test compares the two.

The defaults work. An option can be given in three places, and a later one wins:

1. a TOML file, named by the environment variable `{CONFIG_FILE_VARIABLE}`: `host_memory = "64GiB"`
2. an environment variable `{ENV_PREFIX}<OPTION>`: `{ENV_PREFIX}HOST_MEMORY=64GiB`
3. SGLang's own flag: `{FLAG} '{{"host_memory": "64GiB"}}'`

An unknown option or a bad value stops the server, with one line that says what is accepted.

{DAEMON_MARK} options belong to the daemon that the server starts. With `endpoint` the server joins a daemon
that runs already, and these options are refused: give them to `krul-backend serve` instead
([tiers.md](tiers.md)).
"""


def default_text(option: Field[Any]) -> str:
    """The default as a user would write it in JSON: ``"auto"``, ``"512MiB"``, ``0.25``, ``false``."""
    value = KrulConfig().as_dict()[option.name]
    if isinstance(value, int) and not isinstance(value, bool) and value and value % (1 << 20) == 0:
        value = f"{value >> 20}MiB"
    return orjson.dumps(value).decode()


def configuration_page() -> str:
    """The text of ``docs/configuration.md``: every option of ``KrulConfig``, its default and its meaning."""
    rows = [
        (
            *(f"`{option.name}`", f"`{default_text(option)}`"),
            *(option.metadata["accepted"], option.metadata["description"]),
        )
        for option in fields(KrulConfig)
    ]
    options = table(("option", "default", "accepted", "meaning"), rows, left=range(4))
    return f"{_CONFIGURATION_HEAD}\n{options}\n"


def render(page: str, parts: Mapping[str, str]) -> str:
    """``page`` with each part between its ``<!-- NAME -->`` and ``<!-- /NAME -->``.

    Raises:
        ValueError: the page has no such place.
    """
    for name, part in parts.items():
        place = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", page, re.DOTALL)
        if place is None:
            raise ValueError(f"the page has no place <!-- {name} --> ... <!-- /{name} -->")
        page = f"{page[: place.start()]}{part}\n{page[place.end() :]}"
    return page


def pages() -> dict[Path, str]:
    """Every page with generated parts, as it should be."""
    made = tables()
    of_readme = {name: made[name] for name in TABLES_OF_README}
    of_measured = {
        name: shown.replace("](benchmarks/", "](../benchmarks/")
        for name, shown in made.items()
        if name not in ONLY_IN_README
    }
    of_measured["demo"] = of_measured["demo"].replace("](docs/", "](")
    return {
        README: render(README.read_text(encoding="utf-8"), of_readme),
        MEASURED: render(MEASURED.read_text(encoding="utf-8"), of_measured),
        CONFIGURATION: configuration_page(),
        support.PAGE: support.page(),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    draw_demo(orjson.loads(DEMO_RESULT.read_bytes()), ROOT / DEMO_FIGURE)


if __name__ == "__main__":
    main()
