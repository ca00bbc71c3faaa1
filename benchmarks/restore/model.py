"""A Llama-like decoder with random weights, one layer at a time over a paged KV pool."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable


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


class KVPool:
    """``k[l]`` and ``v[l]`` ``[num_slots, num_kv_heads, head_dim]``, one pair of buffers per layer."""

    def __init__(self, shape: LayerShape, num_layers: int, num_slots: int, device: torch.device) -> None:
        def buffers(head_dim: int) -> list[torch.Tensor]:
            size = (num_slots, shape.num_kv_heads, head_dim)
            return [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(num_layers)]

        self.num_slots = num_slots
        self.k = buffers(shape.k_head_dim)
        self.v = buffers(shape.v_head_dim)

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @property
    def num_layers(self) -> int:
        return len(self.k)

    def fill(self, value: float) -> None:
        """Overwrite everything. NaN, and whatever is read without having been written shows in the result."""
        for buffer in (*self.k, *self.v):
            buffer.fill_(value)

    def write(self, layer: int, slots: torch.Tensor, kv: LayerKV) -> None:
        """``slots`` int64 ``[T]``, all different."""
        self.k[layer].index_copy_(0, slots, kv.k)
        self.v[layer].index_copy_(0, slots, kv.v)

    def gather(self, layer: int, slots: torch.Tensor) -> LayerKV:
        """Copies of the rows at ``slots`` int64 ``[T]``."""
        return LayerKV(self.k[layer].index_select(0, slots), self.v[layer].index_select(0, slots))


def scattered_slots(num_slots: int, page_size: int, seed: int, device: torch.device) -> torch.Tensor:
    """All slots, int64 ``[num_slots]``, whole pages in random order, as a pool that has been used gives them.

    ``num_slots`` is a multiple of ``page_size``.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(num_slots // page_size, generator=generator)
    slots = pages[:, None] * page_size + torch.arange(page_size)
    return slots.flatten().to(device)


_NORM_EPSILON = 1e-5
_LOGIT_STD = 2.0
"""Standard deviation of attention logits, of a layer whose input is normal."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Matrices ``[outputs, inputs]``; ``qkv`` is queries, keys, values, ``gate_up`` gate, then up."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Decoder:
    """``is_one_layer``: all layers share one layer's matrices, which saves memory and changes no arithmetic.

    Elements are drawn with variance ``1 / inputs``, so activations stay of order one; those of the queries
    with ``_LOGIT_STD`` times that deviation, or attention would be a mean over all tokens, in which a lost
    one makes no difference.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        *,
        is_one_layer: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(0)
        self._embedding = self._random(shape.vocab_size, shape.hidden_size, scale=1.0)
        num_drawn = 1 if is_one_layer else shape.num_layers
        drawn = [self._layer_weights() for _ in range(num_drawn)]
        # Norms differ in any case: layers of one function would drive all tokens to one state.
        self._layers = [
            replace(drawn[layer % num_drawn], attention_norm=self._signs(), mlp_norm=self._signs())
            for layer in range(shape.num_layers)
        ]
        self._final_norm = torch.ones(shape.hidden_size, dtype=dtype, device=device)
        self._lm_head = self._random(shape.vocab_size, shape.hidden_size)
        self.rotary = _rotary_table(shape, max_positions, device)
        # [max_positions, 1, head_dim / 2]: one angle for all heads
        self._cos = self.rotary.cos.to(dtype).unsqueeze(1)
        self._sin = self.rotary.sin.to(dtype).unsqueeze(1)

    @property
    def num_bytes(self) -> int:
        """Of all weights; what layers share counts once."""
        of_layers = [weights for layer in self._layers for weights in vars(layer).values()]
        distinct = {x.data_ptr(): x.nbytes for x in (self._embedding, self._lm_head, *of_layers)}
        return sum(distinct.values())

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` int64 ``[T]`` to hidden states ``[T, hidden_size]``."""
        return F.embedding(token_ids, self._embedding)

    def layer(
        self, layer: int, hidden: torch.Tensor, pool: KVPool, slots: torch.Tensor, num_past: int = 0
    ) -> torch.Tensor:
        """Hidden states ``[n, hidden_size]`` before ``layer`` to those after it.

        The tokens are at positions ``[num_past, num_past + n)``. ``slots`` are the request's, int64, at least
        ``[num_past + n]``; KV of the past is read from them, that of the tokens is written.
        """
        weights, shape = self._layers[layer], self.shape
        num_tokens = hidden.shape[0]
        normed = self._norm(hidden, weights.attention_norm)
        qkv = F.linear(normed, weights.qkv).view(num_tokens, -1, shape.head_dim)
        num_rotated = shape.num_heads + shape.num_kv_heads
        rotated = self._rotate(qkv[:, :num_rotated], num_past)
        q, k = rotated[:, : shape.num_heads], rotated[:, shape.num_heads :]
        v = qkv[:, num_rotated:]
        pool.write(layer, slots[num_past : num_past + num_tokens], LayerKV(k, v))
        if num_past > 0:
            kv = pool.gather(layer, slots[: num_past + num_tokens])
            k, v = kv.k, kv.v
        attended = self._attention(q, k, v)
        hidden = hidden + F.linear(attended, weights.output)
        gate, up = F.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, weights.down)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[n, hidden_size]`` after the last layer to the last token's logits ``[vocab]``."""
        return F.linear(self._norm(hidden[-1], self._final_norm), self._lm_head)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """``q [n, H, D]`` at the end of ``k, v [p + n, Hkv, D]``; returns ``[n, H * D]``."""
        # [T, H, D] -> [1, H, T, D]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        # Query i sees keys [0, p + i].
        mask = causal_lower_right(q.shape[2], k.shape[2])
        is_grouped = self.shape.num_heads != self.shape.num_kv_heads
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)
        return attended[0].transpose(0, 1).reshape(q.shape[2], -1)

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, weight.shape, weight, _NORM_EPSILON)

    def _rotate(self, x: torch.Tensor, first_position: int) -> torch.Tensor:
        """``x [n, H, D]`` at neighbouring positions; channel ``c`` pairs with ``c + D / 2``."""
        positions = slice(first_position, first_position + x.shape[0])
        cos, sin = self._cos[positions], self._sin[positions]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _layer_weights(self) -> LayerWeights:
        shape = self.shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        num_qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        norm = self._signs()
        qkv = self._random(num_qkv, hidden)
        qkv[: shape.num_heads * shape.head_dim] *= _LOGIT_STD
        return LayerWeights(
            attention_norm=norm,
            qkv=qkv,
            output=self._random(hidden, shape.num_heads * shape.head_dim),
            mlp_norm=norm,
            gate_up=self._random(2 * inner, hidden),
            down=self._random(hidden, inner),
        )

    def _signs(self) -> torch.Tensor:
        """Norm weights ``[hidden_size]``, 1 or -1 by chance."""
        size = (self.shape.hidden_size,)
        device = self._generator.device
        signs = torch.randint(2, size, dtype=self.dtype, device=device, generator=self._generator)
        return 2 * signs - 1

    def _random(self, outputs: int, inputs: int, scale: float | None = None) -> torch.Tensor:
        scale = inputs**-0.5 if scale is None else scale
        weights = torch.empty(outputs, inputs, dtype=self.dtype, device=self._generator.device)
        return weights.normal_(0.0, scale, generator=self._generator)


def _rotary_table(shape: ModelShape, max_positions: int, device: torch.device) -> RotaryTable:
    channels = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.arange(max_positions, dtype=torch.float64).outer(shape.rope_theta**-channels)
    cos, sin = (x.float().to(device) for x in (angles.cos(), angles.sin()))
    return RotaryTable(cos, sin, is_neox=True)
