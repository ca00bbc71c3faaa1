"""Who may import whom: the rooms of the project, and the directions between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "backend" / "krul_backend"
ENGINE = ROOT / "krul_sglang" / "engine"
ADAPTER = ROOT / "krul_sglang" / "adapter"

BACKEND_FLOORS = (
    (
        "errors",
        "one_line_errors",
        "memory",
        "device",
        "machine_code",
        "triton_rows",
        "segment",
        "free_extents",
        "atomic_file",
    ),
    ("planner", "attention"),
    ("strategy",),
    ("codec",),
    ("tiers.common",),
    ("tiers.dram", "tiers.ssd", "tiers.mooncake"),
    ("store",),
    ("daemon.protocol",),
    ("daemon.client", "daemon.server"),
    ("daemon.cli",),
    ("daemon.__main__",),
)
"""Each imports of its own room and of lower floors."""

ENGINE_FLOORS = tuple((room,) for room in ("common", "capture", "save", "restore", "budget"))


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names of modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(name: str, package: str, floors: tuple[tuple[str, ...], ...]) -> tuple[int, str] | None:
    """Floor and room of a dotted name in ``package``; None if it lies in none."""
    if not name.startswith(package + "."):
        return None
    inner = name.removeprefix(package + ".") + "."
    for floor, rooms in enumerate(floors):
        for room in rooms:
            if inner.startswith(room + "."):
                return floor, room
    return None


def modules(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        inner = path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        if not inner.endswith("__init__"):
            yield f"{folder.name}.{inner}", path


@pytest.mark.parametrize(
    ("folder", "package", "floors"),
    [
        (BACKEND, "krul_backend", BACKEND_FLOORS),
        (ENGINE, "krul_sglang.engine", ENGINE_FLOORS),
    ],
    ids=["backend", "engine"],
)
def test_imports_run_one_way_between_rooms(
    folder: Path, package: str, floors: tuple[tuple[str, ...], ...]
) -> None:
    wrong = []
    for name, path in modules(folder):
        own = room_of(f"{package}.{name.split('.', 1)[1]}", package, floors)
        assert own is not None, f"{path} lies in no room"
        for imported in imports_of(path):
            other = room_of(imported, package, floors)
            if other is not None and other[1] != own[1] and other[0] >= own[0] > 0:
                wrong.append(f"{name} imports {imported}")
    assert wrong == []


def names_from(path: Path, package: str) -> set[str]:
    """The names that a file imports from modules of a package."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package)
        for alias in node.names
    }


def test_nobody_outside_asks_which_codec_it_is() -> None:
    """What differs from codec to codec is in its own room, behind the interface that all of them have."""
    wrong = []
    for folder in (BACKEND, ENGINE.parent):
        for _, path in modules(folder):
            if BACKEND / "codec" in path.parents:
                continue
            of_codecs = names_from(path, "krul_backend.codec") | {"Strategy", "LayerGroups"}
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                    kinds = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                    wrong += [f"{path.name}: {ast.unparse(node)}"] * bool(kinds & of_codecs)
    assert wrong == []


def test_every_room_says_what_it_is_for() -> None:
    for folder, floors in ((BACKEND, BACKEND_FLOORS), (ENGINE, ENGINE_FLOORS)):
        for room in (folder / name.replace(".", "/") for names in floors for name in names):
            if room.is_dir():
                sentences = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
                assert sentences is not None, room
                assert len(sentences) > 100, room


def test_the_backend_never_imports_the_engine() -> None:
    for path in BACKEND.rglob("*.py"):
        for name in imports_of(path):
            assert name.split(".")[0] not in ("sglang", "krul_sglang"), f"{path} imports {name}"


def test_sglang_is_imported_by_the_adapter_alone() -> None:
    """And the engine, which the adapter calls, does not import the adapter."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "krul_sglang").rglob("*.py")
        if ADAPTER not in path.parents
        for name in imports_of(path)
        if name.split(".")[0] == "sglang"
        or (ENGINE in path.parents and name.startswith("krul_sglang.adapter"))
    ]
    assert wrong == []


def test_importing_the_packages_does_no_work() -> None:
    """No engine, no torch: the command line answers at once, and nothing is hooked by an import."""
    code = (
        "import sys, krul_sglang.adapter.plugin, krul_backend; print(*{'torch', 'sglang'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
