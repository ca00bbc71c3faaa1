"""Shapes of the models whose restores are measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from krul_backend.codec.layout import LayerShape


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: RMSNorm first, rotary embedding, grouped queries, SwiGLU, no biases."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float = 10000.0

    def kv_shape(self, dtype: torch.dtype) -> LayerShape:
        return LayerShape(self.num_kv_heads, self.head_dim, self.head_dim, dtype)

    def kv_token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a token in the pool, all layers."""
        shape = self.kv_shape(dtype)
        return self.num_layers * (shape.k_token_bytes + shape.v_token_bytes)


SHAPES = {
    "llama-7b": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    # Its query, key and value biases are left out: they cost nothing beside the products.
    "qwen1.5-7b": ModelShape(32, 4096, 11008, 32, 32, 128, 151936, 1e6),
    "llama3-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 5e5),
    "smollm2-135m": ModelShape(30, 576, 1536, 9, 3, 64, 49152, 1e5),
    "reference": ModelShape(12, 192, 512, 4, 2, 64, 2048),
    "small-mha": ModelShape(8, 512, 1408, 8, 8, 64, 2048),
    "small-gqa": ModelShape(8, 512, 1408, 8, 2, 64, 2048),
}
"""Published shapes by name (configurations of the models' repositories), and two that suit a CPU."""
