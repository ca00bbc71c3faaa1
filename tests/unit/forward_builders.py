"""Forward batches made by hand, with what captures ask of SGLang's."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Mode:
    """The two questions that a capture asks SGLang's forward mode."""

    name: str

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend_without_speculative(self) -> bool:
        return self.name == "extend"


@dataclass
class Batch:
    forward_mode: Mode
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    rids: list[str] | None
    extend_prefix_lens_cpu: list[int] = field(default_factory=list)
    extend_seq_lens_cpu: list[int] = field(default_factory=list)

    @property
    def req_pool_indices_cpu(self) -> torch.Tensor | None:
        return None if self.forward_mode.is_decode() else self.req_pool_indices

    @property
    def seq_lens_cpu(self) -> torch.Tensor:
        return self.seq_lens


def extend_batch(*chunks: tuple[str, int, int, int]) -> Batch:
    """``(rid, slot, start, end)`` of each request."""
    return Batch(
        Mode("extend"),
        torch.tensor([slot for _, slot, _, _ in chunks]),
        torch.tensor([end for _, _, _, end in chunks]),
        [rid for rid, _, _, _ in chunks],
        [start for _, _, start, _ in chunks],
        [end - start for _, _, start, end in chunks],
    )


def decode_batch(*requests: tuple[str, int, int]) -> Batch:
    """``(rid, slot, position)`` of each request."""
    return Batch(
        Mode("decode"),
        torch.tensor([slot for _, slot, _ in requests]),
        torch.tensor([position + 1 for _, _, position in requests]),
        [rid for rid, _, _ in requests],
    )
