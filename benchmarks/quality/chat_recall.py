"""The suite `recall` of pretrained models: facts told during a long chat, and asked for at its end."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.quality.conversation import (
    Answer,
    BenchmarkError,
    Conversation,
    Message,
    Samples,
    chat_turns,
    compared,
)
from benchmarks.quality.model import HistoryModel, VisibleTokens
from krul_backend.codec.layout import LayerKV

_SURNAMES = "Baker Carter Cooper Fisher Gardner Hunter Mason Miller Parker Porter Turner Walker"
_TEAMS = "Lions Eagles Bears Wolves Tigers Sharks Hawks Bulls Dragons Pirates Rockets Giants"
_MATERIALS = "copper silver amber ivory velvet marble cotton granite diamond bronze pearl crystal"
_TITLES = "River Mountain Window Letter Summer Mirror Morning Dance Ocean Flower Train Memory"
_HORSES = "Storm Snow Cloud Star King Prince Moon Brown White Black Green Gold"


@dataclass(frozen=True)
class Relation:
    """A kind of fact: ``sentence``, a subject and its answer. Words are separated by spaces.

    The answer stands right after the subject: that is what small models can recall out of many facts.
    """

    sentence: str
    subjects: str
    answers: str


RELATIONS = (
    Relation("My colleague is", "Alice Brian Carol David Emma Frank Grace Henry", _SURNAMES),
    Relation("The doctor was", "Irene Karen Maria Nathan Olivia Peter Rachel Simon", _SURNAMES),
    Relation("The club is called", "Paris London Rome Berlin Madrid Vienna Dublin Tokyo", _TEAMS),
    Relation("Yesterday we watched the", "Moscow Boston Chicago Sydney Denver Lisbon Oslo Miami", _TEAMS),
    Relation("The password is", "harbour bridge tunnel garden library museum castle", _MATERIALS),
    Relation("On the box I wrote", "market station island valley desert airport forest", _MATERIALS),
    Relation("The song is called", "Silent Golden Broken Hidden Frozen Gentle Distant", _TITLES),
    Relation("I am reading", "Ancient Purple Lonely Secret Bright Empty Sweet", _TITLES),
    Relation("The horse is named", "Lucky Rusty Shadow Buddy Daisy Rocky Misty", _HORSES),
    Relation("At the farm I saw", "Sandy Ginger Bella Max Toby Luna Dusty", _HORSES),
)

FILLER = (
    "I had a long day and want to write a few things down.",
    "Before I forget it again, please note this.",
    "The weather was lovely, so I walked home and talked to some people.",
    "I am still sorting my papers.",
    "Here is more for my list.",
    "My train was late this morning, which gave me time to think.",
    "I just came back from lunch with the others.",
    "There is a lot going on this week.",
    "Sorry for the many messages.",
    "I found an old notebook with these lines.",
    "Someone called while I was cooking.",
    "Let me go on where we stopped.",
)

REPLIES = (
    "Thank you, I have noted it.",
    "All right, I will remember that.",
    "That is good to know.",
    "I see, this is now on your list.",
    "Understood, it is written down.",
    "Of course. Go on when you are ready.",
)

REQUEST = "Please tell me one of these things again."


CHAT_HISTORY_TOKENS = 2048
"""About so many."""

FACTS_PER_HISTORY = 60
_FACTS_PER_TURN = 3
_MIN_CANDIDATES = 8
_QUESTIONS_PER_FORWARD = 20


@dataclass(frozen=True)
class Question:
    """``prompt`` ends before the answer. ``candidates``: first tokens of the category, each its own."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    candidates: tuple[int, ...]


@dataclass(frozen=True)
class ChatRecall(Conversation):
    """Each question follows the history by itself, not the questions before it.

    ``opening`` are the tokens with which every question begins.
    """

    group: str
    history_tokens: int
    history: tuple[int, ...]
    turn_ends: tuple[int, ...]
    opening: tuple[int, ...]
    questions: tuple[Question, ...]
    source: str = ""

    def then(self, other: Conversation) -> ChatRecall:
        """The same chat and questions, with the history of another conversation between them."""
        ends = (*self.turn_ends, *(len(self.history) + end for end in other.turn_ends))
        num_tokens = self.history_tokens + other.history_tokens
        return replace(
            self, history_tokens=num_tokens, history=(*self.history, *other.history), turn_ends=ends
        )

    def answer(
        self, model: HistoryModel, kv: Sequence[LayerKV], visible: VisibleTokens | None = None
    ) -> Answer:
        """Logits from which the answers' tokens are predicted, one question after the other."""
        before = self.history[len(kv[0].k) :] + self.opening
        logits = []
        for start in range(0, len(self.questions), _QUESTIONS_PER_FORWARD):
            questions = self.questions[start : start + _QUESTIONS_PER_FORWARD]
            logits += model.branch_logits(
                before,
                [each.prompt + each.answer[:-1] for each in questions],
                kv,
                num_logits=[len(each.answer) for each in questions],
                visible=visible,
            )
        return Answer(torch.cat(logits))

    def measure(self, answer: Answer, true_answer: Answer) -> Samples:
        """``recall`` of each question: of the first tokens of the category's words, the right one is the most
        likely. ``nll``: of the right answer's tokens."""
        expected = torch.tensor([token for each in self.questions for token in each.answer])
        lengths = torch.tensor([len(each.answer) for each in self.questions])
        logits = answer.logits.cpu()
        first = logits[lengths.cumsum(0) - lengths]
        recall = [
            float(row[list(each.candidates)].max() == row[each.answer[0]])
            for each, row in zip(self.questions, first, strict=True)
        ]
        return {
            "recall": torch.tensor(recall).double(),
            "nll": F.cross_entropy(logits, expected, reduction="none").double(),
            **compared(true_answer.logits, answer.logits),
        }


Answers = dict[str, tuple[int, ...]]
"""Tokens of each word that a relation can have as its answer."""


def chat_recall_conversations(tokenizer: Any, num_items: int) -> Iterator[ChatRecall]:
    """``num_items`` histories of about 2,000 tokens, with 60 facts each; the same ones in every run.

    Raises:
        BenchmarkError: a tokenizer without a chat template, or in which too few words differ at once.
    """
    relations = [(relation, _answers(tokenizer, relation)) for relation in RELATIONS]
    for number in range(num_items):
        yield chat_recall(tokenizer, relations, random.Random(f"chat recall/{number}"))


def chat_recall(
    tokenizer: Any, relations: Sequence[tuple[Relation, Answers]], rng: random.Random
) -> ChatRecall:
    """One history: the user tells some facts at a time, the reply repeats them, the user confirms them."""
    facts, questions = [], []
    for relation, answers in relations:
        for subject in rng.sample(relation.subjects.split(), FACTS_PER_HISTORY // len(relations)):
            word = rng.choice(list(answers))
            beginning = f"{relation.sentence} {subject}"
            facts.append(f"{beginning} {word}.")
            questions.append(
                Question(
                    tuple(tokenizer.encode(beginning, add_special_tokens=False)),
                    answers[word],
                    tuple(each[0] for each in answers.values()),
                )
            )
    told = rng.sample(facts, len(facts))
    messages: list[Message] = []
    confirmed = ""
    for start in range(0, len(told), _FACTS_PER_TURN):
        sentences = " ".join(told[start : start + _FACTS_PER_TURN])
        messages.append({"role": "user", "content": f"{confirmed}{rng.choice(FILLER)} {sentences}"})
        messages.append({"role": "assistant", "content": f"{rng.choice(REPLIES)} {sentences}"})
        confirmed = f"Right. {sentences} "
    turns = chat_turns(tokenizer, messages)
    return ChatRecall(
        group="chat",
        history_tokens=CHAT_HISTORY_TOKENS,
        history=tuple(chain(*turns)),
        turn_ends=tuple(accumulate(map(len, turns))),
        opening=_opening(tokenizer, messages),
        questions=tuple(questions),
    )


def _opening(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """What the template writes after ``messages`` when the model is asked to tell something again."""
    before = tokenizer.apply_chat_template(list(messages), tokenize=False)
    asked = [*messages, {"role": "user", "content": REQUEST}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text.removeprefix(before), add_special_tokens=False))


def _answers(tokenizer: Any, relation: Relation) -> Answers:
    """Tokens of the relation's words, without those that begin as an earlier one does."""
    answers: Answers = {}
    firsts = set()
    for word in relation.answers.split():
        ids = tuple(tokenizer.encode(f" {word}", add_special_tokens=False))
        if ids[0] not in firsts:
            firsts.add(ids[0])
            answers[word] = ids
    if len(answers) < _MIN_CANDIDATES:
        raise BenchmarkError(
            f"only {len(answers)} of the answers to {relation.sentence!r} begin with tokens of their own "
            f"in this tokenizer: {_MIN_CANDIDATES} are needed"
        )
    return answers
