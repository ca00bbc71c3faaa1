"""The conversations of a run: generated ones, those of a file, or recorded sessions of agents."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path

import orjson

from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from demo.conversations import Conversation, UserTurn, load_conversations
from demo.sizing import CountTokens
from krul_sglang.cli.timed_answer import Message

_WHEN = ("On Monday", "Last week", "In the morning", "After lunch", "Before the storm", "One evening")
_WHO = ("the teacher", "our neighbour", "a young farmer", "the engineer", "my sister", "an old sailor")
_DID = ("carried", "repaired", "painted", "forgot", "sold", "measured", "found", "borrowed", "described")
_WHICH = ("a heavy", "the green", "a broken", "the wooden", "an expensive", "the smallest", "a useful")
_WHAT = ("basket", "ladder", "window", "engine", "letter", "clock", "table", "bicycle", "map", "lamp")
_WHERE = ("near the harbour", "behind the school", "at the station", "in the garden", "on the bridge")
_QUESTIONS = (
    "What happened {when}, and who was part of it?",
    "Which things were {did}, and where?",
    "Tell me more about {who}. What else did they do?",
    "Write one sentence about the {what} and where it was.",
)


@dataclass(frozen=True)
class RecordedConversation(Conversation):
    """A session that was recorded: the text of each turn is its whole prompt, earlier answers included."""

    def messages(self, turn: int, answers: Mapping[int, str]) -> list[Message]:
        return [{"role": "user", "content": self.turns[turn - 1].text}]


def choose_conversations(configuration: Configuration, count_tokens: CountTokens) -> tuple[Conversation, ...]:
    """As many conversations as there are users, of up to as many turns as there are rounds.

    Raises:
        ConversationError: the file cannot be read.
        ServingBenchmarkError: there are too few conversations in which a turn returns.
    """
    users, rounds = configuration.users, configuration.rounds
    found: Iterator[Conversation]
    if configuration.data is not None and configuration.turn_tokens is not None:
        texts = mixed_texts(configuration.data, configuration.seed)
        return cut_conversations(texts, configuration, count_tokens)
    if configuration.data is not None:
        limit = configuration.longest_history_tokens
        found = recorded_conversations(
            configuration.data, rounds, lambda text: count_tokens(_as_prompt(text)) <= limit
        )
        which = f"{configuration.data}: sessions with prompts of up to {limit} tokens that extend each other"
    elif configuration.conversations is not None:
        loaded = load_conversations(configuration.conversations)
        cut = loaded.select(num_conversations=None, turns=rounds)
        found = (conversation for conversation in cut if len(conversation.turns) > 1)
        which = f"{configuration.conversations}: conversations of two turns and more"
    else:
        return tuple(generated_conversation(number, configuration, count_tokens) for number in range(users))
    chosen = tuple(conversation for conversation, _ in zip(found, range(users), strict=False))
    if len(chosen) < users:
        raise ServingBenchmarkError(
            f"{which}: {len(chosen)} found where --users is {users}; give fewer --users, more data or a "
            "larger --history"
        )
    return chosen


def generated_conversation(
    number: int, configuration: Configuration, count_tokens: CountTokens
) -> Conversation:
    """A first turn of ordinary sentences, about as long as asked for, then questions or more of them."""
    wanted = configuration.history_tokens[number % len(configuration.history_tokens)]
    words = random.Random(f"{configuration.seed} {number}")
    texts = [_notes(words, wanted, count_tokens)]
    for _ in range(configuration.rounds - 1):
        later = configuration.turn_tokens
        texts.append(_question(words) if later is None else _notes(words, later, count_tokens))
    return Conversation(f"generated-{number}", tuple(map(UserTurn, texts)))


def _notes(words: random.Random, wanted: int, count_tokens: CountTokens) -> str:
    """Sentences and a question: a prompt of about ``wanted`` tokens, were it the only message."""
    sentences: list[str] = []
    while True:
        text = f"These are my notes.\n{' '.join(sentences)}\n{_question(words)}"
        missing = wanted - count_tokens(_as_prompt(text))
        if missing <= 0:
            return text
        # A sentence has at most about 20 tokens: the end is not passed by more than one of them.
        sentences += [_sentence(words) for _ in range(max(1, missing // 20))]


def recorded_conversations(
    folder: Path, max_turns: int, fits: Callable[[str], bool]
) -> Iterator[RecordedConversation]:
    """Of each session in ``folder`` the longest run of prompts that fit and extend each other.

    Of a longer run the last ``max_turns`` are taken, which have the longest history.

    Raises:
        ServingBenchmarkError: as ``recorded_prompts``.
    """
    for session, prompts in recorded_prompts(folder):
        turns = longest_run([text for text in prompts if fits(text)])[-max_turns:]
        if len(turns) > 1:
            yield RecordedConversation(session, tuple(map(UserTurn, turns)))


def recorded_prompts(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each session in the folder's JSONL files, and its prompts that are not empty, in the order of time.

    Raises:
        ServingBenchmarkError: there is no session, or a line is not one of its turns.
    """
    for _, session, turns in _recorded_turns(folder):
        yield session, [prompt for prompt, _ in turns if prompt]


def mixed_texts(folder: Path, seed: int) -> list[tuple[str, str]]:
    """Each session with all that was said in it, one of each folder of files and then the next of each, in an
    order drawn at random.

    Raises:
        ServingBenchmarkError: as ``recorded_prompts``.
    """
    by_folder: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for path, session, turns in _recorded_turns(folder):
        prompt, answer = max(turns, key=lambda turn: len(turn[0]))
        by_folder[path.parent].append((session, prompt + answer))
    for texts in by_folder.values():
        random.Random(seed).shuffle(texts)
    return [text for of_each in zip_longest(*by_folder.values()) for text in of_each if text is not None]


def _recorded_turns(folder: Path) -> Iterator[tuple[Path, str, list[tuple[str, str]]]]:
    """Each session in the folder's JSONL files: its file, prompts and answers in the order of time.

    A line is an object with ``session_id``, ``timestamp``, ``input``, the whole prompt of a turn, and
    perhaps ``output``.
    """
    paths = sorted(folder.rglob("*.jsonl"))
    if not paths:
        raise ServingBenchmarkError(f"{folder}: no such folder, or no session (*.jsonl) in it")
    for path in paths:
        found: dict[str, list[tuple[float, str, str]]] = defaultdict(list)
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                turn = orjson.loads(line)
                found[str(turn["session_id"])].append(
                    (float(turn["timestamp"]), str(turn["input"]), str(turn.get("output") or ""))
                )
            except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as error:
                raise ServingBenchmarkError(
                    f"{path}: line {number} has no session_id, timestamp and input: {error}"
                ) from None
        for session, of_session in found.items():
            yield path, session, [(prompt, answer) for _, prompt, answer in sorted(of_session)]


def cut_conversations(
    texts: Iterable[tuple[str, str]], configuration: Configuration, count_tokens: CountTokens
) -> tuple[Conversation, ...]:
    """Conversations whose messages are pieces of ``texts``, names and what they name, one after the other.

    With the answer to the message before it, a later message adds about ``turn_tokens``. A text has first
    messages of that length which was used least lately, and which it is long enough for. Pieces come from the
    ends of the texts, since many begin alike; a text is used again, farther from its end, when all were used.

    Raises:
        ServingBenchmarkError: the texts are too short for so many users.
    """
    assert configuration.turn_tokens is not None
    later = [configuration.turn_tokens - configuration.max_tokens] * (configuration.rounds - 1)
    lengths = [*configuration.history_tokens]
    found: dict[int, list[Conversation]] = defaultdict(list)
    for name, text in texts:
        for first in lengths:
            pieces = [*_pieces(text, [first, *later], count_tokens)]
            if pieces:
                # The others come first now.
                lengths.remove(first)
                lengths.append(first)
                break
        for place, turns in enumerate(pieces):
            found[place].append(Conversation(f"{name}-{place}", turns))
    chosen = [each for _, of_place in sorted(found.items()) for each in of_place][: configuration.users]
    if len(chosen) < configuration.users:
        raise ServingBenchmarkError(
            f"the texts are enough for {len(chosen)} conversations of "
            f"{sum(later) + configuration.longest_history_tokens} tokens where {configuration.users} users "
            "are asked for; give more --data, fewer --users or turns"
        )
    return tuple(chosen)


def _pieces(text: str, wanted: Sequence[int], count_tokens: CountTokens) -> Iterator[tuple[UserTurn, ...]]:
    """Messages of about so many tokens each, as often as the text has so many, from its end on."""
    while text:
        length = len(text)
        for _ in range(2):
            # What is cut has a mean length of a token that is not that of the whole text.
            length = math.ceil(sum(wanted) * length / count_tokens(_as_prompt(text[-length:])))
        if length > len(text):
            return
        ends = [length * tokens // sum(wanted) for tokens in accumulate(wanted, initial=0)]
        piece = text[-length:]
        yield tuple(UserTurn(piece[start:end]) for start, end in pairwise(ends))
        text = text[:-length]


def longest_run(prompts: list[str]) -> list[str]:
    """The most prompts of the list, in its order, of which each extends the one before."""
    runs: list[list[str]] = []
    for prompt in prompts:
        before = [run for run in runs if prompt.startswith(run[-1]) and prompt != run[-1]]
        runs.append([*max(before, key=len, default=[]), prompt])
    return max(runs, key=len, default=[])


def _as_prompt(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _sentence(words: random.Random) -> str:
    parts = (words.choice(options) for options in (_WHEN, _WHO, _DID, _WHICH, _WHAT, _WHERE))
    return "{} {} {} {} {} {}.".format(*parts)


def _question(words: random.Random) -> str:
    options = {"when": _WHEN, "who": _WHO, "did": _DID, "what": _WHAT}
    chosen = {name: words.choice(values) for name, values in options.items()}
    return words.choice(_QUESTIONS).format(**{**chosen, "when": chosen["when"].lower()})
