"""Captures that see every attention layer of every forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from krul_sglang.engine.turn_capture import TurnCapture


@dataclass(frozen=True)
class QueryShape:
    """Attention of one rank: ``num_query_heads`` is a multiple of ``num_kv_heads``; ``scaling`` of scores."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scaling: float

    @property
    def row_bytes(self) -> int:
        """Bytes of one kept row: one head of each KV group, all layers, and how far it sees."""
        return self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize + 8

    def one_head_per_group(self, q: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, num_query_heads * head_dim]`` -> a view ``[num_tokens, num_kv_heads, head_dim]``."""
        group = self.num_query_heads // self.num_kv_heads
        return q.view(-1, self.num_query_heads, self.head_dim)[:, ::group]


class AttentionObserver(TurnCapture):
    """Hooks on the attention modules of one model runner.

    In each forward ``begin_step`` comes first, then ``record`` in layer order, then ``end_step`` when the
    last layer has written its keys. While suspended only ``begin_step`` is told so, by ``is_suspended``.
    """

    is_suspended = False

    def install(self, attention_modules: list[Any]) -> None:
        """Hook the attention modules, one per layer and in layer order."""
        for layer, module in enumerate(attention_modules):
            module.register_forward_pre_hook(_make_hook(self, layer))
        attention_modules[-1].register_forward_hook(lambda module, args, output: self.end_step())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    @abstractmethod
    def begin_step(self, forward_batch: Any) -> None:
        """Decide what of this forward is recorded. ``forward_batch`` is SGLang's ``ForwardBatch``."""

    @abstractmethod
    def record(self, layer: int, q: torch.Tensor) -> None:
        """``q``: ``[num_tokens, num_query_heads * head_dim]``, after RoPE. It belongs to the engine."""

    def end_step(self) -> None:
        """The keys of this forward's tokens are in the pool, in all layers."""


def _make_hook(observer: AttentionObserver, layer: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...]) -> None:
        if layer == 0:
            observer.begin_step(args[3])
        observer.record(layer, args[0])

    return hook
