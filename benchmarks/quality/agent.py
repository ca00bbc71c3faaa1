"""The suite `agent`: real sessions of agents, cut into a history and what really followed it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.quality.conversation import BenchmarkError, Message, chat_turns
from benchmarks.quality.teacher_forced import TeacherForced, continued

AGENT_HISTORY_LENGTHS = (768, 2048)
_CONTINUATION_TOKENS = 256
_MAX_TURN_TOKENS = 256


class Part(StrEnum):
    """What a session serves for: about half are learned from, a quarter each choose designs, or are reported.

    Nothing that is reported may have influenced a design: the last part is opened for results alone.
    """

    LEARN = "learn"
    CHOOSE = "choose"
    REPORT = "report"


class Request(msgspec.Struct, frozen=True):
    """A line of a file: ``input`` is the whole prompt so far, ``output`` the answer."""

    timestamp: int
    input: str
    output: str
    session_id: str


@dataclass(frozen=True)
class Text:
    """Tokens of one session, or of several short ones; ``turn_ends`` are where answers really ended."""

    domain: str
    source: str
    ids: tuple[int, ...]
    turn_ends: tuple[int, ...]


def agent_conversations(
    tokenizer: Any,
    data: Path,
    num_items: int,
    lengths: Sequence[int] = AGENT_HISTORY_LENGTHS,
    part: Part = Part.CHOOSE,
) -> Iterator[TeacherForced]:
    """Of one part, at most ``num_items`` per domain and length; windows of one text do not overlap.

    Raises:
        BenchmarkError: no files of sessions in ``data``, a line that is no request, or no text long enough.
    """
    texts = read_texts(tokenizer, data, part, num_tokens=max(lengths) + _CONTINUATION_TOKENS)
    found = False
    for length in lengths:
        for domain in sorted({text.domain for text in texts}):
            windows = [_windows(tokenizer, text, length) for text in texts if text.domain == domain]
            # the first windows of all texts, then the second ones
            in_turn = [each for row in zip_longest(*windows) for each in row if each is not None]
            found = found or bool(in_turn)
            yield from in_turn[:num_items]
    if not found:
        raise BenchmarkError(
            f"{data}: no session of the part {part} is as long as {min(lengths)} tokens and what follows"
        )


def learning_conversations(
    tokenizer: Any, data: Path, domains: Collection[str] | None = None
) -> Iterator[TeacherForced]:
    """All text of the sessions to learn from, each token once, in the longest windows that fit.

    ``domains``: names of folders; None takes all.

    Raises:
        BenchmarkError: as ``agent_conversations`` raises it, and for a domain that is not there.
    """
    texts = read_texts(
        tokenizer, data, Part.LEARN, num_tokens=max(AGENT_HISTORY_LENGTHS) + _CONTINUATION_TOKENS
    )
    unknown = set(domains or ()) - {text.domain for text in texts}
    if unknown:
        raise BenchmarkError(f"{data}: there is nothing to learn from in {', '.join(sorted(unknown))}")
    for text in texts:
        if domains is None or text.domain in domains:
            fitting = [each for each in AGENT_HISTORY_LENGTHS if each + _CONTINUATION_TOKENS <= len(text.ids)]
            if fitting:
                yield from _windows(tokenizer, text, max(fitting))


def part_of(session_id: str) -> Part:
    """The part of a session, which its name decides."""
    digest = hashlib.sha256(session_id.encode()).digest()
    if digest[0] % 2 == 0:
        return Part.LEARN
    return Part.CHOOSE if digest[1] % 2 == 0 else Part.REPORT


def read_texts(tokenizer: Any, data: Path, part: Part, *, num_tokens: int) -> list[Text]:
    """Texts of the sessions of one part.

    Sessions shorter than ``num_tokens`` are joined until they are not. No session is in two texts.
    """
    texts = []
    for domain, sessions in sorted(_read_sessions(data).items()):
        turns: list[tuple[int, ...]] = []
        source = ""
        for session_id in sorted(sessions):
            if part_of(session_id) is not part:
                continue
            source = source or session_id
            for thread in threads(sessions[session_id]):
                turns += chat_turns(tokenizer, thread)
            if sum(map(len, turns)) >= num_tokens:
                texts.append(_text(domain, source, turns))
                turns, source = [], ""
        if turns:
            texts.append(_text(domain, source, turns))
    return texts


def threads(requests: Sequence[Request]) -> list[list[Message]]:
    """The dialogues of a session: a request belongs to the one whose last prompt it extends by most.

    A prompt that repeats the last one is asked again: only its first answer that says something counts.
    """
    made: list[tuple[str, list[Message]]] = []
    for request in sorted(requests, key=lambda each: each.timestamp):
        extended = [place for place, (prompt, _) in enumerate(made) if request.input.startswith(prompt)]
        place = max(extended, key=lambda each: len(made[each][0]), default=len(made))
        prompt, messages = made[place] if extended else ("", [])
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        new = request.input[len(prompt) :].strip()
        if is_answered:
            # some prompts hold the answers before them, and some only what they were told since
            new = new.removeprefix(messages[-1]["content"]).strip()
        if new:
            messages.append({"role": "user", "content": new})
        if request.output.strip() and (new or not is_answered):
            messages.append({"role": "assistant", "content": request.output.strip()})
        made[place : place + 1] = [(request.input, messages)]
    return [messages for _, messages in made if messages]


def _read_sessions(data: Path) -> dict[str, dict[str, list[Request]]]:
    """Requests by domain, which is the name of the file's folder, and session."""
    decoder = msgspec.json.Decoder(Request)
    domains: dict[str, dict[str, list[Request]]] = {}
    for path in sorted(data.rglob("*.jsonl")):
        sessions = domains.setdefault(path.parent.name, {})
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                request = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise BenchmarkError(f"{path.name}, line {number} is no request: {error}") from None
            sessions.setdefault(request.session_id, []).append(request)
    if not domains:
        raise BenchmarkError(f"--data {data} has no *.jsonl file of sessions")
    return domains


def _text(domain: str, source: str, turns: Sequence[tuple[int, ...]]) -> Text:
    ends, num_tokens = [], 0
    for turn in turns:
        num_tokens += len(turn)
        ends.append(num_tokens)
    return Text(domain, source, tuple(token for turn in turns for token in turn), tuple(ends))


def _windows(tokenizer: Any, text: Text, length: int) -> list[TeacherForced]:
    """Windows of ``length`` tokens and the continuation, one after the other. Each begins as a text does."""
    bos = tokenizer.bos_token_id
    made: list[TeacherForced] = []
    start = 0
    while True:
        begin = () if bos is None or text.ids[start : start + 1] == (bos,) else (bos,)
        end = start + length + _CONTINUATION_TOKENS - len(begin)
        if end > len(text.ids):
            return made
        ends = [each - start + len(begin) for each in text.turn_ends if each > start]
        made.append(
            continued(
                (*begin, *text.ids[start:end]),
                group=text.domain,
                history_tokens=length,
                turn_ends=turn_ends(ends, length),
                source=text.source,
            )
        )
        start = end


def turn_ends(real_ends: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """The real ends up to ``num_tokens``, which is the last; what is between two of them and longer than 256
    tokens is cut into equal turns of 128 to 256."""
    ends, start = [], 0
    for end in (*(each for each in real_ends if each < num_tokens), num_tokens):
        num_parts = -(-(end - start) // _MAX_TURN_TOKENS)
        ends += [start + (end - start) * part // num_parts for part in range(1, num_parts + 1)]
        start = end
    return tuple(ends)
