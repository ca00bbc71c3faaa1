"""What the benchmark needs of a suite's conversation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.model import HistoryModel, VisibleTokens
from krul_backend.codec.layout import LayerKV
from krul_backend.errors import KrulError


class BenchmarkError(KrulError):
    """Options or data that measure nothing."""


Samples = dict[str, Tensor]
"""By name of the measure: fp64 values of one conversation, ``[n]``, one per token or per question asked.

Every suite has, for each scored token, ``kl``: the divergence of the next-token distribution from that on
uncompressed KV, in nats; and ``top1``: whether the most likely token is the same. Truth values are 0 or 1."""


@dataclass(frozen=True, eq=False)
class Answer:
    """``logits [N, V]`` fp32 over prompt and reference answer."""

    logits: Tensor


class Conversation(ABC):
    """A history in turns and what is asked after it.

    ``turn_ends`` are the ends of the history's turns, the last one is ``len(history)``. ``group`` and
    ``history_tokens`` (the nominal length) are what results are grouped by. Conversations of one ``source``
    have text in common or are alike otherwise: they count as one draw; empty: this one stands for itself.
    """

    group: str
    source: str
    history_tokens: int
    history: tuple[int, ...]
    turn_ends: tuple[int, ...]

    @abstractmethod
    def answer(
        self, model: HistoryModel, kv: Sequence[LayerKV], visible: VisibleTokens | None = None
    ) -> Answer:
        """Runs what follows the tokens that ``kv`` holds: the rest of the history, then the prompt."""

    @abstractmethod
    def measure(self, answer: Answer, true_answer: Answer) -> Samples:
        """``true_answer`` is that on uncompressed KV."""


def segment_bounds(turn_ends: Sequence[int], page_size: int) -> tuple[tuple[int, int] | None, ...]:
    """What is stored after each turn: a segment whose end is moved down to a whole page, or nothing.

    ```
    # [start_n, end_n)                         segment n; start_n = end_{n-1}; a turn within one page has none
    # [end_last, turn_ends[-1])                stays exact: it is computed again with the next prompt
    ```
    """
    bounds: list[tuple[int, int] | None] = []
    start = 0
    for turn_end in turn_ends:
        end = turn_end - turn_end % page_size
        bounds.append((start, end) if end > start else None)
        start = end
    return tuple(bounds)


def compared(true_logits: Tensor, logits: Tensor) -> Samples:
    """``kl``: KL(true || other) in nats, and ``top1``, of each row; both logits ``[N, V]`` fp32."""
    true = true_logits.double().log_softmax(-1)
    other = logits.double().log_softmax(-1)
    divergence = F.kl_div(other, true, reduction="none", log_target=True).sum(-1)
    # rounding can leave a distribution's divergence from itself just below zero
    return {"kl": divergence.clamp(min=0), "top1": (true.argmax(-1) == other.argmax(-1)).double()}


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
