"""The capture sees what attention sees: against the attention maps of the library's plain implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.quality.model import CapturedAttention, capture_attention
from krul_backend.attention.rows import attention_rows
from krul_sglang.learning.reader import observed_attention

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = torch.randint(50, (24,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    # Large weights, so that attention is not nearly uniform.
    sizes = {**SIZES, "initializer_range": 0.3}
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).train(False)
    if request.param == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).train(False)
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)).train(False)


def attention_maps(model: Any) -> list[torch.Tensor]:
    """Per layer ``[H, T, T]``, from the library."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(torch.tensor([IDS]), output_attentions=True, use_cache=False).attentions
    return [one[0] for one in maps]


def captured_map(captured: CapturedAttention, layer: int) -> torch.Tensor:
    rows = captured.rows()
    keys = captured.read_keys(layer)
    return attention_rows(rows.queries[layer], keys, rows.positions, rows.kv_heads, rows.scaling)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_rows_are_the_attention_maps(model: Any, implementation: str) -> None:
    expected = attention_maps(model)
    model.set_attn_implementation(implementation)
    captured = capture_attention(model, IDS)
    assert model.config._attn_implementation == implementation
    for layer in range(3):
        torch.testing.assert_close(captured_map(captured, layer), expected[layer], rtol=1e-4, atol=1e-5)
        assert captured.layers[layer].v.shape == captured.read_keys(layer).shape


def test_a_step_after_a_cache_sees_all_keys_and_computes_the_same(model: Any) -> None:
    expected = attention_maps(model)
    model.set_attn_implementation("sdpa")
    captured = CapturedAttention()
    with torch.no_grad():
        whole = model(torch.tensor([IDS]), use_cache=False).logits
        cache = DynamicCache(config=model.config)
        model(torch.tensor([IDS[:-4]]), past_key_values=cache)
        with observed_attention(model, captured.take):
            end = model(torch.tensor([IDS[-4:]]), past_key_values=cache).logits
    torch.testing.assert_close(end, whole[:, -4:], rtol=1e-3, atol=1e-3)
    assert captured.rows().positions.tolist() == [20, 21, 22, 23]
    for layer in range(3):
        torch.testing.assert_close(
            captured_map(captured, layer), expected[layer][:, -4:], rtol=1e-4, atol=1e-5
        )


def test_chosen_rows_are_those_positions(model: Any) -> None:
    captured = capture_attention(model, IDS)
    positions = torch.tensor([3, 23])
    chosen = captured.rows(positions)
    assert torch.equal(chosen.queries, captured.rows().queries[:, positions])
    assert torch.equal(chosen.positions, positions)
    assert chosen.kv_heads.tolist() == [0, 0, 1, 1]


def test_the_implementation_comes_back_after_an_error(model: Any) -> None:
    before = model.config._attn_implementation
    with pytest.raises(OSError, match="boom"), observed_attention(model, lambda *_: None):
        raise OSError("boom")
    assert model.config._attn_implementation == before
