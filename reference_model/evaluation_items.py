"""Questions at a given length of history, as token ids, for the evaluation."""

import random
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from reference_model.dialogues import DialogueWriter, Style
from reference_model.facts import Kind, Question, SpanKind
from reference_model.lexicon import Split
from reference_model.sequences import encode_spans, encode_turn
from reference_model.tokenizer import ASSISTANT_ID, BOS_ID, END_ID, USER_ID

_MAX_FILLER_WORDS = 60
_CORRECTIONS = 0.25


@dataclass(frozen=True)
class Item:
    """One question after a history.

    `ids` are history, question and reference answer. History is [0, question_start), the question
    [question_start, answer_start) with the assistant token last, the answer [answer_start, len(ids))
    with the end token last. `value_positions` index the answer's value tokens in `ids`.
    """

    kind: Kind
    ids: tuple[int, ...]
    question_start: int
    answer_start: int
    value_positions: tuple[int, ...]


def make_item(
    tokenizer: Tokenizer, kind: Kind, history_tokens: int, seed: str, split: Split = "held_out"
) -> Item:
    """A question of `kind` after a dialogue of at most `history_tokens`, as many whole turns as fit.

    Dialogues have the style of the bundled conversations and distractors of this package's own text.
    """
    for attempt in range(1000):
        rng = random.Random(f"{seed}/{kind}/{history_tokens}/{attempt}")
        style = Style(
            max_filler_words=_MAX_FILLER_WORDS,
            demo=True,
            ask_weight=0,
            links=kind == "two_hop" or rng.random() < 0.5,
            teams=kind == "counting" or rng.random() < 0.5,
            corrections=_CORRECTIONS,
        )
        writer = DialogueWriter(style, split, rng)
        ids = [BOS_ID]
        question: Question | None = None
        while True:
            turn_ids, _ = encode_turn(tokenizer, writer.next_turn())
            if len(ids) + len(turn_ids) > history_tokens:
                break
            ids += turn_ids
            # The turn that does not fit is dropped, so the question is drawn before it is written.
            question = writer.question_now(kind)
        if question is None:
            continue
        question_start = len(ids)
        ids.append(USER_ID)
        for span_ids, _ in encode_spans(tokenizer, question.question):
            ids += span_ids
        ids += [END_ID, ASSISTANT_ID]
        answer_start = len(ids)
        value_positions: list[int] = []
        for span_ids, span_kind in encode_spans(tokenizer, question.answer):
            if span_kind is SpanKind.ANSWER_VALUE:
                value_positions += range(len(ids), len(ids) + len(span_ids))
            ids += span_ids
        ids.append(END_ID)
        return Item(kind, tuple(ids), question_start, answer_start, tuple(value_positions))
    raise ValueError(f"no {kind!r} question fits into {history_tokens} tokens of history")


def items_of_conversation(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[Item]:
    """The questions of a ShareGPT conversation, each after the reference answers before it."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    items: list[Item] = []
    ids = [BOS_ID]
    for human, reply in zip(messages[::2], messages[1::2], strict=True):
        question_start = len(ids)
        ids += [USER_ID, *encode(" " + human["value"]), END_ID, ASSISTANT_ID]
        answer_start = len(ids)
        if "expected" not in human:
            ids += [*encode(" " + reply["value"]), END_ID]
            continue
        before, _, _ = (" " + reply["value"]).partition(" " + human["expected"])
        value_start = answer_start + len(encode(before))
        value_end = value_start + len(encode(" " + human["expected"]))
        ids += [*encode(" " + reply["value"]), END_ID]
        positions = tuple(range(value_start, value_end))
        items.append(Item(human["kind"], tuple(ids), question_start, answer_start, positions))
    return items
