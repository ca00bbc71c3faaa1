"""``python -m benchmarks.pages``: brings every generated part of the documentation up to date."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import orjson

from benchmarks import support
from benchmarks.pages import ROOT, configuration
from benchmarks.pages.tables import DEMO_FIGURE, DEMO_RESULT, tables
from krul_sglang.demo.report import draw_demo

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
TABLES_OF_README = ("demo", "serving-summary")
ONLY_IN_README = ("serving-summary",)


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
        name: table.replace("](benchmarks/", "](../benchmarks/")
        for name, table in made.items()
        if name not in ONLY_IN_README
    }
    of_measured["demo"] = of_measured["demo"].replace("](docs/", "](")
    return {
        README: render(README.read_text(encoding="utf-8"), of_readme),
        MEASURED: render(MEASURED.read_text(encoding="utf-8"), of_measured),
        configuration.PAGE: configuration.page(),
        support.PAGE: support.page(),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    draw_demo(orjson.loads(DEMO_RESULT.read_bytes()), ROOT / DEMO_FIGURE)


if __name__ == "__main__":
    main()
