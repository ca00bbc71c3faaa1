"""What a restore needs of the engine's model: heads and whole prefixes computed anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class Head:
    """The tokens of one request that are recomputed.

    ::

        [0, start)            in the pool: attended to, not touched
        [start, ends[l])      recomputed in layer l and written to its slots
        [ends[l], ...)        not touched in layer l: loads write there meanwhile

    ``token_ids`` (int64 ``[ends[0] - start]``) are the tokens from ``start`` on, ``slots`` (int64
    ``[ends[0]]``) where the KV of the tokens from 0 on lies, both on the pool's device. ``ends`` never grow.
    """

    token_ids: torch.Tensor
    slots: torch.Tensor
    start: int
    ends: tuple[int, ...]

    def part(self, first: int, end: int) -> Head | None:
        """Tokens ``[first, end)`` of the head, counted from its start; None if it has none of them.

        Parts run one after another: each attends to the parts before it in the pool.
        """
        begin, stop = self.start + first, min(self.start + end, self.ends[0])
        if begin >= stop:
            return None
        ends = tuple(min(max(layer_end, begin), stop) for layer_end in self.ends)
        return Head(self.token_ids[first : stop - self.start], self.slots[:stop], begin, ends)


RunHeads = Callable[[Sequence[Head], Callable[[int], None]], None]
"""Recomputes heads together, through the engine's own layers. On every tensor-parallel rank with the same
lengths. The second argument is called with ``l`` before layer ``l`` is launched, and with ``num_layers`` at
the end."""

RunPrefix = Callable[[Any, int, int, int], None]
"""Computes tokens ``[first, end)`` of request ``index`` of the engine's batch again, with the engine's own
forward; the batch is left as it is. Those before them lie in the pool. On every tensor-parallel rank with the
same numbers."""
