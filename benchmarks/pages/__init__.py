"""Writes what is generated in the documentation: ``python -m benchmarks.pages``.

Result files, ``KrulConfig`` and the table of settings enter; tables in the README, ``docs/measured.md``,
``docs/configuration.md`` and ``docs/support.md`` leave, and the figure of the demo. Tests compare the pages
with what this room would write.
"""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """A table in Markdown; numbers of the columns that are not flush right are ``left``."""
    rules = ("---" if place in left else "---:" for place in range(len(heads)))
    head, *lines = (f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows))
    return "\n".join((head, f"|{'|'.join(rules)}|", *lines))


def source(path: Path) -> str:
    """A sentence that leads to a result."""
    name = path.relative_to(ROOT)
    return f"Source: [`{name}`]({name})."
