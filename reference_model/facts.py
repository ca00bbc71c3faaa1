"""Facts, the ways to state them and the ways to ask for them."""

import random
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from reference_model.lexicon import Lexicon

Kind = Literal["single", "two_hop", "overwritten", "counting"]
KINDS: tuple[Kind, ...] = ("single", "two_hop", "overwritten", "counting")


class SpanKind(Enum):
    """What a piece of a message is; training weighs each kind differently."""

    USER = "user"
    STATED_VALUE = "stated_value"
    ACKNOWLEDGEMENT = "acknowledgement"
    ANSWER = "answer"
    ANSWER_VALUE = "answer_value"


@dataclass(frozen=True)
class Span:
    """A piece of a message. Its text starts with a space or with punctuation, never ends in a space."""

    text: str
    kind: SpanKind


@dataclass(frozen=True)
class Attribute:
    """Something that is known about a subject. `article` precedes the value in every sentence."""

    name: str
    value_type: Literal["number", "creature", "passphrase", "city"]
    article: str = ""


PERSON_ATTRIBUTES = (
    Attribute("badge number", "number"),
    Attribute("locker number", "number"),
    Attribute("phone extension", "number"),
    Attribute("room number", "number"),
    Attribute("mascot", "creature", "the "),
    Attribute("passphrase", "passphrase"),
    Attribute("home town", "city"),
    Attribute("travel destination", "city"),
)
THING_ATTRIBUTES = (
    Attribute("access code", "number"),
    Attribute("serial number", "number"),
    Attribute("shelf number", "number"),
    Attribute("price", "number"),
    Attribute("sticker", "creature", "the "),
    Attribute("password", "passphrase"),
    Attribute("place of origin", "city"),
)

_STATEMENTS = (
    "{S}'s {a} is {v}.",
    "The {a} of {s} is {v}.",
    "Please note that {s}'s {a} is {v}.",
    "For the record, the {a} of {s} is {v}.",
    "Remember this: {s}'s {a} is {v}.",
    "I learned that the {a} of {s} is {v}.",
    "As for {s}, the {a} is {v}.",
)
_CORRECTIONS = (
    "Correction: {s}'s {a} is now {v}.",
    "The {a} of {s} has changed, it is now {v}.",
    "From now on {s}'s {a} is {v}.",
    "I was wrong before: the {a} of {s} is {v}.",
)
# The form of the question fixes the form of the answer, so that exact match is well defined.
_QUESTIONS = (
    ("What is {s}'s {a}?", "{S}'s {a} is {v}."),
    ("Can you tell me the {a} of {s}?", "The {a} of {s} is {v}."),
    ("Do you remember {s}'s {a}?", "Yes, {s}'s {a} is {v}."),
    ("Please repeat the {a} of {s}.", "It is {v}."),
    ("Which {a} did I give for {s}?", "You said {v}."),
    ("Only the value, please: the {a} of {s}.", "{V}"),
)
_LINK_VERBS = ("looks after", "has borrowed", "is repairing")
_LINK_STATEMENTS = ("{p} {r} {t}.", "Remember that {p} {r} {t}.", "As of today {p} {r} {t}.")
_TWO_HOP_QUESTION = "What is the {a} of the thing that {p} {r}?"
_TWO_HOP_ANSWER = ("{p} {r}", "{t}", ", and its {a} is", "{v}", ".")
_JOIN_STATEMENTS = ("{p} joined the {m} team.", "I heard that {p} joined the {m} team.")
_COUNT_QUESTION = "How many people joined the {m} team?"
_COUNT_ANSWER = ("The {m} team was joined by", "{n}", ".")


@dataclass(frozen=True)
class Fact:
    """`attribute` of `subject` has `value`."""

    subject: str
    attribute: Attribute
    value: str


@dataclass(frozen=True)
class Link:
    """A person is connected to a thing by a verb phrase."""

    person: str
    verb: str
    thing: str


@dataclass(frozen=True)
class Question:
    """A question with its reference answer; `values` are the strings a right answer must contain."""

    kind: Kind
    question: tuple[Span, ...]
    answer: tuple[Span, ...]
    values: tuple[str, ...]


def draw_value(attribute: Attribute, words: Lexicon, rng: random.Random) -> str:
    """A random value of the type that `attribute` takes."""
    if attribute.value_type == "number":
        num_digits = rng.randint(3, 6)
        return str(rng.randint(10 ** (num_digits - 1), 10**num_digits - 1))
    if attribute.value_type == "creature":
        return f"{rng.choice(words.colours)} {rng.choice(words.animals)}"
    if attribute.value_type == "passphrase":
        return " ".join(rng.sample(words.words, 3))
    return rng.choice(words.cities)


def draw_link_verb(rng: random.Random) -> str:
    """A verb phrase that connects a person to a thing."""
    return rng.choice(_LINK_VERBS)


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _fill(template: str, fact: Fact, plain: SpanKind, value: SpanKind) -> tuple[Span, ...]:
    """Spans of `template` with the fact filled in; the value is a span of its own."""
    before, _, after = template.replace("{V}", "{v}").partition("{v}")
    fields = {"s": fact.subject, "S": _capitalised(fact.subject), "a": fact.attribute.name}
    head = before.format(**fields) + fact.attribute.article
    # A bare value stands without its article.
    head = "" if template == "{V}" else head.rstrip()
    spans = [Span(" " + head, plain)] if head else []
    spans.append(Span(" " + fact.value, value))
    if after:
        spans.append(Span(after.format(**fields), plain))
    return tuple(spans)


def state(fact: Fact, rng: random.Random) -> tuple[Span, ...]:
    """One of the sentences that state `fact` for the first time."""
    return _fill(rng.choice(_STATEMENTS), fact, SpanKind.USER, SpanKind.STATED_VALUE)


def correct(fact: Fact, rng: random.Random) -> tuple[Span, ...]:
    """One of the sentences that replace an earlier value by that of `fact`."""
    return _fill(rng.choice(_CORRECTIONS), fact, SpanKind.USER, SpanKind.STATED_VALUE)


def ask(fact: Fact, kind: Kind, rng: random.Random) -> Question:
    """One of the questions for the value of `fact`."""
    question, answer = rng.choice(_QUESTIONS)
    text = question.format(s=fact.subject, a=fact.attribute.name)
    spans = _fill(answer, fact, SpanKind.ANSWER, SpanKind.ANSWER_VALUE)
    return Question(kind, (Span(" " + text, SpanKind.USER),), spans, (fact.value,))


def state_link(link: Link, rng: random.Random) -> tuple[Span, ...]:
    """One of the sentences that state `link`."""
    text = rng.choice(_LINK_STATEMENTS).format(p=link.person, r=link.verb, t=link.thing)
    return (Span(" " + text, SpanKind.USER),)


def ask_two_hop(link: Link, fact: Fact) -> Question:
    """The question for the value of `fact`, naming its subject only through `link`.

    The reference answer names the thing first, so both hops are visible and both must be right.
    """
    text = _TWO_HOP_QUESTION.format(a=fact.attribute.name, p=link.person, r=link.verb)
    start, thing, middle, value, end = _TWO_HOP_ANSWER
    middle = (middle.format(a=fact.attribute.name) + " " + fact.attribute.article).rstrip()
    answer = (
        Span(" " + start.format(p=link.person, r=link.verb), SpanKind.ANSWER),
        Span(" " + thing.format(t=link.thing), SpanKind.ANSWER_VALUE),
        Span(middle, SpanKind.ANSWER),
        Span(" " + value.format(v=fact.value), SpanKind.ANSWER_VALUE),
        Span(end, SpanKind.ANSWER),
    )
    question = (Span(" " + text, SpanKind.USER),)
    return Question("two_hop", question, answer, (link.thing, fact.value))


def state_member(person: str, team: str, rng: random.Random) -> tuple[Span, ...]:
    """One of the sentences that say that `person` joined `team`."""
    text = rng.choice(_JOIN_STATEMENTS).format(p=person, m=team)
    return (Span(" " + text, SpanKind.USER),)


def ask_count(team: str, num_members: int) -> Question:
    """The question how many people joined `team`."""
    start, _, end = _COUNT_ANSWER
    answer = (
        Span(" " + start.format(m=team), SpanKind.ANSWER),
        Span(f" {num_members}", SpanKind.ANSWER_VALUE),
        Span(end, SpanKind.ANSWER),
    )
    question = (Span(" " + _COUNT_QUESTION.format(m=team), SpanKind.USER),)
    return Question("counting", question, answer, (str(num_members),))
