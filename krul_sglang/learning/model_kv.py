"""Reads of Hugging Face models which layers have KV, in what shape and caches, and their rotary tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from transformers import DynamicCache

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.errors import CodecError

POOL_DTYPE = torch.bfloat16
"""The type of the numbers in a server's KV pool; the model itself may compute in another one."""

LATENT_MODELS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
"""The models with latent KV (MLA) that are read, by their configuration's ``model_type``."""

HYBRID_MODELS = ("lfm2", "qwen3_next", "nemotron_h", "gpt_oss", "mellum")
"""The models that are read, likewise, of which servers keep in their pool of all tokens the KV of layers with
full attention alone. The others are recurrent, or have windows."""

BARE_MODELS = ("nemotron_h",)
"""Those of them whose keys have no rotary embedding."""


def text_model(model: Any) -> Any:
    """Return the part of a Hugging Face model that holds its decoder layers, without what sees images."""
    return getattr(model.model, "language_model", model.model)


def norm_name(base: Any) -> str:
    """Return the attribute name of the norm behind a Hugging Face model's last layer."""
    return next(name for name in ("norm", "embedding_norm", "norm_f") if hasattr(base, name))


def layers_with_kv(config: Any) -> Sequence[int]:
    """Return the layers with KV, of all tokens or of a window, by their number in the model, for a Hugging
    Face configuration."""
    kinds = ("full_attention", "sliding_attention")
    return [layer for layer, kind in enumerate(_layer_types(config)) if kind in kinds]


def pool_layers(config: Any) -> Sequence[int]:
    """Return the layers whose KV servers keep in the pool of all tokens, likewise.

    Raises CodecError for models of which other layers have states, but ``HYBRID_MODELS``.
    """
    found, is_hybrid = layers_with_kv(config), config.model_type in HYBRID_MODELS
    if len(found) < config.num_hidden_layers and not is_hybrid:
        names = " and ".join(HYBRID_MODELS)
        raise CodecError(f"of hybrid models there are bases for {names}, not for {config.model_type}")
    types = _layer_types(config)
    return [layer for layer in found if types[layer] == "full_attention" or not is_hybrid]


def _layer_types(config: Any) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def states_bytes(config: Any) -> int:
    """Return the bytes of the states behind one history, for a Hugging Face configuration. Those of
    convolutions are small, and not counted."""
    gated = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    mamba = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    of_layer = sum(prod(getattr(config, name, 0) for name in names) for names in (gated, mamba))
    return 4 * of_layer * (getattr(config, "layer_types", None) or []).count("linear_attention")


def is_latent(config: Any) -> bool:
    """Return whether a Hugging Face configuration is that of one of ``LATENT_MODELS``.

    Raises CodecError for other models with latent KV.
    """
    kind = config.model_type
    if kind not in LATENT_MODELS and hasattr(config, "kv_lora_rank"):
        raise CodecError(f"of latent KV there are bases for {' and '.join(LATENT_MODELS)}, not for {kind}")
    return kind in LATENT_MODELS


def kv_shape(config: Any) -> LayerShape:
    """Return the shape of a layer in a server's pool, for a Hugging Face configuration; see ``DevicePool``.

    Raises CodecError: see ``is_latent``.
    """
    if is_latent(config):
        return LayerShape(1, config.qk_rope_head_dim, config.kv_lora_rank, POOL_DTYPE)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LayerShape(config.num_key_value_heads, head_dim, head_dim, POOL_DTYPE)


def rotary_table(model: Any, max_positions: int) -> RotaryTable:
    """Return the rotary table of a Hugging Face model's layers in the pool of all tokens, on its device.

    Raises CodecError if these have more than one.
    """
    base = text_model(model)
    embedding, config = base.rotary_emb, base.config
    of_kind = "full_attention_" if hasattr(embedding, "full_attention_inv_freq") else ""
    if of_kind and config.model_type not in HYBRID_MODELS:
        raise CodecError(f"layers with windows of {config.model_type} have a rotary embedding of their own")
    frequencies: torch.Tensor = getattr(embedding, f"{of_kind}inv_freq")
    positions = torch.arange(max_positions, device=frequencies.device)
    angles = positions[:, None].float() * frequencies[None, :].float()
    scale = float(getattr(embedding, f"{of_kind}attention_scaling"))
    is_neox = not is_latent(config) or not _pairs_neighbours(config)
    return RotaryTable(angles.cos() * scale, angles.sin() * scale, is_neox=is_neox)


def _pairs_neighbours(config: Any) -> bool:
    """Return whether the rotary embedding of one of ``LATENT_MODELS`` pairs neighbouring channels."""
    return bool(getattr(config, "rope_interleave", True))


def from_cache(config: Any, keys: torch.Tensor, values: torch.Tensor) -> LayerKV:
    """Return a layer's KV as in a pool, of what a Hugging Face cache has: ``[1, Hkv, T, any]``. Caches of
    latent KV have its latent part for keys, its rotary one for values."""
    first, second = (part[0].transpose(0, 1) for part in (keys, values))
    if not is_latent(config):
        return pooled(LayerKV(first, second))
    if _has_halves(config):
        second = torch.stack(second.chunk(2, dim=-1), dim=-1).flatten(-2)
    return pooled(LayerKV(second, first))


def _has_halves(config: Any) -> bool:
    """Return whether a cache has the first channels of all pairs before the second ones, unlike a pool."""
    return config.model_type != "deepseek_v2" and _pairs_neighbours(config)


def dynamic_cache(model: Any, layers: Sequence[LayerKV]) -> Any:
    """Return a Hugging Face cache that holds ``layers``, in the type that the model computes in."""
    cache = DynamicCache()
    for layer, kv in enumerate(layers):
        parts = (kv.k, kv.v)
        if is_latent(model.config):
            rotary = torch.cat([kv.k[..., ::2], kv.k[..., 1::2]], -1) if _has_halves(model.config) else kv.k
            parts = (kv.v, rotary)
        # [T, Hkv, D] -> [1, Hkv, T, D]
        keys, values = (x.transpose(0, 1)[None].to(model.device, model.dtype) for x in parts)
        cache.update(keys, values, layer)
    return cache


def pooled(kv: LayerKV) -> LayerKV:
    """Return ``kv`` in the pool's type, contiguous."""
    return LayerKV(kv.k.to(POOL_DTYPE).contiguous(), kv.v.to(POOL_DTYPE).contiguous())
