"""A tiny random Llama, or Qwen3-MoE, that the real SGLang server serves on a CPU within seconds.

Its greedy text is noise, but it depends on the whole prompt: with N(0, 0.08) weights, an untied head and a
hidden size of 256 it does not fall into repeating one token (at 64 it does), so a wrong KV cache changes the
text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

SPECIAL_TOKENS = ("<pad>", "<bos>", "<end>", "<system>", "<user>", "<assistant>")

CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

_CORPUS = (
    "The harbour of Lund is small, and its lighthouse is painted red and white.",
    "Please remember that Ada keeps the number 4821 in a green box under the stairs.",
    "What is the number that Ada keeps, and what colour has the box under the stairs?",
    "A conversation that comes back after an hour finds its keys and values in host memory.",
    "Thank you, I will remember it. Let us talk about the weather in the mountains then.",
    "0123456789 one two three four five six seven eight nine ten",
)


def build_tiny_model(
    path: Path | str,
    *,
    dtype: str = "float32",
    num_layers: int = 4,
    hidden_size: int = 256,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    vocab_size: int = 512,
    max_positions: int = 8192,
    init_std: float = 0.08,
    seed: int = 0,
    num_experts: int = 0,
) -> Path:
    """Write a checkpoint directory (weights, config, tokenizer, chat template) and return its path.

    A Qwen3-MoE with two of ``num_experts`` per token if there are any, else a Llama. Deterministic: the same
    arguments give the same weights and the same tokenizer. ``num_kv_heads`` is even by default, so that the
    model can be split over two tensor-parallel ranks.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    token_ids = _write_tokenizer(path, vocab_size)
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "initializer_range": init_std,
        "tie_word_embeddings": False,
        "bos_token_id": token_ids["<bos>"],
        "eos_token_id": token_ids["<end>"],
        "pad_token_id": token_ids["<pad>"],
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if num_experts:
            experts = {
                "num_experts": num_experts,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": hidden_size,
            }
            model: torch.nn.Module = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape))
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def build_eagle_pair(target: Path, draft: Path) -> None:
    """Write a tiny Llama, and an EAGLE draft for it that is right more often than not.

    A random draft would never be. So the first layer of the target decides nearly everything: the others add
    little, and the draft has the same layer. It takes the embedding of a token, which the target normalizes
    and the draft does not, and a little of the target's hidden state.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    build_tiny_model(target)
    model = LlamaForCausalLM.from_pretrained(target)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        # The row of the padding token is 0.
        embedding /= embedding.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3)
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
    model.save_pretrained(target)
    draft.mkdir()
    config = {**model.config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]}
    (draft / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (draft / name).write_text((target / name).read_text())
    weights = {
        f"layers.0.{name}": tensor.detach().clone()
        for name, tensor in model.model.layers[0].named_parameters()
        if "input_layernorm" not in name
    }
    weights["embed_tokens.weight"] = embedding.detach().clone()
    identity = torch.eye(model.config.hidden_size)
    weights["fc.weight"] = torch.cat([identity, 0.02 * identity], dim=1)
    weights["fc.bias"] = torch.zeros(model.config.hidden_size)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})


def random_llama(
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int = 4,
    head_dim: int,
    vocab_size: int = 64,
    max_positions: int,
    init_std: float,
    seed: int = 3,
) -> LlamaForCausalLM:
    """A random Llama in fp32 with two query heads per KV head, for tests that call it in their process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        initializer_range=init_std,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).train(False)


def _write_tokenizer(path: Path, vocab_size: int) -> dict[str, int]:
    """A byte-level BPE of at most ``vocab_size`` tokens; returns the ids of the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<end>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
