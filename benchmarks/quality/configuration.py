"""What one run of the benchmark measures, and every default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.quality.agent import AGENT_HISTORY_LENGTHS, Part, agent_conversations, learning_conversations
from benchmarks.quality.chat_recall import chat_recall_conversations
from benchmarks.quality.conversation import BenchmarkError, Conversation
from benchmarks.quality.methods import Eviction, Method
from benchmarks.quality.teacher_forced import learning_dialogues, learning_documents, recall_conversations
from demo.environment import without_cwd
from krul_sglang.models.find import REFERENCE_MODEL
from reference_model.tokenizer import USER, USER_ID

_RECALL_HISTORIES = 25
"""Of a pretrained model: with 60 questions each, 1,500 in all."""

_ITEMS = 7
_MIN_LENGTH = 256
_LEARNING_DOCUMENTS = 50
_LEARNING_DIALOGUES = 24


class Suite(StrEnum):
    """What is asked after the history."""

    RECALL = "recall"
    AGENT = "agent"


class Turns(StrEnum):
    """``ONCE``: the history is computed on exact KV. ``EACH``: each turn on restored history."""

    ONCE = "once"
    EACH = "each"


@dataclass(frozen=True)
class Configuration:
    """``items``: conversations per group and length; None takes the suite's own. ``methods``: shell patterns
    of row names.

    ``variant``: a control made of the model, see ``benchmarks.variants``. ``data``: files of agents'
    sessions, of which those of ``part`` are scored, in histories of ``lengths``; in `recall` they lie between
    the facts of a chat and its questions. ``learn_from``: its domains from which methods may learn; none
    names all. ``bases``: a file of `krul-sglang learn`; None learns from text that is not scored.
    """

    model: Path = REFERENCE_MODEL
    suite: Suite = Suite.RECALL
    turns: Turns = Turns.ONCE
    items: int | None = None
    methods: tuple[str, ...] = ("*",)
    variant: str | None = None
    data: Path | None = None
    lengths: tuple[int, ...] = AGENT_HISTORY_LENGTHS
    part: Part = Part.CHOOSE
    learn_from: tuple[str, ...] = ()
    bases: Path | None = None
    gamma: float = 0.6
    rows_per_turn: int = 32
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 2

    def __post_init__(self) -> None:
        if self.suite is Suite.AGENT and self.data is None:
            raise BenchmarkError("--suite agent needs --data DIR")
        if min(1 if self.items is None else self.items, self.rows_per_turn, self.threads) < 1:
            raise BenchmarkError("--items, --rows-per-turn and --threads begin at 1")
        if min(self.lengths) < _MIN_LENGTH:
            raise BenchmarkError(f"--length begins at {_MIN_LENGTH}, got {min(self.lengths)}")
        if self.part is Part.LEARN:
            raise BenchmarkError("--part learn is what methods may learn from: it is never scored")
        if self.learn_from and self.suite is not Suite.AGENT:
            raise BenchmarkError("--learn-from names folders in the data of --suite agent")

    def to_json(self) -> dict[str, Any]:
        paths = {
            name: None if path is None else without_cwd(str(path))
            for name, path in (("model", self.model), ("data", self.data), ("bases", self.bases))
        }
        return {**asdict(self), **paths}

    def conversations(self, tokenizer: Any) -> Iterable[Conversation]:
        """Those of the suite; ``tokenizer`` is the Hugging Face model's.

        Raises:
            BenchmarkError: data or a tokenizer that the suite cannot use.
        """
        if self.suite is Suite.AGENT:
            assert self.data is not None, "checked above"
            return agent_conversations(tokenizer, self.data, self.items or _ITEMS, self.lengths, self.part)
        if is_dialogue_tokenizer(tokenizer):
            if self.data is not None:
                raise BenchmarkError("--data cannot come into the dialogues of the bundled model")
            return recall_conversations(tokenizer.backend_tokenizer, self.items or _ITEMS)
        items = self.items or _RECALL_HISTORIES
        chats = chat_recall_conversations(tokenizer, items)
        if self.data is None:
            return chats
        sessions = list(agent_conversations(tokenizer, self.data, items, self.lengths, self.part))
        return (each.then(sessions[i * len(sessions) // items]) for i, each in enumerate(chats))

    def learning_conversations(self, tokenizer: Any) -> Iterable[Conversation]:
        """What methods may learn from: nothing of it is scored. Sessions of agents, dialogues like those
        that the bundled model is asked about, or plain text.

        Raises:
            BenchmarkError: as ``conversations`` does, or a domain to learn from that is not in the data.
        """
        if self.suite is Suite.AGENT and self.data is not None:
            return learning_conversations(tokenizer, self.data, self.learn_from or None)
        if self.suite is Suite.RECALL and is_dialogue_tokenizer(tokenizer):
            return learning_dialogues(tokenizer.backend_tokenizer, _LEARNING_DIALOGUES)
        return learning_documents(tokenizer, _LEARNING_DOCUMENTS)

    def wants(self, row: str) -> bool:
        """Whether the row of this name is asked for."""
        return any(fnmatch(row, pattern) for pattern in self.methods)

    def selected(self, methods: Sequence[Method | Eviction]) -> list[Method | Eviction]:
        """The rows that are asked for. Raises BenchmarkError if none is."""
        chosen = [
            method
            for method in methods
            if self.wants(method.name) and (self.turns is Turns.ONCE or isinstance(method, Method))
        ]
        if not chosen:
            names = ", ".join(method.name for method in methods)
            raise BenchmarkError(f"no row matches {self.methods} (there are: {names})")
        return chosen


def is_dialogue_tokenizer(tokenizer: Any) -> bool:
    """Whether it is one of this repository's dialogues."""
    return bool(tokenizer.convert_tokens_to_ids(USER) == USER_ID)
