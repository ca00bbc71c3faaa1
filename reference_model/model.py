"""The architecture: its Hugging Face configuration, and a training form of the same function.

The training form keeps the weights of all layers stacked in one tensor per role, multiplies in bf16 with
an fp32 residual, and computes causal attention in blocks of queries, which on a CPU is faster than the
fused kernel. `export_model` writes the weights under the names that Llama implementations read.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from reference_model.tokenizer import BOS_ID, END_ID, MAX_POSITIONS, VOCABULARY_SIZE

NUM_LAYERS = 12
HIDDEN = 192
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 64
FEED_FORWARD = 512
ROPE_THETA = 10000.0
NORM_EPSILON = 1e-5
_GROUP = NUM_HEADS // NUM_KV_HEADS
_QUERY_WIDTH, _KV_WIDTH = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
_QUERY_BLOCK = 256
_MASKED = -1e9

Weights = dict[str, Tensor]
"""Stacked training weights: qkv, o, gate_up, down, norms (one row per layer), embedding, final_norm."""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": NORM_EPSILON,
    "rope_theta": ROPE_THETA,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": END_ID,
    "pad_token_id": END_ID,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}


def init_weights(seed: int) -> Weights:
    """Fresh fp32 weights that require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    into = 0.7 / HIDDEN**0.5
    out = 0.02 / (2 * NUM_LAYERS) ** 0.5
    weights = {
        "embedding": normal(VOCABULARY_SIZE, HIDDEN, std=0.02),
        "qkv": normal(NUM_LAYERS, _QUERY_WIDTH + 2 * _KV_WIDTH, HIDDEN, std=into),
        "o": normal(NUM_LAYERS, HIDDEN, _QUERY_WIDTH, std=out),
        "gate_up": normal(NUM_LAYERS, 2 * FEED_FORWARD, HIDDEN, std=into),
        "down": normal(NUM_LAYERS, HIDDEN, FEED_FORWARD, std=out),
        "norms": torch.ones(NUM_LAYERS, 2, HIDDEN),
        "final_norm": torch.ones(HIDDEN),
    }
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def rope_tables(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [num_tokens, 1, HEAD_DIM / 2] in fp32."""
    inverse = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
    angles = torch.arange(num_tokens, dtype=torch.float32)[:, None] * inverse
    return angles.cos()[:, None], angles.sin()[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).bfloat16()


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Causal attention of q [B, T, 4, 64] over k, v [B, T, 2, 64] -> [B, T, 256]; mask [T, T] is added."""
    num_rows, num_tokens = q.shape[:2]
    # [B, T, 4, 64] -> [B, 2, 2, T, 64]: query heads grouped by their KV head
    q = q.view(num_rows, num_tokens, NUM_KV_HEADS, _GROUP, HEAD_DIM).permute(0, 2, 3, 1, 4)
    k, v = k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    blocks = []
    for start in range(0, num_tokens, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, num_tokens)
        block = q[:, :, :, start:end].reshape(num_rows, NUM_KV_HEADS, _GROUP * (end - start), HEAD_DIM)
        scores = (block @ k[:, :, :end].transpose(-1, -2)).float() * HEAD_DIM**-0.5
        scores = scores.view(num_rows, NUM_KV_HEADS, _GROUP, end - start, end) + mask[start:end, :end]
        shares = torch.softmax(scores, -1).bfloat16()
        shares = shares.view(num_rows, NUM_KV_HEADS, _GROUP * (end - start), end)
        blocks.append((shares @ v[:, :, :end]).view(num_rows, NUM_KV_HEADS, _GROUP, end - start, HEAD_DIM))
    # [B, 2, 2, T, 64] -> [B, T, 256]
    return torch.cat(blocks, 3).permute(0, 3, 1, 2, 4).reshape(num_rows, num_tokens, _QUERY_WIDTH)


def block_forward(
    x: Tensor,
    qkv: Tensor,
    o: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norms: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
) -> Tensor:
    """One decoder layer on x [B, T, HIDDEN] in fp32."""
    num_rows, num_tokens = x.shape[:2]
    h = F.rms_norm(x, (HIDDEN,), norms[0], NORM_EPSILON).bfloat16()
    q, k, v = torch.split(h @ qkv.bfloat16().t(), [_QUERY_WIDTH, _KV_WIDTH, _KV_WIDTH], -1)
    q = _rotate(q.view(num_rows, num_tokens, NUM_HEADS, HEAD_DIM), cos, sin)
    k = _rotate(k.view(num_rows, num_tokens, NUM_KV_HEADS, HEAD_DIM), cos, sin)
    v = v.view(num_rows, num_tokens, NUM_KV_HEADS, HEAD_DIM)
    x = x + (_attention(q, k, v, mask) @ o.bfloat16().t()).float()
    h = F.rms_norm(x, (HIDDEN,), norms[1], NORM_EPSILON).bfloat16()
    gate, up = (h @ gate_up.bfloat16().t()).chunk(2, -1)
    return x + ((F.silu(gate) * up) @ down.bfloat16().t()).float()


def loss_forward(
    x: Tensor, final_norm: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor
) -> Tensor:
    """Weighted sum of the next-token losses: x [B, T, HIDDEN], targets and weights [B, T] -> scalar."""
    h = F.rms_norm(x, (HIDDEN,), final_norm, NORM_EPSILON).bfloat16()
    logits = (h @ embedding.bfloat16().t()).float()
    losses = F.cross_entropy(logits.view(-1, VOCABULARY_SIZE), targets.reshape(-1), reduction="none")
    return (losses * weights.reshape(-1)).sum()


class TrainingModel:
    """Compiled forward for one sequence length; reads the weights it is given, owns none."""

    def __init__(self, weights: Weights, num_tokens: int, compiled: bool = True) -> None:
        self._weights = weights
        self._cos, self._sin = rope_tables(num_tokens)
        self._mask = torch.full((num_tokens, num_tokens), _MASKED).triu(1)
        self._block: Callable[..., Tensor] = (
            torch.compile(block_forward, dynamic=False) if compiled else block_forward
        )
        self._loss: Callable[..., Tensor] = (
            torch.compile(loss_forward, dynamic=False) if compiled else loss_forward
        )

    def loss(self, inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Weighted loss sum over inputs, targets, weights [B, T]."""
        x = self._weights["embedding"][inputs]
        names = ("qkv", "o", "gate_up", "down", "norms")
        for layer in zip(*(self._weights[name].unbind(0) for name in names), strict=True):
            x = self._block(x, *layer, self._cos, self._sin, self._mask)
        return self._loss(x, self._weights["final_norm"], self._weights["embedding"], targets, weights)


def to_llama(weights: Weights) -> Weights:
    """The same weights under Llama's names, bf16 and contiguous."""
    named = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["final_norm"]}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        q, k, v = torch.split(weights["qkv"][layer], [_QUERY_WIDTH, _KV_WIDTH, _KV_WIDTH])
        gate, up = weights["gate_up"][layer].chunk(2)
        named |= {
            prefix + "self_attn.q_proj.weight": q,
            prefix + "self_attn.k_proj.weight": k,
            prefix + "self_attn.v_proj.weight": v,
            prefix + "self_attn.o_proj.weight": weights["o"][layer],
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": weights["down"][layer],
            prefix + "input_layernorm.weight": weights["norms"][layer, 0],
            prefix + "post_attention_layernorm.weight": weights["norms"][layer, 1],
        }
    # clone: some of these are views of one tensor, which safetensors refuses
    return {name: weight.detach().bfloat16().clone().contiguous() for name, weight in named.items()}


def export_model(weights: Weights, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file(to_llama(weights), path, metadata={"format": "pt"})
    # safetensors writes files that only their owner can read
    path.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "do_sample": False,
        "max_new_tokens": 64,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
