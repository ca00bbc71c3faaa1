"""The dialogue generator: its answers against what the text says, and its splits and determinism."""

import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from reference_model.dialogues import DialogueWriter, Style, Turn, draw_style, message_text
from reference_model.facts import KINDS, Kind, SpanKind
from reference_model.lexicon import Split, lexicon, open_lexicon, words_of_pieces

STYLE = Style(max_filler_words=20, demo=False, ask_weight=6, links=True, teams=True, corrections=0.3)


def write(seed: int, num_turns: int = 25, style: Style = STYLE) -> list[Turn]:
    """One dialogue of the training split."""
    writer = DialogueWriter(style, "train", random.Random(seed))
    return [writer.next_turn() for _ in range(num_turns)]


def asked(kind: Kind, num_dialogues: int = 40) -> list[tuple[list[str], Turn]]:
    """Questions of `kind`, each with the user texts up to and including the question's own turn."""
    found: list[tuple[list[str], Turn]] = []
    for seed in range(num_dialogues):
        texts: list[str] = []
        for turn in write(seed):
            texts.append(message_text(turn.user))
            if turn.question is not None and turn.question.kind == kind:
                found.append((list(texts), turn))
    return found


def values_of(subject: str, attribute: str, text: str) -> list[str]:
    """All values that `text` gives to an attribute, oldest first, read without the generator's templates."""
    name = re.escape(subject)
    patterns = (
        rf"{name}'s {attribute} is(?: now)? (?:the )?([\w ]+)",
        rf"{attribute} of {name}(?: has changed, it)? is(?: now)? (?:the )?([\w ]+)",
        rf"As for {name}, the {attribute} is (?:the )?([\w ]+)",
    )
    hits = [hit for pattern in patterns for hit in re.finditer(pattern, text, re.IGNORECASE)]
    return [hit[1] for hit in sorted(hits, key=lambda hit: hit.start())]


def subject_and_attribute(question: str) -> tuple[str, str] | None:
    """Who and what a question of one hop asks about."""
    for pattern in (
        r"(?:What is|remember) (?P<s>[\w ]+)'s (?P<a>[\w ]+)\?",
        r"(?:me|repeat|please:) the (?P<a>(?:place of origin|[\w ]+?)) of (?P<s>[\w ]+)[?.]",
        r"Which (?P<a>[\w ]+) did I give for (?P<s>[\w ]+)\?",
    ):
        hit = re.search(pattern, question)
        if hit:
            return hit["s"], hit["a"]
    return None


@pytest.mark.parametrize("kind", ["single", "overwritten"])
def test_answer_is_the_newest_value_in_the_text(kind: Kind) -> None:
    """An independent reading of the dialogue gives the value that the generator expects."""
    questions = asked(kind)
    assert len(questions) > 40
    for texts, turn in questions:
        assert turn.question is not None
        target = subject_and_attribute(message_text(turn.question.question))
        assert target is not None, message_text(turn.question.question)
        values = values_of(*target, "\n".join(texts))
        assert values, (target, texts)
        assert values[-1] == turn.question.values[0]
        if kind == "single":
            assert len(values) == 1
        else:
            assert len(values) >= 2


def test_two_hop_needs_both_facts_and_has_rivals() -> None:
    questions = asked("two_hop")
    assert len(questions) > 20
    for texts, turn in questions:
        text = "\n".join(texts)
        assert turn.question is not None
        thing, value = turn.question.values
        hit = re.search(
            r"the ([\w ]+) of the thing that (\w+) (looks after|has borrowed|is repairing)",
            message_text(turn.question.question),
        )
        assert hit is not None
        attribute, person, verb = hit.groups()
        links = dict(re.findall(rf"(\w+) {verb} (the \w+ \w+)\.", text))
        assert links[person] == thing
        assert values_of(thing, attribute, text)[-1] == value
        rivals = [other for name, other in links.items() if name != person]
        assert sum(bool(values_of(rival, attribute, text)) for rival in rivals) >= 2


def test_counting_counts_the_people_named_so_far() -> None:
    questions = asked("counting")
    assert len(questions) > 20
    for texts, turn in questions:
        assert turn.question is not None
        hit = re.search(r"joined the (\w+) team\?", message_text(turn.question.question))
        assert hit is not None
        people = re.findall(rf"(\w+) joined the {hit[1]} team\.", "\n".join(texts))
        assert len(people) == len(set(people)) == int(turn.question.values[0])


def test_single_questions_are_the_most_frequent_kind() -> None:
    kinds = Counter(turn.question.kind for seed in range(60) for turn in write(seed) if turn.question)
    assert set(kinds) == set(KINDS)
    assert kinds["single"] > kinds.total() / 2


def test_same_seed_same_dialogue() -> None:
    assert write(7) == write(7)
    assert write(7) != write(8)


def test_demo_questions_ask_about_earlier_turns_only() -> None:
    style = Style(max_filler_words=20, demo=True, ask_weight=0, links=False, teams=False, corrections=0.0)
    for seed in range(20):
        writer = DialogueWriter(style, "held_out", random.Random(seed))
        history = ""
        for index in range(5):
            turn = writer.demo_turn(2, 20, ("single",) if index else ())
            assert turn is not None
            if index:
                assert turn.question is not None
                assert turn.question.values[0] in history
            history += message_text(turn.user) + "\n"


@pytest.mark.parametrize("split", ["train", "train_wide"])
def test_splits_share_no_names_or_values(split: Split) -> None:
    train, held_out = lexicon(split), lexicon("held_out")
    for field in ("people", "cities", "animals", "words", "nouns", "teams"):
        assert len(getattr(held_out, field)) >= 6
        assert not set(getattr(train, field)) & set(getattr(held_out, field)), field


def test_spans_break_where_words_break() -> None:
    """Spans begin with a space or punctuation and never end in a space, so they can be encoded one by one."""
    for seed in range(20):
        for turn in write(seed):
            for span in turn.user + turn.assistant:
                assert re.match(r" \S|[^\w\s]", span.text), span
                assert not span.text.endswith(" "), span
            for message in (turn.user, turn.assistant):
                for first, second in pairwise(message):
                    assert not (first.text[-1].isalnum() and second.text[0].isalnum())


def test_answer_values_are_marked() -> None:
    for seed in range(20):
        for turn in write(seed):
            if turn.question is None:
                continue
            marked = [span.text.strip() for span in turn.assistant if span.kind is SpanKind.ANSWER_VALUE]
            assert tuple(marked) == turn.question.values


def test_longer_dialogues_ramble_longer() -> None:
    words = {
        tokens: max(draw_style(tokens, random.Random(seed)).max_filler_words for seed in range(50))
        for tokens in (128, 2048)
    }
    assert words[2048] > 4 * words[128]


def test_bundled_conversations_expect_values_that_were_stated_earlier() -> None:
    path = Path(__file__).parents[2] / "demo" / "conversations.json"
    conversations = json.loads(path.read_text())
    assert len(conversations) == 24
    assert len({conversation["id"] for conversation in conversations}) == 24
    for conversation in conversations:
        messages = conversation["conversations"]
        assert [message["from"] for message in messages] == ["human", "gpt"] * (len(messages) // 2)
        human = messages[::2]
        assert len(human) in (5, 6)
        assert "expected" not in human[0]
        for index, (question, answer) in enumerate(zip(human[1:], messages[3::2], strict=True), 1):
            assert question["expected"] in answer["value"]
            earlier = " ".join(message["value"] for message in human[:index])
            if question["kind"] != "counting":
                assert question["expected"] in earlier
                assert question["expected"] not in question["value"]


def test_ordinary_words_come_without_the_held_out_ones() -> None:
    words = open_lexicon(("lantern", "stapler", "table", "umbrella"))
    for part in (words.animals, words.words, words.nouns, words.teams):
        assert "table" in part
        assert not {"lantern", "stapler", "umbrella"} & set(part)
    for part in (words.people, words.cities):
        assert "Table" in part
        assert not {"Lantern", "Stapler", "Umbrella"} & set(part)


@pytest.mark.parametrize("split", ["train_open", "train_pieces"])
def test_the_words_of_a_corpus_or_tokenizer_are_no_fixed_split(split: Split) -> None:
    with pytest.raises(ValueError, match="open_lexicon"):
        lexicon(split)


def test_words_of_pieces_begin_with_every_piece() -> None:
    pieces = (" wal", " jo", " P", "let", "ung", "ard")
    words = words_of_pieces(pieces, 300, seed=0)
    assert all(any(word.startswith(start) for word in words) for start in ("wal", "jo", "P"))
    assert all(word.startswith(("wal", "jo", "P")) for word in words)
    assert len(set(words)) == len(words)
    assert "P" not in words, "one letter is no word"
