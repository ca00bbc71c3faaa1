"""Computes how large the demo's device pools must be, from the tokens of its conversations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo.conversations import Conversation
from krul_backend.errors import ConfigError
from krul_sglang.cli.timed_answer import Message

CountTokens = Callable[[list[Message]], int]
"""Number of prompt tokens of a list of messages, chat template included."""

EncodeMessages = Callable[[list[Message]], list[int]]
"""The prompt's token ids themselves."""

POOL_SLACK = 1.25
"""The default device pool holds this many times the longest conversation."""

_MARGIN_PAGES = 4
_MIN_MARGIN_TOKENS = 64


class SizingError(ConfigError):
    """A device pool or a context does not fit the conversations; the message says what is needed."""


@dataclass(frozen=True)
class PoolSizes:
    """The tokens of the small device pool (``device_tokens``) and of the one that holds everything.

    ``longest_tokens`` and ``total_tokens`` are upper bounds, with every answer at its full length.
    """

    device_tokens: int
    reference_tokens: int
    longest_tokens: int
    total_tokens: int


def plan_pools(
    conversations: Sequence[Conversation],
    count_tokens: CountTokens,
    *,
    max_tokens: int,
    page_size: int,
    device_tokens: int | None,
    context_length: int | None,
) -> PoolSizes:
    """Choose the pools for ``conversations`` with answers of at most ``max_tokens``.

    Args:
        device_tokens: the small pool; None takes ``POOL_SLACK`` times the longest conversation.
        context_length: the model's; None if unknown.

    Raises:
        SizingError: a conversation does not fit the context or the pool, or all of them fit the pool
            together, so that nothing would ever leave it.
    """
    lengths = [conversation_tokens(c, count_tokens, max_tokens=max_tokens) for c in conversations]
    longest_tokens, total_tokens = max(lengths), sum(lengths)
    name = conversations[lengths.index(longest_tokens)].conversation_id
    if context_length is not None and longest_tokens > context_length:
        raise SizingError(
            f"conversation {name!r} needs up to {longest_tokens} tokens, but the model's context is "
            f"{context_length}; use fewer --turns or a smaller --max-tokens"
        )
    needed = needed_pool_tokens(longest_tokens, page_size=page_size)
    if device_tokens is None:
        device_tokens = needed_pool_tokens(math.ceil(POOL_SLACK * longest_tokens), page_size=page_size)
    elif device_tokens < needed:
        raise SizingError(
            f"--device-tokens {device_tokens} is too small: the longest conversation ({name!r}) takes up to "
            f"{longest_tokens} tokens, so at least {needed} are needed"
        )
    if total_tokens <= device_tokens:
        raise SizingError(
            f"all conversations together take at most {total_tokens} tokens and fit into the device pool of "
            f"{device_tokens}: nothing would leave it; use more conversations, more turns or a smaller "
            f"--device-tokens (at least {needed})"
        )
    with_page_ends = total_tokens + page_size * len(lengths)
    reference_tokens = needed_pool_tokens(math.ceil(POOL_SLACK * with_page_ends), page_size=page_size)
    return PoolSizes(device_tokens, reference_tokens, longest_tokens, total_tokens)


def needed_pool_tokens(num_tokens: int, *, page_size: int) -> int:
    """The smallest pool in which one request of ``num_tokens`` is admitted: whole pages and a margin."""
    margin = max(_MARGIN_PAGES * page_size, _MIN_MARGIN_TOKENS)
    return math.ceil((num_tokens + margin) / page_size) * page_size


def conversation_tokens(conversation: Conversation, count_tokens: CountTokens, *, max_tokens: int) -> int:
    """Upper bound of the tokens of a whole conversation, its last answer included."""
    num_turns = len(conversation.turns)
    no_answers = dict.fromkeys(range(1, num_turns), "")
    return count_tokens(conversation.messages(num_turns, no_answers)) + num_turns * max_tokens


def load_token_encoder(model_path: str) -> tuple[EncodeMessages, int | None]:
    """The model's own tokenizer and chat template, and the model's context length if it has one.

    Raises:
        SizingError: no tokenizer or no chat template can be loaded.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
        config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        raise SizingError(f"cannot load the tokenizer of {model_path}: {first_line(error)}") from error
    if not tokenizer.chat_template:
        raise SizingError(f"the tokenizer of {model_path} has no chat template; use a chat model")

    def encode(messages: list[Message]) -> list[int]:
        prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])

    return encode, getattr(config, "max_position_embeddings", None)


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
