"""Writes ``docs/support.md`` from the table of settings: ``python -m benchmarks.support [--json FILE]``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from krul_sglang.engine.common.hook_targets import SUPPORTED_SGLANG
from krul_sglang.engine.common.unsupported import (
    FOUND_LATER,
    LAUNCH_RULES,
    MODEL_RULES,
    SERVED,
    SMALL_PAGES,
    UNTESTED,
)
from krul_sglang.json_file import write_json

PAGE = Path(__file__).parents[1] / "docs" / "support.md"

_HEAD = f"""# What is served, refused, and untested

Written by `python -m benchmarks.support` from the table in `krul_sglang/engine/common/unsupported.py`; a test
compares the two. SGLang {", ".join(SUPPORTED_SGLANG)}.

**Nothing has been seen on any GPU so far.** What is served was seen on SGLang's real server on a CPU.
"""

_REFUSED = """
## Refused at start

By one line that names the setting, because krul would store or restore wrong KV, answer otherwise than the
engine alone, or hang. What follows from the arguments stops the launch before any process starts:
"""

_LATER = """
What shows only when the arguments are resolved, the model is read, or a part is built stops the server in the
scheduler, and with it every process:
"""


def rows() -> list[dict[str, str]]:
    """All rows as plain values: ``setting``, ``status``, ``seen_on``."""
    refused = (*LAUNCH_RULES, *MODEL_RULES, *FOUND_LATER)
    return [
        *({"setting": row.setting, "status": "served", "seen_on": row.seen_on} for row in SERVED),
        *({"setting": row.setting, "status": "refused", "seen_on": ""} for row in refused),
        *({"setting": row.setting, "status": "untested", "seen_on": ""} for row in UNTESTED),
    ]


def page() -> str:
    """The text of ``docs/support.md``."""
    served = _table(
        ("served", "seen on a CPU server, in"), [(_code(row.setting), _code(row.seen_on)) for row in SERVED]
    )
    before = [(_code(row.setting), _code(row.reason)) for row in LAUNCH_RULES]
    later = [(_code(row.setting), _code(row.reason)) for row in (*MODEL_RULES, *FOUND_LATER)]
    untested = [(_code(row.setting), _code(row.note)) for row in UNTESTED]
    return "\n".join(
        (
            _HEAD,
            served,
            f"\nWith a warning: {_code(SMALL_PAGES.removeprefix('krul: '))}.",
            _REFUSED,
            _table(("refused", "why"), before),
            _LATER,
            _table(("refused", "why"), later),
            "\n## Untested\n\nNothing is known against these, and nobody has seen them work.\n",
            _table(("untested", "where to look first"), untested),
            "",
        )
    )


def _table(head: tuple[str, str], cells: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str) -> str:
    """``text`` with flags, paths and other words that have underscores set as code."""
    return re.sub(r"--[\w-]+\*?|tests/[\w/.]+|/?\w+_\w*\*?", lambda found: f"`{found[0]}`", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    if arguments.json is not None:
        write_json(rows(), arguments.json)


if __name__ == "__main__":
    main()
