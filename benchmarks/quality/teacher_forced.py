"""Conversations whose reference continuation is given, and scored token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmarks.quality.conversation import Answer, Conversation, Samples, compared
from benchmarks.quality.model import HistoryModel, VisibleTokens
from krul_backend.codec.layout import LayerKV
from reference_model.corpus import load_corpus
from reference_model.evaluation_items import make_item
from reference_model.facts import Kind
from reference_model.lexicon import Split
from reference_model.tokenizer import USER_ID

QUESTION_KINDS: tuple[Kind, ...] = ("single", "two_hop", "overwritten")
HISTORY_LENGTHS = (256, 512, 1024)
_DOCUMENT_LENGTHS = (512, 1024)


@dataclass(frozen=True)
class TeacherForced(Conversation):
    """``continuation`` follows the history: a prompt of ``prompt_tokens`` tokens, then the reference answer.

    ``value_positions`` are those tokens of the answer, counted from the history's end, whose loss is `nll`.
    ``is_question``: whether the answer can be recalled at all.
    """

    group: str
    history_tokens: int
    history: tuple[int, ...]
    turn_ends: tuple[int, ...]
    continuation: tuple[int, ...]
    prompt_tokens: int
    value_positions: tuple[int, ...]
    is_question: bool = True
    source: str = ""

    def answer(
        self, model: HistoryModel, kv: Sequence[LayerKV], visible: VisibleTokens | None = None
    ) -> Answer:
        """Logits of all tokens of the continuation but the last."""
        num_stored = len(kv[0].k)
        ids = self.history[num_stored:] + self.continuation[:-1]
        return Answer(model.logits(ids, kv, num_logits=len(self.continuation) - 1, visible=visible))

    def measure(self, answer: Answer, true_answer: Answer) -> Samples:
        """``recall``: every token of the reference answer is the most likely one, which is the same as:
        greedy decoding gives exactly this answer. ``value_recall``: its value tokens are, given the reference
        up to them. ``nll``: of value tokens, in nats. Text that answers no question has no recall.
        """
        ids = torch.tensor(self.continuation, device=answer.logits.device)
        # position i predicts token i + 1
        answer_logits = answer.logits[self.prompt_tokens - 1 :]
        expected = ids[self.prompt_tokens :]
        is_best = answer_logits.argmax(-1) == expected
        losses = F.cross_entropy(answer_logits, expected, reduction="none")
        value = torch.tensor(self.value_positions, device=ids.device) - self.prompt_tokens
        recall = {"recall": is_best.all()[None].double(), "value_recall": is_best[value].all()[None].double()}
        return {
            **(recall if self.is_question else {}),
            "nll": losses[value].double(),
            **compared(true_answer.logits, answer.logits),
        }


def recall_conversations(tokenizer: Tokenizer, num_items: int) -> Iterator[TeacherForced]:
    """``num_items`` held-out questions per kind and length of history."""
    for number in range(num_items):
        for history_tokens in HISTORY_LENGTHS:
            for kind in QUESTION_KINDS:
                yield dialogue(tokenizer, kind, history_tokens, f"quality/{number}", "held_out")


def learning_dialogues(tokenizer: Tokenizer, num_items: int) -> Iterator[TeacherForced]:
    """Dialogues of the training split, a little longer than 1,024 tokens."""
    for number in range(num_items):
        kind = QUESTION_KINDS[number % len(QUESTION_KINDS)]
        yield dialogue(tokenizer, kind, 1200, f"learning/{number}", "train")


def dialogue(tokenizer: Tokenizer, kind: Kind, history_tokens: int, seed: str, split: Split) -> TeacherForced:
    """A question of the bundled model's evaluation; the same arguments give the same conversation."""
    item = make_item(tokenizer, kind, history_tokens, seed, split)
    start = item.question_start
    # A turn begins with the user token; the first one also owns the beginning-of-text token before it.
    turn_starts = [i for i in range(start) if item.ids[i] == USER_ID]
    return TeacherForced(
        group=kind,
        history_tokens=history_tokens,
        history=item.ids[:start],
        turn_ends=(*turn_starts[1:], start),
        continuation=item.ids[start:],
        prompt_tokens=item.answer_start - start,
        value_positions=tuple(position - start for position in item.value_positions),
    )


def learning_documents(tokenizer: Any, num_items: int) -> Iterator[TeacherForced]:
    """Windows of documents of the training split, ``num_items`` per length.

    ``tokenizer`` is any Hugging Face model's.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    documents = list(load_corpus().train)
    random.Random("quality").shuffle(documents)
    for length in _DOCUMENT_LENGTHS:
        windows = ((*start, *tokenizer.encode(each, add_special_tokens=False))[:length] for each in documents)
        long_enough = (ids for ids in windows if len(ids) == length)
        for _, ids in zip(range(num_items), long_enough, strict=False):
            yield continued(ids, group="text", history_tokens=length, turn_ends=(length,))


def continued(
    ids: Sequence[int], *, group: str, history_tokens: int, turn_ends: tuple[int, ...], source: str = ""
) -> TeacherForced:
    """Text that goes on after a history of ``history_tokens`` tokens.

    Every token of the continuation counts but the first, which stands for the prompt: a server computes at
    least one.
    """
    return TeacherForced(
        group=group,
        history_tokens=history_tokens,
        history=tuple(ids[:history_tokens]),
        turn_ends=turn_ends,
        continuation=tuple(ids[history_tokens:]),
        prompt_tokens=1,
        value_positions=tuple(range(1, len(ids) - history_tokens)),
        is_question=False,
        source=source,
    )
