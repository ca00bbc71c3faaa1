"""Messages as a model's chat template writes them, cut where turns end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.quality.conversation import BenchmarkError

Message = dict[str, str]
"""``role``, which is ``user`` or ``assistant``, and ``content``."""


def chat_turns(tokenizer: Any, messages: Sequence[Message]) -> list[tuple[int, ...]]:
    """The tokens of each turn: it ends with an answer, the last one perhaps without.

    Raises:
        BenchmarkError: no chat template, or one that writes a message in another way when others follow it.
    """
    if tokenizer.chat_template is None:
        raise BenchmarkError("this suite needs a model whose tokenizer has a chat template")
    ends = [place for place, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    if not ends or ends[-1] < len(messages):
        ends.append(len(messages))
    before, turns = "", []
    for end in ends:
        text = tokenizer.apply_chat_template(list(messages[:end]), tokenize=False)
        if not text.startswith(before):
            raise BenchmarkError("the chat template changes what it wrote before when a message is added")
        turns.append(tuple(tokenizer.encode(text[len(before) :], add_special_tokens=False)))
        before = text
    return turns
