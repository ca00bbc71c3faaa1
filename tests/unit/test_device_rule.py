"""One module knows kinds of devices; nothing else asks, or copies to one behind its back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWS_DEVICES = ("backend/krul_backend/device.py", "krul_sglang/adapter/platforms/")
MAY_MOVE_TENSORS = {
    "backend/krul_backend/attention/rows.py": "rows that a caller hands in may lie on another device",
    "backend/krul_backend/codec/rotary.py": "nothing moves if the table lies where the keys do",
    "backend/krul_backend/codec/kernel_arguments.py": "the same table, once",
    "backend/krul_backend/codec/subspace/triton_group_restore.py": "the coder's tables, once",
    "backend/krul_backend/codec/subspace/bases.py": "once, when bases are loaded",
    "backend/krul_backend/codec/subspace/codec.py": "the reference implementation: nothing moves on a CPU",
    "backend/krul_backend/codec/subspace/vectors.py": "numbers of tokens, whose coefficients are waited for",
    "backend/krul_backend/codec/subspace/coded_tail.py": "the reference: nothing moves on a CPU",
    "krul_sglang/learning/command.py": "before anything is served",
    "krul_sglang/learning/model_kv.py": "before anything is served",
    "krul_sglang/learning/reader.py": "before anything is served",
    "krul_sglang/adapter/model_bases.py": "once, when bases are loaded",
    "krul_sglang/adapter/start_proof.py": "at start only",
    "krul_sglang/adapter/watched_layers.py": "at start only",
}
"""Files that call ``tensor.to(device)``, which waits for the stream where it copies from pageable memory."""


def product_files() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("krul_sglang", "backend/krul_backend"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def asks_for_a_kind(node: ast.AST) -> bool:
    """``torch.cuda``, ``x.is_cuda``, ``device.type == ...``, ``torch.device("cuda")``."""
    if isinstance(node, ast.Attribute):
        return dotted(node) == "torch.cuda" or node.attr in ("is_cuda", "is_cpu")
    if isinstance(node, ast.Compare):
        sides = (node.left, *node.comparators)
        is_type = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
        return is_type and any(isinstance(side, ast.Constant) for side in sides)
    return isinstance(node, ast.Constant) and node.value in ("cuda", "cuda:0")


def moves_a_tensor(node: ast.AST) -> bool:
    """``x.to(device)``, ``x.cuda()``, ``torch.tensor(values, device=...)``."""
    if not isinstance(node, ast.Call):
        return False
    if dotted(node.func) in ("torch.tensor", "torch.as_tensor"):
        return any(keyword.arg == "device" for keyword in node.keywords)
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    to_device = method == "to" and any(dotted(argument).endswith("device") for argument in node.args)
    return method == "cuda" or to_device


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("torch.cuda.synchronize()", True),
        ("buffer.is_cuda", True),
        ('device.type == "cpu"', True),
        ('torch.device("cuda")', True),
        ("event.type == Kind.END", False),
        ("cuda_graph_fully_disabled()", False),
    ],
)
def test_questions_for_a_kind_are_recognized(code: str, is_found: bool) -> None:
    assert any(asks_for_a_kind(node) for node in ast.walk(ast.parse(code))) == is_found


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("ids.to(self._pool.device)", True),
        ("ids.to(device, non_blocking=True)", True),
        ("torch.tensor(counts, device=x.device)", True),
        ("x.cuda()", True),
        ("x.to(torch.int64)", False),
        ("torch.tensor([seconds])", False),
        ("torch.arange(n, device=device)", False),
    ],
)
def test_moves_are_recognized(code: str, is_found: bool) -> None:
    assert any(moves_a_tensor(node) for node in ast.walk(ast.parse(code))) == is_found


def test_nothing_else_asks_for_a_kind_of_device() -> None:
    found = {
        path
        for path, tree in product_files()
        if not path.startswith(KNOWS_DEVICES)
        for node in ast.walk(tree)
        if asks_for_a_kind(node)
    }
    assert found == set()


def test_tensors_come_to_the_device_by_its_own_copies() -> None:
    found = {path for path, tree in product_files() for node in ast.walk(tree) if moves_a_tensor(node)}
    assert found == set(MAY_MOVE_TENSORS)
