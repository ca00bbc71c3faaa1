"""Loads conversations from ShareGPT or OpenAI style files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson

from krul_backend.errors import ConfigError
from krul_sglang.cli.timed_answer import Message

_USER_ROLES = ("human", "user")
_ASSISTANT_ROLES = ("gpt", "assistant", "chatgpt", "bing", "bard")
_ROLES = "human, user, gpt, assistant or system"


class ConversationError(ConfigError):
    """A conversation file cannot be used; the message names the file, the entry and the turn."""


@dataclass(frozen=True)
class UserTurn:
    """One message of the user. ``expected``: a string that a right answer must contain, None if unknown."""

    text: str
    expected: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Conversation:
    """The user's side of a conversation: the assistant's side comes from the model that is being tried."""

    conversation_id: str
    turns: tuple[UserTurn, ...]
    system: str | None = None

    def messages(self, turn: int, answers: Mapping[int, str]) -> list[Message]:
        """The messages to send for ``turn`` (1-based); ``answers[t]`` answers each turn before it."""
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for number in range(1, turn):
            messages.append({"role": "user", "content": self.turns[number - 1].text})
            messages.append({"role": "assistant", "content": answers[number]})
        messages.append({"role": "user", "content": self.turns[turn - 1].text})
        return messages


@dataclass(frozen=True)
class ConversationFile:
    """A loaded file. Entries without any user turn are left out and counted in ``num_skipped``."""

    path: Path
    conversations: tuple[Conversation, ...]
    num_skipped: int

    def select(self, *, num_conversations: int | None, turns: int | None) -> tuple[Conversation, ...]:
        """The first ``num_conversations`` (or as many as there are), each cut to its first ``turns``."""
        chosen = self.conversations[:num_conversations]
        return tuple(replace(conversation, turns=conversation.turns[:turns]) for conversation in chosen)


def load_conversations(path: Path) -> ConversationFile:
    """Read a JSON list of entries, or one entry per line (JSONL).

    An entry is ``{"conversations": [{"from", "value"}]}`` (ShareGPT) or
    ``{"messages": [{"role", "content"}]}`` (OpenAI), with an optional ``id``. A user turn may also carry
    ``expected`` and ``kind``. The assistant's turns in the file are not used.

    Raises:
        ConversationError: for a file that is missing, not JSON, or has another shape.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ConversationError(f"{path}: no such file; expected a JSON or JSONL file") from None
    except OSError as error:
        raise ConversationError(f"{path}: cannot be read: {error.strerror}") from None
    entries = _parse_entries(path, raw)
    parsed = [_parse_conversation(path, index, entry) for index, entry in enumerate(entries)]
    conversations = tuple(conversation for conversation in parsed if conversation.turns)
    if not conversations:
        raise ConversationError(f"{path}: no entry has a user turn; got {len(entries)} entries")
    seen: set[str] = set()
    for conversation in conversations:
        if conversation.conversation_id in seen:
            raise ConversationError(f"{path}: two entries have the id {conversation.conversation_id!r}")
        seen.add(conversation.conversation_id)
    return ConversationFile(path, conversations, num_skipped=len(parsed) - len(conversations))


def _parse_entries(path: Path, raw: bytes) -> list[Any]:
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if raw.lstrip()[:1] != b"{":
            raise ConversationError(f"{path}: not JSON: {error}") from None
        return _parse_lines(path, raw)
    if isinstance(document, dict) and ("conversations" in document or "messages" in document):
        return [document]
    if not isinstance(document, list):
        raise ConversationError(f"{path}: expected a list of entries, got one value of another kind")
    return document


def _parse_lines(path: Path, raw: bytes) -> list[Any]:
    entries = []
    for number, line in enumerate(raw.splitlines(), start=1):
        if line.strip():
            try:
                entries.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise ConversationError(f"{path}: line {number} is not JSON: {error}") from None
    return entries


def _parse_conversation(path: Path, index: int, entry: Any) -> Conversation:
    where = f"{path}: entry {index}"
    try:
        parsed = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise ConversationError(f"{where}: {error}") from None
    messages = parsed.messages if parsed.conversations is None else parsed.conversations
    if messages is None:
        raise ConversationError(f"{where}: expected a key 'conversations' or 'messages', got {sorted(entry)}")
    for number, message in enumerate(messages):
        if message.role not in (*_USER_ROLES, *_ASSISTANT_ROLES, "system"):
            raise ConversationError(f"{where}, turn {number}: expected {_ROLES}, got {message.role!r}")
        if message.role == "system" and number:
            raise ConversationError(f"{where}, turn {number}: a system turn is expected only as turn 0")
    return Conversation(
        str(index if parsed.id is msgspec.UNSET else parsed.id),
        tuple(
            UserTurn(message.content, message.expected, message.kind)
            for message in messages
            if message.role in _USER_ROLES
        ),
        next((message.content for message in messages if message.role == "system"), None),
    )


class _Message(msgspec.Struct, kw_only=True):
    """A message in OpenAI's style."""

    role: str
    content: str
    expected: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    kind: str | None = None


class _ShareGptMessage(_Message, kw_only=True, rename={"role": "from", "content": "value"}):
    """The same in ShareGPT's."""

    role: str
    content: str


class _Entry(msgspec.Struct):
    id: str | int | msgspec.UnsetType = msgspec.UNSET
    conversations: list[_ShareGptMessage] | None = None
    messages: list[_Message] | None = None
