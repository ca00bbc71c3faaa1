"""Who may import whom: the rooms of the project, and the directions between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
BACKEND = ROOT / "backend" / "krul_backend"
ENGINE = ROOT / "krul_sglang" / "engine"
ADAPTER = ROOT / "krul_sglang" / "adapter"

ARROWS: dict[str, set[str]] = {
    "attention": set(),
    "planner": set(),
    "strategy": {"planner"},
    "codec": {"attention", "strategy"},
    "tiers.common": {"planner"},
    "tiers.dram": {"tiers.common"},
    "tiers.ssd": {"planner", "tiers.common"},
    "tiers.objects": {"planner", "tiers.common"},
    "store": {"planner", "tiers.common", "tiers.dram"},
    "daemon.protocol": {"planner", "tiers.common"},
    "daemon.client": {"daemon.protocol", "planner", "store", "tiers.common"},
    "daemon.server": {
        *("daemon.protocol", "store", "tiers.common", "tiers.dram", "tiers.objects", "tiers.ssd")
    },
    "daemon.cli": {"daemon.client", "daemon.protocol", "daemon.server", "strategy", "tiers.common"},
    "daemon.__main__": {"daemon.cli"},
    "models": {"config"},
    "learning": {"attention", "codec", "models"},
    "sizing": {"codec", "learning", "planner"},
    "engine.common": {"codec", "config", "daemon.client", "models", "strategy"},
    "engine.capture": {"attention"},
    "engine.save": {
        *("attention", "codec", "planner", "store", "strategy", "tiers.common"),
        *("engine.capture", "engine.common"),
    },
    "engine.restore": {"codec", "planner", "store", "strategy", "tiers.common", "engine.common"},
    "engine.budget": {
        *("attention", "codec", "store", "strategy", "tiers.common"),
        *("engine.common", "engine.restore", "engine.save"),
    },
    "adapter": {
        *("attention", "codec", "planner", "strategy", "tiers.common", "config", "learning", "models"),
        *("engine.budget", "engine.capture", "engine.common", "engine.restore", "engine.save"),
    },
    "config": {"codec", "planner", "strategy", "tiers.common"},
    "cli": {
        *("adapter", "config", "learning", "models", "sizing"),
        *("daemon.client", "tiers.common", "tiers.ssd"),
    },
}
"""The rooms, of both packages, and of which others each imports. Modules that lie in no room import of none,
and any room may import of them."""

DOORS = (
    *("planner", "strategy", "tiers.dram", "tiers.ssd", "tiers.objects", "daemon.client"),
    *("engine.capture", "engine.save", "engine.restore", "engine.budget"),
)
"""Rooms of which others import what the room's ``__init__`` names, and nothing else.

The other rooms would have too many names, or load for one name what another does not need: numba with
``attention``, the daemon's store in every engine with ``store``.
"""


@cache
def imports_of(path: Path) -> list[str]:
    """Dotted names of modules that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def inner(name: str) -> str:
    """A dotted name of ours without the package; empty for one of others."""
    package, _, rest = name.partition(".")
    return rest if package in ("krul_backend", "krul_sglang") else ""


def room_of(name: str, rooms: Iterable[str] = ARROWS) -> str | None:
    """The room in which something with a dotted name lies; None if it lies in none."""
    return next((room for room in rooms if f"{inner(name)}.".startswith(f"{room}.")), None)


def modules(*folders: Path) -> Iterator[tuple[str, Path]]:
    """Dotted names and files of all that lies in these packages."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder.parent).with_suffix("").as_posix().replace("/", ".")
            yield inside.removesuffix(".__init__"), path


PRODUCT = (BACKEND, ENGINE.parent)


def test_rooms_import_only_along_the_arrows() -> None:
    found: dict[str, set[str]] = {room: set() for room in ARROWS}
    for name, path in modules(*PRODUCT):
        own = room_of(name)
        others = {room_of(imported) for imported in imports_of(path)} - {own, None}
        found.setdefault(own or name, set()).update(str(other) for other in others)
    assert {room: others for room, others in found.items() if others or room in ARROWS} == ARROWS


def test_no_arrows_go_in_a_circle() -> None:
    TopologicalSorter(ARROWS).prepare()


def test_rooms_are_entered_through_their_doors() -> None:
    """And a door names nothing that nobody takes there."""
    used: dict[str, set[str]] = {door: set() for door in DOORS}
    for name, path in modules(*PRODUCT):
        for imported in imports_of(path):
            door = room_of(imported, DOORS)
            if door is not None and door != room_of(name):
                used[door].add(inner(imported).removeprefix(f"{door}."))
    named = {
        door: {imported.rpartition(".")[2] for imported in imports_of(path)}
        for name, path in modules(*PRODUCT)
        if (door := inner(name)) in DOORS
    }
    assert used == named


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
    for _, path in modules(*PRODUCT):
        if BACKEND / "codec" in path.parents:
            continue
        of_codecs = names_from(path, "krul_backend.codec") | {"Strategy", "LayerGroups"}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                kinds = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                wrong += [f"{path.name}: {ast.unparse(node)}"] * bool(kinds & of_codecs)
    assert wrong == []


def test_every_room_says_what_it_is_for() -> None:
    for name, path in modules(*PRODUCT):
        if inner(name) in ARROWS and path.name == "__init__.py":
            sentences = ast.get_docstring(ast.parse(path.read_text()))
            assert sentences is not None, path
            assert len(sentences) > 80, path


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
