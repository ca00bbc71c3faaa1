"""Writes JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from krul_backend.atomic_file import replacing


def write_json(value: Any, path: Path) -> None:
    """Write ``value`` in one step: readers see the whole file or none. Keys may be numbers."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    with replacing(path) as file:
        file.write(orjson.dumps(value, option=options))
