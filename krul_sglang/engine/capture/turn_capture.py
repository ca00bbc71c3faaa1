"""The base of captures, which record the attention of running requests, and of recorded turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from krul_backend.attention.rows import QueryRows, ReadKeys
from krul_backend.attention.statistics import AttentionStatistics


class CapturedTurn(ABC):
    """The recording of one request, until it is released. Used by one thread."""

    @abstractmethod
    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        """This rank's heads over the turn's rows, None without rows. Call it at most once.

        The turn is stored up to ``num_tokens``; ``read_keys`` reads the keys of these tokens. Later rows, of
        an incomplete page, may be left out.
        """

    def rows(self, num_tokens: int) -> QueryRows | None:
        """Some rows among the first ``num_tokens`` tokens; None if none were kept."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Make room for another request. Nothing else may be called afterwards."""


class TurnCapture(ABC):
    """Records attention of the requests that one model runner serves, through hooks on its attention modules.

    The number of requests at a time is bounded; a request that finds no room is not recorded.

    In each forward ``begin_forward`` comes first, on the host. Then the modules run, in Python or as a
    replayed graph: in Python ``record`` is called in layer order, and ``end_layers`` when the last layer has
    written its keys; a replay repeats the device operations that ``record`` gave while the graph was
    captured. ``end_forward`` comes last, on the host. While suspended, modules are not recorded.
    """

    is_suspended = False

    def install(self, attention_modules: list[Any]) -> None:
        """Hook the attention modules, one per layer and in layer order."""
        for layer, module in enumerate(attention_modules):
            module.register_forward_pre_hook(self._make_hook(layer))
        attention_modules[-1].register_forward_hook(self._after_last_layer)

    @contextmanager
    def recording(self, schedule_batch: Any) -> Iterator[None]:
        """A block inside which the forward of SGLang's ``ScheduleBatch`` runs, eagerly or as a graph.

        It is entered for every forward, also for those of which nothing is recorded.
        """
        self.begin_forward(schedule_batch)
        try:
            yield
        finally:
            self.end_forward()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A block inside which forwards are not recorded, because they compute recorded tokens again."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """The number of heads of the statistics: this rank's query heads."""

    @abstractmethod
    def take(self, rid: str, slot: int) -> CapturedTurn | None:
        """The recording of a request that has ended in row ``slot`` of SGLang's request pool.

        None if it was not recorded. The caller releases it.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """The estimator's ``name`` and its counters, as plain values."""

    @abstractmethod
    def close(self) -> None:
        """End the threads and processes of the capture. No forward may run afterwards."""

    @abstractmethod
    def begin_forward(self, schedule_batch: Any) -> None:
        """Decide what of this forward is recorded. ``schedule_batch`` is SGLang's ``ScheduleBatch``."""

    @abstractmethod
    def record(self, layer: int, q: torch.Tensor) -> None:
        """``q``: ``[num_tokens, num_query_heads * head_dim]``, after RoPE. It belongs to the engine."""

    def end_layers(self) -> None:  # noqa: B027 - not every capture has work there
        """Called when the keys of this forward's tokens are in the pool, in all layers."""

    @abstractmethod
    def end_forward(self) -> None:
        """Called when the forward is queued on the device, or has failed. Recording pauses until the next."""

    def _make_hook(self, layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            if not self.is_suspended:
                self.record(layer, args[0])

        return hook

    def _after_last_layer(self, module: Any, args: Any, output: Any) -> None:
        if not self.is_suspended:
            self.end_layers()
