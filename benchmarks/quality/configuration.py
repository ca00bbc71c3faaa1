"""What one run of the benchmark measures, and every default."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.quality.conversation import Conversation
from benchmarks.quality.long_documents import long_documents
from benchmarks.quality.methods import Compression, Method
from benchmarks.quality.teacher_forced import (
    HISTORY_LENGTHS,
    QUESTION_KINDS,
    dialogue,
    recall_conversations,
    text_conversations,
)
from krul_backend.codec.options import Sharing
from krul_backend.errors import KrulError
from krul_sglang.cli.app import REFERENCE_MODEL
from krul_sglang.demo.environment import without_cwd
from reference_model.tokenizer import USER, USER_ID

REFERENCE_RECALL_LAYERS = (9, 10, 11)
"""The layers of the bundled model without which it recalls nothing, by its evaluation."""


class BenchmarkError(KrulError):
    """A combination of options that measures nothing."""


class Suite(StrEnum):
    """What is asked after the history."""

    RECALL = "recall"
    TEXT = "text"
    LONGBENCH = "longbench"


class Turns(StrEnum):
    """``ONCE``: the history is computed on exact KV. ``EACH``: each turn on restored history."""

    ONCE = "once"
    EACH = "each"


@dataclass(frozen=True)
class Configuration:
    """``items``: conversations per group and length. ``methods``: shell patterns of row names.

    ``variant``: a control made of the model, see ``benchmarks.variants``. ``recall_layers``: sharing rows are
    split by them; None takes those of the bundled model or its variant, and none for other models.
    ``probes``: forwards that teach the budget rows what damage costs. ``limits``: budgets beside the usual.
    """

    model: Path = REFERENCE_MODEL
    suite: Suite = Suite.RECALL
    turns: Turns = Turns.ONCE
    items: int = 7
    methods: tuple[str, ...] = ("*",)
    variant: str | None = None
    data: Path | None = None
    max_tokens: int = 4096
    gamma: float = 0.6
    rows_per_turn: int = 32
    recall_layers: tuple[int, ...] | None = None
    probes: int = 240
    limits: tuple[float, ...] = ()
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 2

    def __post_init__(self) -> None:
        if (self.suite is Suite.LONGBENCH) != (self.data is not None):
            raise BenchmarkError("--suite longbench needs --data DIR, and no other suite takes it")

    def to_json(self) -> dict[str, Any]:
        paths = {
            name: None if path is None else without_cwd(str(path))
            for name, path in (("model", self.model), ("data", self.data))
        }
        return {**asdict(self), **paths}

    def split_layers(self) -> tuple[int, ...]:
        """The layers that carry the recall, in the model that is run."""
        if self.recall_layers is not None:
            return self.recall_layers
        if self.model != REFERENCE_MODEL:
            return ()
        if self.variant is None:
            return REFERENCE_RECALL_LAYERS
        return tuple(2 * layer + copy for layer in REFERENCE_RECALL_LAYERS for copy in (0, 1))

    def sharings(self) -> list[Sharing]:
        """Predicted pairs need a map of every pair: that is for models as small as the bundled one."""
        return list(Sharing) if self.model == REFERENCE_MODEL else [Sharing.SLERP]

    def conversations(self, tokenizer: Any) -> Iterable[Conversation]:
        """Those of the suite; ``tokenizer`` is the Hugging Face model's.

        Raises:
            BenchmarkError: the suite `recall` with a model that does not speak the bundled model's language.
        """
        if self.suite is Suite.TEXT:
            return text_conversations(tokenizer, self.items)
        if self.data is not None:
            return long_documents(tokenizer, self.data, self.max_tokens, self.items)
        if not is_dialogue_tokenizer(tokenizer):
            raise BenchmarkError("--suite recall is for models trained on this repository's dialogues")
        return recall_conversations(tokenizer.backend_tokenizer, self.items)

    def probe_conversations(self, tokenizer: Any) -> Iterator[Conversation]:
        """Endless conversations to learn from, none of which is scored: of the training split for `recall`,
        else windows of the corpus' training documents."""
        if self.suite is not Suite.RECALL:
            while True:
                yield from text_conversations(tokenizer, self.probes, held_out=False)
        for number in count():
            kind = QUESTION_KINDS[number % len(QUESTION_KINDS)]
            # every kind meets every length
            history_tokens = HISTORY_LENGTHS[number // len(QUESTION_KINDS) % len(HISTORY_LENGTHS)]
            yield dialogue(
                tokenizer.backend_tokenizer, kind, history_tokens, f"quality probe/{number}", "train"
            )

    def selected(self, methods: Sequence[Method]) -> list[Method]:
        """The rows that are asked for. Raises BenchmarkError if none is."""
        chosen = [
            method
            for method in methods
            if any(fnmatch(method.name, pattern) for pattern in self.methods)
            and (self.turns is Turns.ONCE or isinstance(method, Compression))
        ]
        if not chosen:
            names = ", ".join(method.name for method in methods)
            raise BenchmarkError(f"no row matches {self.methods} (there are: {names})")
        return chosen


def is_dialogue_tokenizer(tokenizer: Any) -> bool:
    """Whether it is one of this repository's dialogues."""
    return bool(tokenizer.convert_tokens_to_ids(USER) == USER_ID)
