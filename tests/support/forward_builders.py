"""Batches made by hand, with what captures ask of SGLang's ``ScheduleBatch``; graphs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from krul_backend.device import Device


@dataclass
class Mode:
    """The questions that are asked of SGLang's forward mode."""

    name: str

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name in ("extend", "mixed", "verify")

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_idle(self) -> bool:
        return self.name == "idle"

    def is_extend_without_speculative(self) -> bool:
        return self.is_extend() and not self.is_target_verify()


@dataclass
class Request:
    rid: str


@dataclass
class Batch:
    forward_mode: Mode
    reqs: list[Request]
    req_pool_indices_cpu: torch.Tensor
    seq_lens_cpu: torch.Tensor
    prefix_lens: list[int] = field(default_factory=list)
    extend_lens: list[int] = field(default_factory=list)
    decoding_reqs: list[Request] | None = None
    hicache_consumer_index: int = -1
    out_cache_loc: torch.Tensor | None = None


def extend_batch(*chunks: tuple[str, int, int, int]) -> Batch:
    """``(rid, slot, start, end)`` of each request."""
    return Batch(
        Mode("extend"),
        [Request(rid) for rid, _, _, _ in chunks],
        torch.tensor([slot for _, slot, _, _ in chunks]),
        torch.tensor([end for _, _, _, end in chunks]),
        [start for _, _, start, _ in chunks],
        [end - start for _, _, start, end in chunks],
    )


def decode_batch(*requests: tuple[str, int, int]) -> Batch:
    """``(rid, slot, position)`` of each request."""
    return Batch(
        Mode("decode"),
        [Request(rid) for rid, _, _ in requests],
        torch.tensor([slot for _, slot, _ in requests]),
        torch.tensor([position + 1 for _, _, position in requests]),
    )


def mixed_batch(chunks: Sequence[tuple[str, int, int, int]], *decoding: tuple[str, int, int]) -> Batch:
    """Prompt chunks first, then one token of each decoding request, as SGLang mixes them."""
    batch = extend_batch(*chunks, *((rid, slot, position, position + 1) for rid, slot, position in decoding))
    batch.forward_mode = Mode("mixed")
    batch.decoding_reqs = batch.reqs[len(chunks) :]
    return batch


class Graph(TorchDispatchMode):
    """Remembers the operations that are given inside, and gives them again with the very same tensors.

    Like a CUDA graph: operations that make a tensor write to the memory that they wrote to before. Nothing
    of Python runs again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            if (
                again is not result
                and isinstance(result, torch.Tensor)
                and again.data_ptr() != result.data_ptr()
            ):
                result.copy_(again)


@contextmanager
def capturing(monkeypatch: pytest.MonkeyPatch, graph: Graph) -> Iterator[None]:
    """Devices say that they are being captured, and what they are given goes into ``graph``."""
    with monkeypatch.context() as patch, graph:
        patch.setattr(Device, "is_capturing", lambda self: True)
        yield


class GraphRunner:
    """Runs forwards as SGLang's graph runners do: captured once for some sizes, replayed for smaller ones.

    ``modules`` are hooked attention modules; ``num_values`` what a token's query has.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        modules: Sequence[Callable[..., Any]],
        num_values: int,
        sizes: Sequence[int],
    ) -> None:
        self._queries = {size: torch.zeros(len(modules), size, num_values) for size in sizes}
        self._graphs = {size: Graph() for size in sizes}
        for size, graph in self._graphs.items():
            with capturing(monkeypatch, graph):
                for layer, module in enumerate(modules):
                    module(self._queries[size][layer], None, None, None)

    def run(self, queries: torch.Tensor) -> None:
        """``[L, T, values]`` of a forward of ``T`` tokens; the rest of the graph's rows is padding."""
        num_tokens = queries.shape[1]
        size = min(size for size in self._graphs if size >= num_tokens)
        self._queries[size].fill_(-1.0)
        self._queries[size][:, :num_tokens] = queries
        self._graphs[size].replay()
