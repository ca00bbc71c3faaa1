"""The texts that bases are learned from: those that come with the program, or a user's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orjson

import krul_backend
import krul_sglang
from krul_sglang.learning.bases import LearningError

_CHATS = Path(krul_sglang.__file__).parent / "assets" / "chats.json"


def own_texts() -> list[str]:
    """Text that comes with the program: conversations, and its own source code with the prose in it."""
    chats = orjson.loads(_CHATS.read_bytes())
    sources = [
        path.read_text()
        for package in (krul_sglang, krul_backend)
        for path in sorted(Path(package.__file__ or "").parent.rglob("*.py"))
    ]
    return [*_strings(chats), *sources]


def read_texts(path: Path) -> list[str]:
    """The text of one file, or of all files in a folder: plain, or one JSON value per line (``*.jsonl``).

    Of JSON values all strings count that are not names of fields, so that any form of messages will do.

    Raises:
        LearningError: no such path, no text there, or a file that cannot be read.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    texts = []
    for file in files:
        try:
            if file.suffix == ".jsonl":
                texts += [
                    "\n".join(_strings(orjson.loads(line))) for line in file.read_bytes().splitlines() if line
                ]
            else:
                texts.append(file.read_text())
        except (OSError, ValueError) as error:
            raise LearningError(f"{file} cannot be read as text: {error}") from error
    if not any(text.strip() for text in texts):
        raise LearningError(f"{path} has no text")
    return texts


def cut_pieces(tokenizer: Any, texts: Iterable[str], num_tokens: int, most: int) -> list[list[int]]:
    """Pieces of ``num_tokens`` token ids, at most ``most``, spread evenly over the texts one after the other.

    Each begins as a conversation does, with the beginning-of-text token if the model has one.
    """
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    size = num_tokens - len(_begin(tokenizer))
    count = min(most, len(ids) // size)
    starts = (index * (len(ids) - size) // max(1, count - 1) for index in range(count))
    return begun_pieces(tokenizer, (ids[start : start + size] for start in starts), num_tokens)


def begun_pieces(tokenizer: Any, pieces: Iterable[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Token ids, at most ``num_tokens`` of each piece, which begins as a conversation does."""
    begin = _begin(tokenizer)
    return [
        list(piece)[:num_tokens] if begin and piece[0] == begin[0] else [*begin, *piece][:num_tokens]
        for piece in pieces
    ]


def _begin(tokenizer: Any) -> list[int]:
    """The beginning-of-text token, if the model has one."""
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]


def _strings(value: object) -> Sequence[str]:
    if isinstance(value, str):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in values for text in _strings(each)]
