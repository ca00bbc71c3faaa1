from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.quality.model import capture_attention
from benchmarks.variants import VariantError, depth_doubled, make_variant, rotate_bases

IDS = list(range(1, 40))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
}


def build(family: str) -> Any:
    config, model = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    torch.manual_seed(1)
    built = model(config(**SIZES)).train(False)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return built


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return result


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("angle", [0.3, math.pi / 2, 4.0])
def test_rotated_bases_keep_the_function_and_set_the_cosine(family: str, angle: float) -> None:
    model = build(family)
    before, captured = logits(model), capture_attention(model, IDS)
    rotate_bases(model, angle, [1])
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)

    rotated = capture_attention(model, IDS)
    for old, new in (
        (captured.layers[1].k, rotated.layers[1].k),
        (captured.layers[1].v, rotated.layers[1].v),
    ):
        cosine = torch.cosine_similarity(old, new, dim=-1)
        torch.testing.assert_close(cosine, torch.full_like(cosine, math.cos(angle)), rtol=0, atol=1e-4)
    torch.testing.assert_close(captured.layers[2].k, rotated.layers[2].k, rtol=1e-4, atol=1e-4)


def test_norms_of_queries_and_keys_stand_in_the_way() -> None:
    with pytest.raises(VariantError, match="norms"):
        rotate_bases(build("qwen3"), 0.3, [1])


def test_each_layer_stands_twice_and_the_model_stays_as_it_was() -> None:
    model = build("llama")
    before = logits(model)
    doubled = depth_doubled(model, scale=0.5)
    assert doubled.config.num_hidden_layers == len(doubled.model.layers) == 6
    assert [layer.self_attn.layer_idx for layer in doubled.model.layers] == list(range(6))
    for k, layer in enumerate(model.model.layers):
        for copy in doubled.model.layers[2 * k : 2 * k + 2]:
            assert torch.equal(copy.self_attn.k_proj.weight, layer.self_attn.k_proj.weight)
    last = doubled.model.layers[5].mlp.down_proj.weight
    assert torch.equal(last, 0.5 * model.model.layers[2].mlp.down_proj.weight)
    assert torch.equal(logits(model), before)
    # A cache of the doubled model has an entry for each layer.
    assert len(doubled(torch.tensor([IDS]), use_cache=True).past_key_values.layers) == 6


def test_a_single_copy_of_the_first_layer_carries_its_whole_update() -> None:
    model = build("llama")
    doubled = depth_doubled(model)
    first, second = (capture_attention(doubled, IDS).layers[layer] for layer in (0, 2))
    true = capture_attention(model, IDS)
    torch.testing.assert_close(first.k, true.layers[0].k)
    torch.testing.assert_close(second.k, true.layers[1].k, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tripled", "rotated", "rotated:wide", "depth-doubled:2"])
def test_unknown_variants_are_refused(name: str) -> None:
    with pytest.raises(VariantError):
        make_variant(build("llama"), name)


def test_a_rotated_variant_is_the_doubled_model_in_another_basis() -> None:
    model = build("llama")
    torch.testing.assert_close(
        logits(make_variant(model, "rotated:70")),
        logits(make_variant(model, "depth-doubled")),
        rtol=1e-4,
        atol=1e-4,
    )
