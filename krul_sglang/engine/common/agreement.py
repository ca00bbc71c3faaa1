"""Lets tensor-parallel ranks combine what each of them measured on its own heads into one result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class RankAgreement:
    """Exchanges values between the same threads of all ranks: those that store turns, or those that restore.

    Each kind of thread has a process group of its own, because they exchange at the same time. All ranks must
    make the same calls in the same order. ``group`` is None for a single rank. ``rank`` is this one.
    """

    def __init__(self, group: Any | None, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.rank = 0 if group is None else dist.get_rank(group)
        self._group = group

    @classmethod
    def create(cls, num_ranks: int) -> RankAgreement:
        """Make a process group of each ``num_ranks`` ranks that follow one another: this rank's is returned.

        All ranks of the server call it at the same point of their start.
        """
        return cls(dist.new_subgroups(num_ranks, backend="gloo")[0] if num_ranks > 1 else None, num_ranks)

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor] | None:
        """Every rank's ``values`` (float64 of ``shape``, on the CPU) by rank; None if one passed None."""
        if self._group is None:
            return None if values is None else [values]
        # One tensor: a flag that there are values, then the values.
        size = 1 + int(torch.Size(shape).numel())
        mine = torch.zeros(size, dtype=torch.float64)
        if values is not None:
            mine[0] = 1.0
            mine[1:] = values.flatten()
        gathered = [torch.zeros_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(gathered, mine, group=self._group)
        if not all(of_rank[0] for of_rank in gathered):
            return None
        return [of_rank[1:].view(*shape) for of_rank in gathered]

    def holds_on_all(self, flag: bool) -> bool:
        """Whether a flag is set on every rank."""
        return self.gather(torch.empty(0) if flag else None, (0,)) is not None

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self._group is None:
            return [content]
        mine = torch.tensor([len(content)])
        sizes = [torch.zeros_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, mine, group=self._group)
        longest = max(1, *(int(size.item()) for size in sizes))
        padded = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.num_ranks)]
        dist.all_gather(gathered, padded, group=self._group)
        return [
            of_rank.numpy().tobytes()[: int(size.item())]
            for of_rank, size in zip(gathered, sizes, strict=True)
        ]

    def broadcast(self, content: bytes) -> bytes:
        """The first rank's bytes, on every rank."""
        return self.gather_bytes(content)[0]
