"""The pool's bytes, untouched: bit-exact."""

from __future__ import annotations

from typing import ClassVar

import torch

from krul_backend.codec.interface import Codec, LayerShape
from krul_backend.errors import CodecError


class RawCodec(Codec):
    """All keys of the layer, then all values, in token order and in the pool's own dtype.

    ::

        block = | k[0] k[1] ... k[T-1] | v[0] v[1] ... v[T-1] |
    """

    name: ClassVar[str] = "raw"

    def layer_num_bytes(self, shape: LayerShape, num_tokens: int) -> int:
        return num_tokens * (shape.k_token_bytes + shape.v_token_bytes)

    def layer_views(
        self, block: torch.Tensor, shape: LayerShape, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        expected = self.layer_num_bytes(shape, num_tokens)
        if block.numel() != expected:
            raise CodecError(f"a raw block of {num_tokens} tokens has {expected} bytes, got {block.numel()}")
        k_bytes = num_tokens * shape.k_token_bytes
        k = block[:k_bytes].view(shape.dtype).view(num_tokens, shape.num_kv_heads, shape.k_head_dim)
        v = block[k_bytes:].view(shape.dtype).view(num_tokens, shape.num_kv_heads, shape.v_head_dim)
        return k, v
