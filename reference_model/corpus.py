"""Real text for training: the sources of Python's standard library on this machine.

The text is read at training time and is not part of the repository. Which text it is depends on the
Python release, so `Corpus.digest` is recorded with the model.
"""

import ast
import hashlib
import random
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "__pycache__"}
_HELD_OUT_SHARE = 20
_MIN_CHARACTERS = 400


@dataclass(frozen=True)
class Corpus:
    """Documents, and short passages of prose taken from docstrings; held-out ones by file name."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    train_passages: tuple[str, ...]
    held_out_passages: tuple[str, ...]
    digest: str

    def vocabulary(self) -> tuple[str, ...]:
        """Ordinary lower-case words of the training prose that occur there more than once, sorted."""
        counts = Counter(
            word for text in self.train_passages for word in re.findall(r"\b[a-z]{3,10}\b", text)
        )
        return tuple(sorted(word for word, count in counts.items() if count > 1))

    def passage(self, rng: random.Random, num_words: int, held_out: bool = False) -> str:
        """About `num_words` words from a random docstring, on one line."""
        words = rng.choice(self.held_out_passages if held_out else self.train_passages).split()
        start = rng.randint(0, max(0, len(words) - num_words))
        return " ".join(words[start : start + num_words])


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_SHARE == 0


def _docstrings(source: str) -> list[str]:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, nodes)]
    return [text for text in found if text and len(text) >= _MIN_CHARACTERS // 4]


def load_corpus() -> Corpus:
    """Reads the standard library; takes a few seconds."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents: dict[bool, list[str]] = {False: [], True: []}
    passages: dict[bool, list[str]] = {False: [], True: []}
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        if len(source) < _MIN_CHARACTERS:
            continue
        digest.update(name.encode() + b"\0" + source.encode())
        held_out = _is_held_out(name)
        if name.startswith("pydoc_data/"):
            # One long dictionary of prose: its strings are documents of their own.
            strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
            texts = [text for text in strings if isinstance(text, str) and len(text) >= _MIN_CHARACTERS]
            documents[False] += texts
            passages[False] += texts
            continue
        docstrings = _docstrings(source)
        passages[held_out] += docstrings
        documents[held_out].append(source)
        prose = "\n\n".join(docstrings)
        if len(prose) >= _MIN_CHARACTERS:
            documents[held_out].append(prose)
    tidy = {key: tuple(re.sub(r"[ \t]+\n", "\n", text) for text in texts) for key, texts in documents.items()}
    return Corpus(
        train=tidy[False],
        held_out=tidy[True],
        train_passages=tuple(passages[False]),
        held_out_passages=tuple(passages[True]),
        digest=digest.hexdigest(),
    )
