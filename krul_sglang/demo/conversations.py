"""Loads conversations from ShareGPT or OpenAI style files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from krul_backend.errors import ConfigError

Message = dict[str, str]
"""One message of the OpenAI chat format: ``role`` and ``content``."""

_USER_ROLES = frozenset({"human", "user"})
_ASSISTANT_ROLES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})
_SYSTEM_ROLES = frozenset({"system"})
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
        raise ConversationError(f"{path}: expected a list of entries, got {_describe(document)}")
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
    if not isinstance(entry, dict):
        raise ConversationError(f"{where}: expected an object, got {_describe(entry)}")
    if "conversations" in entry:
        messages, role_key, text_key = entry["conversations"], "from", "value"
    elif "messages" in entry:
        messages, role_key, text_key = entry["messages"], "role", "content"
    else:
        raise ConversationError(f"{where}: expected a key 'conversations' or 'messages', got {sorted(entry)}")
    if not isinstance(messages, list):
        raise ConversationError(f"{where}: expected a list of turns, got {_describe(messages)}")
    system: str | None = None
    turns: list[UserTurn] = []
    for number, message in enumerate(messages):
        role, text = _parse_message(f"{where}, turn {number}", message, role_key, text_key)
        if role in _USER_ROLES:
            turns.append(_parse_user_turn(f"{where}, turn {number}", message, text))
        elif role in _SYSTEM_ROLES:
            if number != 0:
                raise ConversationError(f"{where}, turn {number}: a system turn is expected only as turn 0")
            system = text
        elif role not in _ASSISTANT_ROLES:
            raise ConversationError(
                f"{where}, turn {number}: expected {role_key!r} to be {_ROLES}, got {role!r}"
            )
    conversation_id = entry.get("id", index)
    if not isinstance(conversation_id, str | int):
        raise ConversationError(f"{where}: expected 'id' to be a string, got {_describe(conversation_id)}")
    return Conversation(str(conversation_id), tuple(turns), system)


def _parse_message(where: str, message: Any, role_key: str, text_key: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise ConversationError(f"{where}: expected an object, got {_describe(message)}")
    for key in (role_key, text_key):
        if key not in message:
            raise ConversationError(f"{where}: expected a key {key!r}, got {sorted(message)}")
        if not isinstance(message[key], str):
            raise ConversationError(
                f"{where}: expected {key!r} to be a string, got {_describe(message[key])}"
            )
    return message[role_key], message[text_key]


def _parse_user_turn(where: str, message: dict[str, Any], text: str) -> UserTurn:
    for key in ("expected", "kind"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise ConversationError(f"{where}: expected {key!r} to be a string, got {_describe(value)}")
    expected = message.get("expected")
    if expected == "":
        raise ConversationError(f"{where}: expected a non-empty 'expected': every answer contains ''")
    return UserTurn(text, expected, message.get("kind"))


def _describe(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
