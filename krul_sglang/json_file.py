"""Writes JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson


def write_json(value: Any, path: Path) -> None:
    """Write ``value`` in one step: readers see the whole file or none. Keys may be numbers."""
    temporary = path.with_name(f".{path.name}.tmp")
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    temporary.write_bytes(orjson.dumps(value, option=options))
    temporary.replace(path)
