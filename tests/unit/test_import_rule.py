from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

BACKEND = Path(__file__).parents[2] / "backend" / "krul_backend"


def test_the_backend_never_imports_the_engine() -> None:
    for path in BACKEND.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in ("sglang", "krul_sglang"), f"{path} imports {name}"


def test_importing_the_packages_does_no_work() -> None:
    """No engine, no torch: the command line answers at once, and nothing is hooked by an import."""
    code = "import sys, krul_sglang.plugin, krul_backend; print(*{'torch', 'sglang'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
