"""Tells whether the code that decides a result has changed since the result was measured, by its digest."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

from benchmarks.tables import ROOT, Row


def _parts(own: str, backend: str) -> tuple[str, ...]:
    return (*own.split(), *(f"backend/krul_backend/{name}" for name in backend.split()))


_CODEC = "codec attention machine_code.py"
_TIERS = "tiers store daemon/client daemon/protocol daemon/server"
_TIERS_USE = "segment.py free_extents.py memory.py numa.py"
_ON_A_CPU = (
    *("krul_sglang", "-krul_sglang/cli", "krul_sglang/cli/timed_answer.py", "-krul_sglang/sizing"),
    *("-krul_sglang/adapter/platforms/nvidia.py", "backend/krul_backend"),
    *(f"-backend/krul_backend/{name}" for name in ("page_lock.py", "tiers/objects", "daemon/cli")),
)
_NO_SSD = "-backend/krul_backend/tiers/ssd"
_SERVERS = ("demo", "benchmarks/serving", "benchmarks/planners.py", *_ON_A_CPU)
_QUALITY = "benchmarks/quality benchmarks/baselines.py benchmarks/variants.py reference_model"
_LEARNING = "krul_sglang/learning krul_sglang/engine/budget/coarse.py"
_SIMULATION = "benchmarks/simulate benchmarks/planners.py krul_sglang/sizing/on_paper.py"
_LAUNCHES = "benchmarks/launches krul_sglang/engine krul_sglang/adapter/head_attention.py"
PARTS = {
    "benchmarks.codec": _parts("benchmarks/codec.py krul_sglang/learning", _CODEC),
    "benchmarks.quality": _parts(f"{_QUALITY} {_LEARNING}", f"{_CODEC} strategy"),
    "benchmarks.tiers": _parts("benchmarks/tiers", f"{_TIERS} {_TIERS_USE}"),
    "benchmarks.scale": _parts("benchmarks/scale.py benchmarks/tiers", f"{_TIERS} {_TIERS_USE}"),
    "benchmarks.simulate": _parts(_SIMULATION, "planner codec strategy"),
    "benchmarks.launches": _parts(_LAUNCHES, f"{_CODEC} triton_rows.py device.py"),
    "benchmarks.overlap": ("benchmarks/overlap.py", *_SERVERS),
    "benchmarks.serving": _SERVERS,
    "benchmarks.multiturn": ("benchmarks/multiturn.py", *_SERVERS),
    "benchmarks.stalls": ("benchmarks/stalls.py", *_SERVERS),
    "benchmarks.load": ("benchmarks/load", *_SERVERS, _NO_SSD),
    "demo": ("demo", *_ON_A_CPU, _NO_SSD),
    "tests.gpu": ("krul_sglang", "backend/krul_backend", "tests/gpu"),
}
"""Files and folders that decide what a program measures: its own, and the parts of the product it uses."""


def digest(paths: Iterable[str], root: Path = ROOT) -> str:
    """8 hex digits of the Python code in files and folders below ``root``, without comments, documentation
    and formatting. The paths of the files count. A path after a minus leaves out what earlier ones named."""
    files: set[Path] = set()
    for path in paths:
        part = root / path.removeprefix("-")
        named = {part} if part.is_file() else set(part.rglob("*.py"))
        files = files - named if path.startswith("-") else files | named
    lines = (f"{file.relative_to(root).as_posix()} {_of_code(file.read_text())}\n" for file in sorted(files))
    return sha256("".join(lines).encode()).hexdigest()[:8]


@cache
def _of_code(text: str) -> str:
    return sha256(_dump(ast.parse(text)).encode()).hexdigest()


def _dump(node: object) -> str:
    """Code as text, without what differs between releases of Python: empty fields and parts of f-strings."""
    if isinstance(node, list):
        return f"[{','.join(_dump(each) for each in node if not _is_documentation(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr([each for each in node.values if getattr(each, "value", None) != ""])
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return f"{type(node).__name__}({','.join(f'{name}={_dump(value)}' for name, value in fields)})"


def _is_documentation(node: object) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(node, ast.Pass) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def code_of(command: str) -> str | None:
    """The digest of the code that decides what this command measures; None if it measures nothing."""
    program = re.search(r"benchmarks\.\w+|\bdemo\b|tests\.gpu", command)
    return digest(PARTS[program[0]]) if program and program[0] in PARTS else None


def remark(result: Row) -> str:
    """What is to be said of a result after its source: nothing if the code is as it was measured.

    A result without a command is one of ``python -m tests.gpu``.
    """
    if "code" not in result:
        return "; measured with earlier code"
    is_same = result["code"] == code_of(result.get("command", "tests.gpu"))
    return "" if is_same else "; the code has changed since"
