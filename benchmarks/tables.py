"""Writes tables in Markdown, and what stands around them, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]
"""What is read of a row and shown, by the head of its column."""


def table(heads: Iterable[object], rows: Iterable[Sequence[object]], left: Collection[int] = (0,)) -> str:
    """A table in Markdown; the columns at the places in ``left`` are flush left, all others right."""
    heads = tuple(heads)
    rules = ("---" if place in left else "---:" for place in range(len(heads)))
    head, *lines = (f"| {' | '.join(map(str, line))} |" for line in (heads, *rows))
    return "\n".join((head, f"|{'|'.join(rules)}|", *lines))


def table_of(columns: Columns, rows: Iterable[Row], left: Collection[int] = (0,)) -> str:
    """A table with a line for each row of a result."""
    return table(columns, ([show(row) for show in columns.values()] for row in rows), left)


def plain_table(rows: Sequence[Row]) -> str:
    """A table of all that the first row has."""
    return table(rows[0], ([_short(row[name]) for name in rows[0]] for row in rows))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cell(
    name: str, form: str | Callable[[Any], str] = "{}", factor: float | None = None
) -> Callable[[Row], str]:
    """Shows the value at ``name``, times ``factor``; ``-`` where there is none."""

    def show(row: Row) -> str:
        value = row.get(name)
        if value is None:
            return "-"
        value = value if factor is None else value * factor
        return form.format(value) if isinstance(form, str) else form(value)

    return show


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def us(microseconds: float) -> str:
    return f"{microseconds / 1000:.1f} ms" if microseconds >= 1000 else f"{microseconds:.0f} us"


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def quartiles(quantiles: Mapping[str, float]) -> str:
    """The median and the quartiles, such as ``3.10 (2.85-3.30)``."""
    return "{median:.2f} ({q25:.2f}-{q75:.2f})".format(**quantiles)


def model(result: Row) -> str:
    """Name and dtype of the model of a result."""
    configuration = result["configuration"]
    return f"{Path(configuration['model_path']).name} in {configuration['dtype']}"


def machine(result: Row, path: Path | None) -> str:
    """The last sentences below a table: where it was measured, how long that took, where the result is."""
    found = result["machine"]
    return (
        f"Machine: {found['cpu']}, {found['cores']} cores; SGLang {result['versions']['sglang']}; "
        f"{result['duration_s'] / 60:.0f} minutes. {source(path)}"
    )


def source(path: Path | None) -> str:
    """A sentence that leads to a result: a link to one of this repository, the path of any other."""
    if path is None:
        return "Not kept in a file."
    path = path.resolve()
    if not path.is_relative_to(ROOT):
        return f"Source: `{path}`."
    name = path.relative_to(ROOT)
    return f"Source: [`{path.name}`]({name})."
