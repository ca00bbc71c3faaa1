"""A tiny random Llama, Qwen3-MoE, Qwen3-Next, DeepSeek or LFM2 that the real SGLang server serves on a CPU.

Its greedy text is noise, but it depends on the whole prompt: with N(0, 0.08) weights, an untied head and a
hidden size of 256 it does not fall into repeating one token (at 64 it does), so a wrong KV cache changes the
text.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PretrainedConfig, PreTrainedModel

_Model = TypeVar("_Model", bound="PreTrainedModel")

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
    shape = _shape_with_tokenizer(
        path, vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, max_positions, init_std
    ) | {"head_dim": head_dim}
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    model: PreTrainedModel
    if num_experts:
        model = _random(Qwen3MoeForCausalLM, Qwen3MoeConfig(**shape, **experts), seed)
    else:
        model = _random(LlamaForCausalLM, LlamaConfig(**shape), seed)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def make_experts_alike(path: Path) -> None:
    """Give every second expert of a tiny Qwen3-MoE nearly the scores of the one before it."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype="auto")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            scores = layer.mlp.gate.weight
            noise = 0.02 * torch.randn(scores[::2].shape, generator=generator)
            scores[1::2] = scores[::2] * (1 + noise).to(scores.dtype)
    model.save_pretrained(path)


def build_eagle_pair(target: Path, draft: Path, build: Callable[[Path], Path] = build_tiny_model) -> None:
    """Write a tiny model, a Llama unless ``build`` writes another, and an EAGLE draft for it that is right
    more often than not.

    A random draft would never be. So the first layer of the target decides nearly everything: the others add
    little, and the draft has the same layer. It takes the embedding of a token, which the target normalizes
    and the draft does not, and a little of the target's hidden state.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build(target))
    _let_first_layer_decide(model)
    model.save_pretrained(target)
    build_tiny_model(draft)
    configure(draft, {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]})
    weights = {
        f"layers.0.{name}": tensor.detach().clone()
        for name, tensor in model.model.layers[0].named_parameters()
        if "input_layernorm" not in name and "_norm" not in name
    }
    weights["embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    identity = torch.eye(model.config.hidden_size)
    weights["fc.weight"] = torch.cat([identity, 0.02 * identity], dim=1)
    weights["fc.bias"] = torch.zeros(model.config.hidden_size)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})


def _let_first_layer_decide(model: Any) -> None:
    """Make what the other layers of a model add small, and its embeddings normalized."""
    import torch

    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        # The row of the padding token is 0.
        embedding /= embedding.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3)
        for layer in model.model.layers[1:]:
            for name, weight in layer.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    weight *= 0.05


def build_adapter(path: Path, *, seed: int, num_layers: int = 4, hidden_size: int = 256) -> Path:
    """A random LoRA adapter of the output projections of ``build_tiny_model``'s Llama, strong enough to
    change what it says."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    rank = 8
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        for part, shape in (("lora_A", (rank, hidden_size)), ("lora_B", (hidden_size, rank))):
            tensors[f"{prefix}.{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["o_proj"],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    date_back(path)
    return path


def date_back(path: Path) -> None:
    """Let a checkpoint's new files be some seconds old: a server that starts in the second in which they were
    written takes them for files that were written while it started, and does not know its weights."""
    for file in path.iterdir() if path.is_dir() else ():
        if time.time() - file.stat().st_mtime < 3:
            os.utime(file, (time.time() - 5,) * 2)


LATENT_RANK, LATENT_ROTARY = 64, 32
"""Channels of a token's latent KV, and of its key with rotary embedding, in ``build_latent_model``."""


_LATENT = {"kv_lora_rank": LATENT_RANK, "qk_rope_head_dim": LATENT_ROTARY, "qk_nope_head_dim": 64}

LATENT_KINDS = {"glm4_moe_lite": "Glm4MoeLiteForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"}
"""Models with DeepSeek-V3's layers, and their classes."""


def build_latent_model(
    path: Path,
    *,
    num_layers: int = 4,
    q_lora_rank: int | None = None,
    num_experts: int = 0,
    predicts_ahead: bool = False,
    kind: str | None = None,
) -> Path:
    """As ``build_tiny_model``: a dense DeepSeek-V2 in float32, or a DeepSeek-V3 with two of ``num_experts``
    per token behind its first layer. The latter may be called by another ``kind``, of a model that has the
    same layers.

    With ``predicts_ahead`` it has experts in its first layer, too, and one more layer that drafts (MTP),
    which is right more often than not: see ``build_eagle_pair``.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    shape = _shape_with_tokenizer(path, num_layers=num_layers, num_kv_heads=4)
    latent = _LATENT | {
        "q_lora_rank": q_lora_rank,
        "v_head_dim": 64,
        "first_k_dense_replace": 0 if predicts_ahead else 1 if num_experts else num_layers,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "n_routed_experts": num_experts or 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        # SGLang's DeepSeek on a CPU has no other rotary embedding.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    }
    model: PreTrainedModel
    if num_experts or kind is not None:
        # As SGLang names what DeepSeek-V3 does.
        gate = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        model = _random(DeepseekV3ForCausalLM, DeepseekV3Config(**shape, **latent, **gate))
    else:
        model = _random(DeepseekV2ForCausalLM, DeepseekV2Config(**shape, **latent))
    if predicts_ahead:
        _let_first_layer_decide(model)
    model.save_pretrained(path)
    if predicts_ahead:
        _add_drafting_layer(path)
    if kind is not None:
        of_layers = ["sparse" if num_experts and layer else "dense" for layer in range(num_layers)]
        named = {"model_type": kind, "architectures": [LATENT_KINDS[kind]], "mlp_layer_types": of_layers}
        configure(path, named)
    return path


def _add_drafting_layer(path: Path) -> None:
    """Give a checkpoint one more layer, equal to its first one, as DeepSeek-V3 has for drafts."""
    import torch
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    weights = load_file(file)
    config = json.loads((path / "config.json").read_text())
    number, size = config["num_hidden_layers"], config["hidden_size"]
    first = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.0.")}
    added = {name.replace("layers.0.", f"layers.{number}."): tensor.clone() for name, tensor in first.items()}
    identity, ones = torch.eye(size), torch.ones(size)
    own = {
        "embed_tokens": weights["model.embed_tokens.weight"].clone(),
        "shared_head.head": weights["lm_head.weight"].clone(),
        "shared_head.norm": ones,
        "enorm": ones.clone(),
        "hnorm": ones.clone(),
        "eh_proj": torch.cat([identity, 0.02 * identity], dim=1),
    }
    added |= {f"model.layers.{number}.{name}.weight": tensor for name, tensor in own.items()}
    save_file(weights | added, file, metadata={"format": "pt"})
    configure(path, {"num_nextn_predict_layers": 1})


def build_minicpm3_model(path: Path) -> Path:
    """As ``build_latent_model``: a MiniCPM3, whose layers know no pipeline stages."""
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM

    shape = _shape_with_tokenizer(path, num_kv_heads=4)
    return _save(path, MiniCPM3ForCausalLM, MiniCPM3Config(**shape, **_LATENT, q_lora_rank=96))


def _windows(window: int) -> dict[str, Any]:
    """Of four layers: every second one attends to all tokens, the others to the last ``window``."""
    types = 2 * ["sliding_attention", "full_attention"]
    return {"head_dim": 64, "sliding_window": window, "layer_types": types}


def build_window_model(path: Path, *, window: int) -> Path:
    """As ``build_tiny_model``: a Gemma-3 whose even layers attend to the last ``window`` tokens. SGLang keeps
    their KV in the pool of all layers."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    shape = _shape_with_tokenizer(path)
    config = Gemma3TextConfig(**shape, **_windows(window), query_pre_attn_scalar=64)
    return _save(path, Gemma3ForCausalLM, config)


def build_window_pool_model(path: Path, *, window: int) -> Path:
    """As ``build_window_model``: a Mellum without experts. SGLang has a pool for layers with windows, which
    have a rotary embedding of their own."""
    from transformers import MellumConfig, MellumForCausalLM

    shape = _shape_with_tokenizer(path)
    config = MellumConfig(**shape, **_windows(window), mlp_layer_types=4 * ["dense"])
    return _save(path, MellumForCausalLM, config)


def build_sinks_model(path: Path, *, window: int) -> Path:
    """As ``build_window_pool_model``: a gpt-oss with two of four experts per token."""
    from transformers import GptOssConfig, GptOssForCausalLM

    shape = _shape_with_tokenizer(path) | {"intermediate_size": 256}
    config = GptOssConfig(**shape, **_windows(window), num_local_experts=4, num_experts_per_tok=2)
    return _save(path, GptOssForCausalLM, config)


def build_hybrid_model(path: Path) -> Path:
    """As ``build_tiny_model``: an LFM2 in float32, of two layers with attention, each between others with
    short convolutions."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    shape = _shape_with_tokenizer(path, num_layers=5)
    layers = {
        "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
    }
    return _save(path, Lfm2ForCausalLM, Lfm2Config(**shape | layers))


def build_delta_rule_model(path: Path) -> Path:
    """As ``build_tiny_model``: a Qwen3-Next in float32, of two layers with attention, each behind one with a
    gated delta rule. Each token has both of two experts, so no rounding chooses others."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    shape = _shape_with_tokenizer(path)
    layers = {
        "layer_types": 2 * ["linear_attention", "full_attention"],
        "full_attention_interval": 2,
        "head_dim": 64,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    }
    return _save_recurrent(path, Qwen3NextForCausalLM, Qwen3NextConfig(**shape | layers))


def build_mamba_model(path: Path) -> Path:
    """As ``build_tiny_model``: a Nemotron-H in float32, of two layers with attention, each between others
    with a Mamba-2 recurrence."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    shape = _shape_with_tokenizer(path, num_layers=7)
    # Each of these layers has one of: a recurrence, attention, an MLP.
    layers = {
        "hybrid_override_pattern": "M*-M*-M",
        "head_dim": 64,
        "ssm_state_size": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "mamba_n_groups": 2,
        "chunk_size": 64,
        "rescale_prenorm_residual": False,
    }
    _save_recurrent(path, NemotronHForCausalLM, NemotronHConfig(**shape | layers))
    # SGLang reads what the published ones have, not what transformers makes of it.
    configure(path, layers, without="layers_block_type")
    return path


def build_kimi_model(path: Path) -> Path:
    """As ``build_delta_rule_model``: a Kimi-Linear without experts, whose attention has latent KV, and whose
    delta rule has a decay for each channel."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    shape = _shape_with_tokenizer(path, num_kv_heads=4)
    # Layers count from one, as in published ones.
    rule = {"kda_layers": [1, 3], "full_attn_layers": [2, 4]}
    layers = _LATENT | {
        "linear_attn_config": {**rule, "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4},
        "first_k_dense_replace": 4,
        "v_head_dim": 64,
    }
    _save_recurrent(path, KimiLinearForCausalLM, KimiLinearConfig(**shape | layers))
    # As published ones name them: transformers writes the name of experts' layers.
    _rename_weights(path, ".block_sparse_moe.", ".mlp.")
    configure(path, layers | {"num_experts": None})
    return path


_MAMBA_LAYERS = {"mamba_n_heads": 4, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_chunk_size": 64}


def build_granite_model(path: Path) -> Path:
    """As ``build_mamba_model``: a Granite-4, whose layers have an MLP each, and no positions."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    shape = _shape_with_tokenizer(path, num_layers=5)
    layers = {
        "layer_types": ["mamba", "attention", "mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
        "attention_multiplier": 0.125,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 512,
        "mamba_expand": 1,
    }
    config = GraniteMoeHybridConfig(**shape | _MAMBA_LAYERS | layers)
    return _save_recurrent(path, GraniteMoeHybridForCausalLM, config)


def build_parallel_model(path: Path) -> Path:
    """As ``build_mamba_model``: a Falcon-H1, whose layers have attention beside their recurrence."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    shape = _shape_with_tokenizer(path, num_layers=3)
    layers = {"mamba_d_ssm": 256}
    return _save_recurrent(path, FalconH1ForCausalLM, FalconH1Config(**shape | _MAMBA_LAYERS | layers))


def _random(architecture: type[_Model], config: PretrainedConfig, seed: int = 0) -> _Model:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return architecture(config)


def _save(path: Path, architecture: type[PreTrainedModel], config: PretrainedConfig) -> Path:
    _random(architecture, config).save_pretrained(path)
    return path


def configure(path: Path, changes: dict[str, Any], without: str = "") -> None:
    """Change the configuration of a checkpoint, and leave one of its fields out."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    config.pop(without, None)
    file.write_text(json.dumps(config))


def _save_recurrent(path: Path, architecture: type[PreTrainedModel], config: PretrainedConfig) -> Path:
    """Write a random model whose recurrent heads remember from a few tokens to some hundred. Without that all
    remember a few."""
    import torch

    model = _random(architecture, config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith(".A_log"):
                weights.copy_(torch.linspace(-4, 1, 4).view_as(weights))
            elif name.endswith(".dt_bias"):
                weights.fill_(-2.0)
    model.save_pretrained(path)
    return path


def build_mtp_model(path: Path) -> Path:
    """As ``build_delta_rule_model``, with a draft (MTP) in its checkpoint that is right more often than not.

    As with ``build_eagle_pair``, a layer that both have decides most: the first with attention.
    """
    import torch
    from safetensors.torch import load_file, save_file

    build_delta_rule_model(path)
    weights = load_file(path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3)
    for name, tensor in weights.items():
        is_output = name.endswith(("o_proj.weight", "down_proj.weight", "linear_attn.out_proj.weight"))
        if is_output and ".layers.1." not in name:
            tensor *= 0.1
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        weights[name.replace("model.layers.1.", "mtp.layers.0.")] = weights[name].clone()
    identity = torch.eye(embedding.shape[1])
    weights["mtp.fc.weight"] = torch.cat([identity, 0.02 * identity], dim=1)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        weights[f"mtp.{name}.weight"] = torch.zeros(len(identity))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

_IMAGE_TEMPLATE = (
    "<bos>{% for message in messages %}<{{ message.role }}>{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_vision_model(path: Path) -> Path:
    """As ``build_tiny_model``: a Qwen2-VL with its processor, which makes a token of 8 x 8 pixels."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    shape = _shape_with_tokenizer(path, special_tokens=(*SPECIAL_TOKENS, *VISION_TOKENS))
    ids = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    id_of = {token["content"]: token["id"] for token in ids}
    patches = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    config = Qwen2VLConfig(
        text_config={**shape, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}},
        vision_config={
            **patches,
            "depth": 2,
            "in_chans": 3,
            "embed_dim": 64,
            "hidden_size": shape["hidden_size"],
            "num_heads": 4,
            "mlp_ratio": 2,
            "initializer_range": 0.08,
        },
        vision_start_token_id=id_of["<|vision_start|>"],
        vision_end_token_id=id_of["<|vision_end|>"],
        image_token_id=id_of["<|image_pad|>"],
        video_token_id=id_of["<|video_pad|>"],
        tie_word_embeddings=False,
    )
    _save(path, Qwen2VLForConditionalGeneration, config)
    names = {"processor_class": "Qwen2VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    preprocessor = {
        **names,
        "patch_size": patches["patch_size"],
        "temporal_patch_size": patches["temporal_patch_size"],
        "merge_size": patches["spatial_merge_size"],
        "min_pixels": 64,
        "max_pixels": 1 << 16,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    (path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer |= {"processor_class": "Qwen2VLProcessor", "chat_template": _IMAGE_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return path


SOUND_TOKENS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")


def build_audio_model(path: Path) -> Path:
    """As ``build_tiny_model``: a Qwen2-Audio with its processor, which makes 25 tokens of a second."""
    from transformers import (
        AutoTokenizer,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
        WhisperFeatureExtractor,
    )

    shape = _shape_with_tokenizer(path, special_tokens=(*SPECIAL_TOKENS, *SOUND_TOKENS))
    tokenizer = AutoTokenizer.from_pretrained(path)
    encoder = {"d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **shape},
        # As its published ones: 30 seconds, of 100 spectra each.
        audio_config={**encoder, "num_mel_bins": 128, "max_source_positions": 1500, "init_std": 0.08},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    _save(path, Qwen2AudioForConditionalGeneration, config)
    _rename_weights(path, ".model.model.", ".model.")
    Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=128), tokenizer).save_pretrained(path)
    return path


def _rename_weights(path: Path, name: str, published: str) -> None:
    """Have the names of weights that published models have, and SGLang reads, not those of transformers."""
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    save_file(
        {key.replace(name, published): each for key, each in weights.items()}, path / "model.safetensors"
    )


def _shape_with_tokenizer(
    path: Path,
    vocab_size: int = 512,
    hidden_size: int = 256,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_positions: int = 8192,
    init_std: float = 0.08,
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS,
) -> dict[str, Any]:
    """Write the tokenizer; returns the model's configuration as far as all architectures share it."""
    path.mkdir(parents=True, exist_ok=True)
    token_ids = _write_tokenizer(path, vocab_size, special_tokens)
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_positions,
        "initializer_range": init_std,
        "tie_word_embeddings": False,
        "bos_token_id": token_ids["<bos>"],
        "eos_token_id": token_ids["<end>"],
        "pad_token_id": token_ids["<pad>"],
    }


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
    return _random(LlamaForCausalLM, config, seed).train(False)


def _write_tokenizer(path: Path, vocab_size: int, special_tokens: tuple[str, ...]) -> dict[str, int]:
    """A byte-level BPE of at most ``vocab_size`` tokens; returns the ids of the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
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
