"""The interface of a codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's KV on one rank.

    ``k [T, num_kv_heads, k_head_dim]``, ``v [T, num_kv_heads, v_head_dim]``.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def k_token_bytes(self) -> int:
        return self.num_kv_heads * self.k_head_dim * self.dtype.itemsize

    @property
    def v_token_bytes(self) -> int:
        return self.num_kv_heads * self.v_head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class LayerKV:
    """Keys ``k [T, num_kv_heads, k_head_dim]`` and values ``v [T, num_kv_heads, v_head_dim]`` of one layer.

    In the pool's dtype, on any device. Keys carry their rotary embedding, as attention sees them.
    """

    k: torch.Tensor
    v: torch.Tensor


ReadLayer = Callable[[int], LayerKV]
"""Reads one layer's KV of a segment; called again for the same layer, it reads again."""


class Codec(ABC):
    """Encodes one layer of one segment into one contiguous block of bytes."""

    name: ClassVar[str]

    @abstractmethod
    def layer_num_bytes(self, shape: LayerShape, num_tokens: int) -> int:
        """Exact size in bytes of the block of ``num_tokens`` tokens."""

    @abstractmethod
    def layer_views(
        self, block: torch.Tensor, shape: LayerShape, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a block's keys and values.

        ``block``: uint8 ``[layer_num_bytes]``, on the CPU, contiguous. Returns ``k [T, H, Dk]`` and
        ``v [T, H, Dv]`` that share the block's memory: writing them encodes, reading them decodes.

        Raises:
            CodecError: if the block does not have the size that ``num_tokens`` asks for.
        """
