"""Figures, drawn from the JSON files of the benchmarks. Only the modules in here need matplotlib."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson


def draw_from_command_line(
    draw: Callable[[dict[str, Any], Path], None], result: Path, figure: Path, description: str | None
) -> None:
    """The command of a figure's module: read ``--json`` (``result``), and draw ``--png`` (``figure``)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, default=result)
    parser.add_argument("--png", type=Path, default=figure)
    arguments = parser.parse_args()
    draw(orjson.loads(arguments.json.read_bytes()), arguments.png)
