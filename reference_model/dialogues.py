"""Generator of dialogues: facts in user turns, distractors, and questions about any earlier turn."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from reference_model import facts, smalltalk
from reference_model.facts import KINDS, Attribute, Fact, Kind, Link, Question, Span, SpanKind
from reference_model.lexicon import Lexicon, Split, lexicon

Filler = Callable[[random.Random, int], str]
"""Writes about so many words of distractor text."""

_KIND_WEIGHTS: dict[Kind, float] = {"single": 0.58, "two_hop": 0.17, "overwritten": 0.15, "counting": 0.10}
_SAME_TURN_QUESTION = 0.1
_RIVALS_OF_TWO_HOP = 2
_MAX_TEAM = 6


@dataclass(frozen=True)
class Turn:
    """One user message and its reference answer."""

    user: tuple[Span, ...]
    assistant: tuple[Span, ...]
    question: Question | None


@dataclass(frozen=True)
class Style:
    """What kind of dialogue to write. Probabilities unless named otherwise.

    `demo` dialogues state facts, ramble and ask in one user turn, as the bundled conversations do;
    the others also have turns that only state, only ask (`ask_weight` to 6 others) or only ramble.
    """

    max_filler_words: int
    demo: bool
    ask_weight: int
    links: bool
    teams: bool
    corrections: float


def draw_style(num_tokens: int, rng: random.Random) -> Style:
    """A random style for a dialogue of about `num_tokens` tokens."""
    demo = rng.random() < 0.4
    longest = max(8, num_tokens // 12)
    return Style(
        max_filler_words=rng.choice((longest // 2, longest)) if demo else rng.choice((0, 8, longest // 2)),
        demo=demo,
        ask_weight=rng.choice((4, 12)),
        links=num_tokens >= 200 and rng.random() < 0.45,
        teams=rng.random() < 0.3,
        corrections=rng.choice((0.0, 0.2, 0.35)),
    )


@dataclass(frozen=True)
class _Stated:
    """A fact together with the turn that stated its newest value."""

    fact: Fact
    turn: int
    overwritten: bool


class DialogueWriter:
    """Writes one dialogue turn by turn. The same `rng` state gives the same dialogue."""

    def __init__(
        self, style: Style, words: Split | Lexicon, rng: random.Random, filler: Filler = smalltalk.paragraph
    ) -> None:
        self._style, self._rng, self._filler = style, rng, filler
        self._words = words if isinstance(words, Lexicon) else lexicon(words)
        self._num_turns = 0
        self._stated: dict[tuple[str, str], _Stated] = {}
        self._links: list[tuple[Link, int]] = []
        self._members: dict[str, list[tuple[str, int]]] = {}
        self._people = self._draw_people(rng.randint(3, 8))
        things = {
            f"the {rng.choice(self._words.adjectives)} {rng.choice(self._words.nouns)}"
            for _ in range(rng.randint(3, 7))
        }
        self._things = sorted(things)
        rng.shuffle(self._things)
        self._person_attributes = rng.sample(facts.PERSON_ATTRIBUTES, rng.randint(2, 6))
        self._thing_attributes = rng.sample(facts.THING_ATTRIBUTES, rng.randint(1, 5))
        self._link_attribute = rng.choice(self._thing_attributes)
        self._pending: list[Link | Fact | tuple[str, str]] = []
        if style.links:
            self._plan_links()
        if style.teams:
            self._plan_teams()

    def _draw_people(self, count: int) -> list[str]:
        people: dict[str, None] = {}
        while len(people) < count:
            people[self._rng.choice(self._words.people)] = None
        return list(people)

    def _plan_links(self) -> None:
        """Three or four people with a thing each, all things with one attribute in common."""
        verb = facts.draw_link_verb(self._rng)
        count = min(self._rng.randint(3, 4), len(self._people), len(self._things))
        for person, thing in zip(self._rng.sample(self._people, count), self._things[:count], strict=True):
            self._pending.append(Link(person, verb, thing))
            value = facts.draw_value(self._link_attribute, self._words, self._rng)
            self._pending.append(Fact(thing, self._link_attribute, value))
        self._rng.shuffle(self._pending)

    def _plan_teams(self) -> None:
        for team in dict.fromkeys(self._rng.sample(self._words.teams, self._rng.randint(1, 2))):
            for person in self._draw_people(self._rng.randint(1, _MAX_TEAM)):
                self._pending.insert(self._rng.randint(0, len(self._pending)), (person, team))

    def _state_something(self) -> tuple[Span, ...]:
        """The next planned statement, a correction of an earlier value, or a new fact."""
        rng = self._rng
        if self._pending and rng.random() < 0.7:
            item = self._pending.pop()
            if isinstance(item, Link):
                self._links.append((item, self._num_turns))
                return facts.state_link(item, rng)
            if isinstance(item, Fact):
                return self._record(item)
            person, team = item
            self._members.setdefault(team, []).append((person, self._num_turns))
            return facts.state_member(person, team, rng)
        earlier = [entry for entry in self._stated.values() if entry.turn < self._num_turns]
        if earlier and rng.random() < self._style.corrections:
            old = rng.choice(earlier).fact
            value = facts.draw_value(old.attribute, self._words, rng)
            return self._record(Fact(old.subject, old.attribute, value))
        return self._record(self._new_fact())

    def _new_fact(self) -> Fact:
        """A fact about a pair of subject and attribute that has no value yet and is not planned."""
        taken = set(self._stated) | {
            (item.subject, item.attribute.name) for item in self._pending if isinstance(item, Fact)
        }
        for _ in range(40):
            subject, attribute = self._draw_subject()
            if (subject, attribute.name) not in taken:
                return Fact(subject, attribute, facts.draw_value(attribute, self._words, self._rng))
        # The cast is exhausted: someone new appears.
        self._people += self._draw_people(2)
        self._people = list(dict.fromkeys(self._people))
        return self._new_fact()

    def _draw_subject(self) -> tuple[str, Attribute]:
        if self._rng.random() < 0.6:
            return self._rng.choice(self._people), self._rng.choice(self._person_attributes)
        return self._rng.choice(self._things), self._rng.choice(self._thing_attributes)

    def _record(self, fact: Fact) -> tuple[Span, ...]:
        key = (fact.subject, fact.attribute.name)
        known = key in self._stated
        self._stated[key] = _Stated(fact, self._num_turns, overwritten=known)
        return facts.correct(fact, self._rng) if known else facts.state(fact, self._rng)

    def question(self, kind: Kind, before_turn: int) -> Question | None:
        """A question of `kind` about what was stated before turn `before_turn`, None if there is none."""
        rng = self._rng
        if kind in ("single", "overwritten"):
            wanted = kind == "overwritten"
            known = [
                entry.fact
                for entry in self._stated.values()
                if entry.turn < before_turn and entry.overwritten == wanted
            ]
            return facts.ask(rng.choice(known), kind, rng) if known else None
        if kind == "counting":
            # A team that somebody joins in the current turn is not asked about.
            teams = [
                (team, len(members))
                for team, members in self._members.items()
                if all(turn < before_turn for _, turn in members)
            ]
            return facts.ask_count(*rng.choice(teams)) if teams else None
        pairs: list[tuple[Link, Fact]] = []
        for link, turn in self._links:
            entry = self._stated.get((link.thing, self._link_attribute.name))
            if entry is not None and max(turn, entry.turn) < before_turn:
                pairs.append((link, entry.fact))
        if len(pairs) <= _RIVALS_OF_TWO_HOP:
            return None
        return facts.ask_two_hop(*rng.choice(pairs))

    def _any_question(self, before_turn: int) -> Question | None:
        questions = {kind: self.question(kind, before_turn) for kind in KINDS}
        possible = [kind for kind in KINDS if questions[kind] is not None]
        if not possible:
            return None
        kind = self._rng.choices(possible, [_KIND_WEIGHTS[kind] for kind in possible])[0]
        return questions[kind]

    def next_turn(self) -> Turn:
        """The next turn, in the style of the dialogue."""
        rng = self._rng
        shape = (
            "mixed"
            if self._style.demo
            else rng.choices(("facts", "ask", "mixed", "ramble"), (2, self._style.ask_weight, 3, 1))[0]
        )
        num_statements = rng.randint(1, 3) if shape in ("facts", "mixed") else 0
        rambles = shape == "ramble" or (shape == "mixed" and rng.random() < 0.8)
        num_words = rng.randint(4, max(4, self._style.max_filler_words)) if rambles else 0
        if shape in ("ask", "mixed") and self._num_turns == 0:
            num_statements = rng.randint(2, 3)
        asks = shape in ("ask", "mixed")
        return self._write(num_statements, num_words if self._style.max_filler_words else 0, asks)

    def ask_turn(self) -> Turn:
        """A turn that only asks, if anything can be asked; else one that rambles."""
        return self._write(0, 0, asks=True)

    def _write(self, num_statements: int, num_words: int, asks: bool) -> Turn:
        body: list[tuple[Span, ...]] = [self._state_something() for _ in range(num_statements)]
        before_turn = self._num_turns + (1 if self._rng.random() < _SAME_TURN_QUESTION else 0)
        question = self._any_question(before_turn) if asks else None
        if not body and question is None:
            num_words = max(num_words, 6)
        if num_words:
            text = Span(" " + self._filler(self._rng, num_words), SpanKind.USER)
            body.insert(self._rng.choice((0, len(body))), (text,))
        return self.turn_of(body, num_statements > 0, question)

    def turn_of(self, body: list[tuple[Span, ...]], states: bool, question: Question | None) -> Turn:
        """Closes a turn that consists of `body` and then `question`."""
        self._num_turns += 1
        user = tuple(span for part in body for span in part)
        if question is not None:
            return Turn(user + question.question, question.answer, question)
        reply = " Noted, thank you." if states else " Thanks, I have read it."
        return Turn(user, (Span(reply, SpanKind.ACKNOWLEDGEMENT),), None)

    def demo_turn(
        self,
        num_statements: int,
        num_words: int,
        kinds: tuple[Kind, ...],
        asked: frozenset[str] = frozenset(),
    ) -> Turn | None:
        """A turn with statements, distractor text and a question about an earlier turn.

        The question is of the first of `kinds` that can be asked without wanting a value in `asked`; no
        kinds means no question. None if no question is possible; the writer must then be discarded.
        """
        body: list[tuple[Span, ...]] = [self._state_something() for _ in range(num_statements)]
        text = Span(" " + self._filler(self._rng, num_words), SpanKind.USER)
        body.insert(self._rng.choice((0, len(body))), (text,))
        if not kinds:
            return self.turn_of(body, num_statements > 0, None)
        for kind in kinds:
            question = self.question(kind, self._num_turns)
            if question is not None and question.values[-1] not in asked:
                return self.turn_of(body, num_statements > 0, question)
        return None

    def question_now(self, kind: Kind) -> Question | None:
        """A question of `kind` about any turn so far, without adding a turn; None if there is none."""
        return self.question(kind, self._num_turns)


def message_text(spans: tuple[Span, ...]) -> str:
    """The text of a message as an OpenAI client would send it."""
    return "".join(span.text for span in spans).strip()
