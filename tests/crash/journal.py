"""The expected-state file: what an engine asked for, and what it was told. It survives the engine's death."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from tests.crash.conversations import Turn


class Journal:
    """Appends one line per event; a line is in the file, for every other process, when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, turn: Turn | None = None, connection: str = "") -> None:
        """``connection``: the one to a daemon on which it happened, different from every other one."""
        fields = None if turn is None else [turn.conversation, turn.first_page, turn.end_page]
        os.write(self._descriptor, orjson.dumps([event, fields, connection]) + b"\n")


@dataclass
class ExpectedState:
    """What may be found of each turn.

    ``possible``: may be found, with its bytes, or not. ``durable``: must be found. Everything else must not.
    """

    possible: set[Turn] = field(default_factory=set)
    durable: set[Turn] = field(default_factory=set)

    @classmethod
    def read(cls, path: Path) -> ExpectedState:
        """Replay a journal. What was begun and not ended may have happened or not.

        A clear that was begun leaves nothing certain; one that has ended leaves nothing at all. A flush says
        something about what was committed on the same connection, as far as all turns before it are durable,
        too: an engine that goes on when the daemon has lost a turn stores what nobody can ever restore, and
        the disk does not take that.
        """
        state = cls()
        committed: dict[Turn, str] = {}
        for event, turn, connection in _events(path):
            if event == "commit":
                assert turn is not None
                state.possible.add(turn)
            elif event == "committed":
                assert turn is not None
                committed[turn] = connection
            elif event == "flushed":
                # A turn is committed after those that it continues.
                for turn, on in committed.items():
                    if on == connection and state._is_continuing(turn):
                        state.durable.add(turn)
            elif event == "clear":
                state.durable.clear()
                committed.clear()
            elif event == "cleared":
                state.possible.clear()
            else:
                raise AssertionError(f"the journal has an unknown event {event!r}")
        return state

    def _is_continuing(self, turn: Turn) -> bool:
        """Whether a turn begins its conversation, or continues a durable one."""
        before = (turn.conversation, turn.first_page)
        return not turn.first_page or any(
            (each.conversation, each.end_page) == before for each in self.durable
        )


def _events(path: Path) -> Iterator[tuple[str, Turn | None, str]]:
    for line in path.read_bytes().splitlines() if path.exists() else ():
        event, fields, connection = orjson.loads(line)
        yield event, None if fields is None else Turn(*fields), connection
