"""The suite `longbench`: the model writes the answer, and the task's metric scores it.

Protocol of the Krul paper (section 8.1): the last 128 tokens of the prompt stand for the user's input, what
is before them is the history that is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.longbench import (
    Example,
    LongBenchError,
    Task,
    read_examples,
    task_files,
    task_of,
    truncate_middle,
)
from benchmarks.quality.conversation import Answer, Conversation, Samples, compared
from benchmarks.quality.model import HistoryModel, VisibleTokens
from krul_backend.codec.layout import LayerKV

INPUT_TOKENS = 128


@dataclass(frozen=True)
class LongDocument(Conversation):
    """One example; its history is one turn. ``tokenizer`` is that of the Hugging Face model."""

    group: str
    history_tokens: int
    history: tuple[int, ...]
    turn_ends: tuple[int, ...]
    prompt: tuple[int, ...]
    task: Task
    example: Example
    tokenizer: Any
    source: str = ""

    def answer(
        self, model: HistoryModel, kv: Sequence[LayerKV], visible: VisibleTokens | None = None
    ) -> Answer:
        ids = self.history[len(kv[0].k) :] + self.prompt
        generated, logits = model.generate(
            ids,
            kv,
            max_new_tokens=self.task.max_new_tokens,
            end_ids=frozenset((self.tokenizer.eos_token_id,)),
            visible=visible,
        )
        return Answer(logits[-len(self.prompt) :], generated)

    def measure(self, answer: Answer, true_answer: Answer) -> Samples:
        """``score``: the task's metric, in [0, 1]; ``same_answer``: it is that on uncompressed KV."""
        prediction = self.tokenizer.decode(list(answer.generated), skip_special_tokens=True)
        return {
            "score": torch.tensor([self.task.score(prediction, self.example)]).double(),
            "same_answer": torch.tensor([answer.generated == true_answer.generated]).double(),
            **compared(true_answer.logits, answer.logits),
        }


def long_documents(tokenizer: Any, folder: Path, max_tokens: int, num_items: int) -> Iterator[LongDocument]:
    """The first ``num_items`` examples of each task in ``folder``, prompts cut to ``max_tokens`` tokens.

    Raises:
        LongBenchError: files that are not LongBench's, an unknown task, or a prompt with no history.
    """
    for path in task_files(folder).values():
        for example in islice(read_examples(path), num_items):
            task = task_of(example.task)
            ids = truncate_middle(tokenizer.encode(task.prompt_of(example)), max_tokens)
            num_history = len(ids) - INPUT_TOKENS
            if num_history < INPUT_TOKENS:
                raise LongBenchError(
                    f"{path.name}: a prompt of {len(ids)} tokens leaves no history of {INPUT_TOKENS}"
                )
            yield LongDocument(
                group=example.task,
                history_tokens=max_tokens,
                history=tuple(ids[:num_history]),
                turn_ends=(num_history,),
                prompt=tuple(ids[num_history:]),
                task=task,
                example=example,
                tokenizer=tokenizer,
            )
