from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality import __main__ as quality
from benchmarks.quality.agent import (
    Part,
    Request,
    agent_conversations,
    learning_conversations,
    part_of,
    read_texts,
    threads,
    turn_ends,
)
from benchmarks.quality.chat_recall import ChatRecall, chat_recall_conversations
from benchmarks.quality.configuration import Configuration, Suite
from benchmarks.quality.conversation import BenchmarkError, chat_turns
from benchmarks.quality.model import HistoryModel, token_slice
from benchmarks.quality.teacher_forced import learning_documents
from krul_sglang.learning.model_kv import pooled
from reference_model.corpus import Corpus
from tests.support.tiny_model import random_llama


class Words:
    """A tokenizer with one token per word, and a chat template."""

    chat_template = "words"
    bos_token_id = 0

    def __init__(self) -> None:
        self.ids = {"<bos>": 0}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        assert not tokenize
        text = "<bos> " + "".join(f"<{each['role']}> {each['content']} <end> " for each in messages)
        return text + "<assistant> " * add_generation_prompt


def request(at: int, prompt: str, answer: str) -> Request:
    return Request(at, prompt, answer, "session")


def test_a_request_goes_on_with_the_dialogue_that_it_extends_by_least() -> None:
    found = threads(
        [
            request(5, "plan. now act", "done"),
            request(1, "plan", "first"),
            request(2, "other task", "second"),
            request(3, "plan. look", "third"),
            request(4, "plan. look", "asked again"),
        ]
    )
    texts = [[message["content"] for message in messages] for messages in found]
    assert texts == [
        ["plan", "first", ". look", "third"],
        ["other task", "second"],
        ["plan. now act", "done"],
    ]


def test_an_answer_that_the_next_prompt_holds_is_not_told_twice() -> None:
    (messages,) = threads(
        [request(1, "ask", "yes"), request(2, "ask yes more", "no"), request(3, "ask yes more", "")]
    )
    assert [(each["role"], each["content"]) for each in messages] == [
        ("user", "ask"),
        ("assistant", "yes"),
        ("user", "more"),
        ("assistant", "no"),
    ]


@given(st.lists(st.integers(1, 900), max_size=8), st.integers(1, 3000))
def test_turns_end_where_answers_do_and_are_not_long(lengths: list[int], num_tokens: int) -> None:
    real = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    ends = turn_ends(real, num_tokens)
    assert ends[-1] == num_tokens
    assert {end for end in real if end < num_tokens} <= set(ends)
    for start, end in pairwise((0, *ends)):
        assert 0 < end - start <= 256
        assert end - start >= 128 or {start, end} <= {0, num_tokens, *real}


def write_sessions(folder: Path, domain: str, sessions: dict[str, int]) -> None:
    """Sessions that say their own name: so many words in ten requests."""
    (folder / domain).mkdir(parents=True, exist_ok=True)
    for name, num_words in sessions.items():
        words = [f"{name}{number}" for number in range(num_words)]
        lines = [
            {
                "timestamp": step,
                "input": " ".join(words[: num_words * step // 10]),
                "output": f"{name}-answer{step}",
                "session_id": name,
                "more": 1,
            }
            for step in range(1, 11)
        ]
        (folder / domain / f"{name}.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    write_sessions(tmp_path, "long", {f"l{number}x": 2600 for number in range(8)})
    write_sessions(tmp_path, "short", {f"s{number}x": 500 for number in range(24)})
    return tmp_path


def names_in(tokenizer: Words, tokens: tuple[int, ...]) -> set[str]:
    words = {token: word for word, token in tokenizer.ids.items()}
    return {words[token].split("x")[0] + "x" for token in tokens if words[token][0] in "ls"}


def test_nothing_of_a_session_is_both_learned_from_and_scored(sessions: Path) -> None:
    tokenizer = Words()
    learned = list(learning_conversations(tokenizer, sessions))
    sides = {
        Part.LEARN: learned,
        **{
            part: list(agent_conversations(tokenizer, sessions, 9, (768,), part))
            for part in (Part.CHOOSE, Part.REPORT)
        },
    }
    for part, side in sides.items():
        names = {name for each in side for name in names_in(tokenizer, each.history + each.continuation)}
        assert len(names) > 1
        assert {part_of(name) for name in names} == {part}
    assert {each.group for each in learned} == {"long", "short"}
    assert {each.group for each in learning_conversations(tokenizer, sessions, ["short"])} == {"short"}
    with pytest.raises(BenchmarkError, match="nothing to learn from in web"):
        list(learning_conversations(tokenizer, sessions, ["web"]))


def test_about_half_of_all_sessions_are_scored_half_of_them_in_reports() -> None:
    parts = Counter(part_of(f"session {number}") for number in range(1000))
    assert 450 < parts[Part.LEARN] < 550
    assert 200 < parts[Part.REPORT] < 300


def test_windows_have_the_lengths_and_tokens_of_their_sessions(sessions: Path) -> None:
    tokenizer = Words()
    scored = list(agent_conversations(tokenizer, sessions, 4))
    assert {(each.group, each.history_tokens) for each in scored} == {
        (group, length) for group in ("long", "short") for length in (768, 2048)
    }
    for length in (768, 2048):
        of_length = [each for each in scored if each.history_tokens == length]
        assert {(len(each.history), len(each.continuation)) for each in of_length} == {(length, 256)}
        # no two windows have a word of a session in common
        tokens = [token for each in of_length for token in set(each.history + each.continuation)]
        own = {token for word, token in tokenizer.ids.items() if word[0] in "ls" and word[1].isdigit()}
        assert len([token for token in tokens if token in own]) == len({*tokens} & own)
        for domain in ("long", "short"):
            domain_sources = [each.source for each in of_length if each.group == domain]
            texts = read_texts(tokenizer, sessions, Part.CHOOSE, num_tokens=2304)
            num_texts = len(
                [text for text in texts if text.domain == domain and len(text.ids) >= length + 256]
            )
            # every text has its turn before one has a second
            assert len(set(domain_sources[:num_texts])) == min(num_texts, len(domain_sources))
    for each in scored:
        assert each.history[0] == 0
        assert each.turn_ends[-1] == each.history_tokens


def test_files_that_are_no_sessions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"no \*\.jsonl"):
        list(agent_conversations(Words(), tmp_path, 1))
    (tmp_path / "bad.jsonl").write_text('{"input": "x"}')
    with pytest.raises(BenchmarkError, match=r"bad\.jsonl, line 1"):
        list(agent_conversations(Words(), tmp_path, 1))
    write_sessions(tmp_path / "d", "tiny", {"a": 30, "b": 30, "c": 30, "d": 30})
    with pytest.raises(BenchmarkError, match="as long as 768"):
        list(agent_conversations(Words(), tmp_path / "d", 1))


def test_a_template_that_takes_back_what_it_wrote_is_refused() -> None:
    class Forgetful(Words):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            return super().apply_chat_template(messages[-1:], **options)

    messages = [{"role": role, "content": role[0] * 3} for role in ("user", "assistant", "user")]
    assert [len(turn) for turn in chat_turns(Words(), messages)] == [7, 3]
    with pytest.raises(BenchmarkError, match="changes what it wrote"):
        chat_turns(Forgetful(), messages)


@cache
def recall() -> tuple[Words, ChatRecall]:
    tokenizer = Words()
    (conversation,) = chat_recall_conversations(tokenizer, 1)
    return tokenizer, conversation


def test_every_fact_is_told_and_asked_for_once() -> None:
    tokenizer, conversation = recall()
    history = list(conversation.history)
    assert len(conversation.questions) == len({each.prompt for each in conversation.questions}) == 60
    assert conversation.turn_ends[-1] == len(history)
    told_ends = {word.removesuffix("."): token for word, token in tokenizer.ids.items() if word.endswith(".")}
    words = {token: word for word, token in tokenizer.ids.items()}
    last_turn = history[conversation.turn_ends[-2] :]
    last = {
        each.prompt
        for each in conversation.questions
        if sum(last_turn[n : n + len(each.prompt)] == [*each.prompt] for n in range(len(last_turn))) == 2
    }
    assert len(last) == 3
    for question in conversation.questions:
        assert len(set(question.candidates)) == len(question.candidates) >= 8
        assert question.answer[0] in question.candidates
        told = [*question.prompt, told_ends[words[question.answer[0]]]]
        places = [n for n in range(len(history)) if history[n : n + len(told)] == told]
        others = [n for n in range(len(history)) if history[n : n + len(told) - 1] == told[:-1]]
        # by the user, in the reply, and when the user confirms it, which never happens to the last ones
        assert places == others
        assert len(places) == (2 if question.prompt in last else 3)
    assert [words[token] for token in conversation.opening][-2:] == ["<end>", "<assistant>"]


def test_recall_is_that_of_the_model_on_the_stored_history() -> None:
    tokenizer, conversation = recall()
    model = HistoryModel(
        random_llama(
            num_layers=2,
            hidden_size=32,
            num_heads=2,
            head_dim=16,
            vocab_size=len(tokenizer.ids),
            max_positions=4096,
            init_std=0.5,
            seed=1,
        )
    )
    run = model.run(conversation.history, (), num_logits=1)
    kv = token_slice([pooled(layer) for layer in run.kv], 0, len(conversation.history) // 16 * 16)
    answer = conversation.answer(model, kv)
    samples = conversation.measure(answer, answer)
    rest = conversation.history[len(kv[0].k) :] + conversation.opening
    for number in (0, 19, 20, 59):
        question = conversation.questions[number]
        (alone,) = model.logits((*rest, *question.prompt), kv, num_logits=1)
        torch.testing.assert_close(answer.logits[number], alone, rtol=1e-3, atol=1e-3)
        best = max(question.candidates, key=lambda token: float(alone[token]))
        assert samples["recall"][number] == (best == question.answer[0])
        nll = -alone.log_softmax(-1)[question.answer[0]]
        assert float(samples["nll"][number]) == pytest.approx(float(nll), rel=1e-3)
    assert 0 < float(samples["recall"].mean()) < 0.5
    assert float(samples["kl"].max()) == 0


def test_text_to_learn_from_is_of_the_training_split(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [" ".join(f"{number}w{place}" for place in range(1200)) for number in range(12)]
    corpus = Corpus(tuple(documents[:8]), tuple(documents[8:]), (), (), "")
    monkeypatch.setattr("benchmarks.quality.teacher_forced.load_corpus", lambda: corpus)
    tokenizer = Words()
    learned = list(learning_documents(tokenizer, 50))
    assert sorted(len(each.history) for each in learned) == 8 * [512] + 8 * [1024]
    words = {token: word for word, token in tokenizer.ids.items()}
    firsts = {words[each.history[1]] for each in learned}
    assert firsts == {f"{number}w0" for number in range(8)}


def test_questions_may_come_after_another_conversation() -> None:
    _, chat = recall()
    other = chat.then(chat)
    assert other.history == 2 * chat.history
    assert (other.history_tokens, other.turn_ends[-1]) == (2 * chat.history_tokens, 2 * len(chat.history))
    assert sorted({*other.turn_ends}) == [*other.turn_ends]
    assert (other.questions, other.opening) == (chat.questions, chat.opening)


def test_what_is_reported_is_opened_by_committed_designs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for revision, json in (("abc", None), ("abc-dirty", tmp_path / "x.json"), (None, tmp_path / "x.json")):
        monkeypatch.setattr(quality, "git_revision", lambda revision=revision: revision)
        with pytest.raises(BenchmarkError, match="--part report is for final results"):
            quality.check_final(json)
    monkeypatch.setattr(quality, "git_revision", lambda: "abc")
    quality.check_final(tmp_path / "x.json")
    with pytest.raises(BenchmarkError, match="never scored"):
        Configuration(suite=Suite.AGENT, data=tmp_path, part=Part.LEARN)
