"""Bases of latent KV (MLA) with tiny random models: what is read, its gradients, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from krul_backend.codec.layout import LayerKV
from krul_backend.codec.subspace.bases import ModelBases, vector_size
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.errors import CodecError
from krul_sglang.learning.bases import LearningPlan, learn_bases
from krul_sglang.learning.command import learn_to_files
from krul_sglang.learning.reader import TextReader
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.tiny_model import LATENT_RANK, LATENT_ROTARY, build_latent_model, build_minicpm3_model

NUM_READ, NUM_AFTER = 40, 12
PLAN = LearningPlan(text_tokens=400, read_tokens=360, layers_of_group=2)
EXPERTS = {"q_lora_rank": 96, "num_experts": 4}
KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": EXPERTS,
    "glm4_moe_lite": {**EXPERTS, "kind": "glm4_moe_lite"},
}


@pytest.fixture(scope="module", params=KINDS)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextReader:
    path = build_latent_model(
        tmp_path_factory.mktemp("latent") / "model", num_layers=3, **KINDS[request.param]
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    assert model.config.model_type == request.param
    return TextReader(model.train(False))


def ids(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(10, 500, (num_tokens,), generator=generator).tolist()
    return drawn


@contextmanager
def history_of(model: Any, layers: Sequence[LayerKV]) -> Iterator[None]:
    """Within this context the model's own attention has these latents, and keys without rotary embedding, of
    the first tokens, whatever enters it."""

    def replaced(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return torch.cat([given[None, :, 0].to(own.dtype), own[:, len(given) :]], dim=1)

    handles = []
    for layer, kv in zip(model.model.layers, layers, strict=True):

        def keys(module: nn.Module, given: Any, own: torch.Tensor, k: torch.Tensor = kv.k) -> torch.Tensor:
            latent, rotary = own.split([LATENT_RANK, LATENT_ROTARY], dim=-1)
            return torch.cat([latent, replaced(rotary, k)], dim=-1)

        def latents(module: nn.Module, given: Any, own: torch.Tensor, v: torch.Tensor = kv.v) -> torch.Tensor:
            return replaced(own, v)

        handles.append(layer.self_attn.kv_a_proj_with_mqa.register_forward_hook(keys))
        handles.append(layer.self_attn.kv_a_layernorm.register_forward_hook(latents))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_a_text_is_read_as_a_pool_holds_it(reader: TextReader) -> None:
    """Neighbouring channels of a key are a pair, whatever the library's cache makes of them."""
    model: Any = reader._model
    found: dict[str, list[torch.Tensor]] = {"kv_a_proj_with_mqa": [], "kv_a_layernorm": []}
    handles = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda module, given, own, of_layers=of_layers: of_layers.append(own[0])
        )
        for layer in model.model.layers
        for name, of_layers in found.items()
    ]
    tokens = ids(NUM_READ)
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    (history,) = reader.read_histories([tokens])
    positions = torch.arange(NUM_READ)
    for kv, projected, latent in zip(history.layers, *found.values(), strict=True):
        assert kv.k.shape == (NUM_READ, 1, LATENT_ROTARY)
        assert kv.v.dtype is torch.bfloat16
        torch.testing.assert_close(kv.v[:, 0].float(), latent, rtol=1e-2, atol=1e-2)
        bare = reader.rotary.unrotate(kv.k, positions)
        torch.testing.assert_close(bare[:, 0], projected[:, LATENT_RANK:], rtol=2e-2, atol=2e-2)
    assert not reader.rotary.is_neox


@pytest.mark.parametrize("seed", [0, 5])
def test_gradients_are_those_of_the_model_s_own_forward(reader: TextReader, seed: int) -> None:
    tokens, model = ids(NUM_READ + NUM_AFTER, seed), reader._model
    texts = reader.read([(tokens[:NUM_READ], tokens[NUM_READ:])])
    learned = [text for (text,) in reader.to_learn(texts, [seed])][::-1]
    leaves = [
        LayerKV(*(part.float().requires_grad_() for part in (text.layers[0].k, text.layers[0].v)))
        for text in learned
    ]
    with history_of(model, leaves):
        predicted = model(torch.tensor([tokens])).logits[0, NUM_READ:].log_softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(predicted.detach().float().exp(), 1, generator=generator)
    (predicted.gather(1, drawn).sum() / math.sqrt(NUM_AFTER)).backward()
    for kv, text in zip(leaves, learned, strict=True):
        for leaf, gradient in ((kv.k, text.gradients[0].k), (kv.v, text.gradients[0].v)):
            assert leaf.grad is not None
            assert leaf.grad.norm() > 0.01
            assert (leaf.grad - gradient).norm() < 1e-3 * leaf.grad.norm()


@cache
def learned(reader: TextReader) -> ModelBases:
    (bases,) = learn_bases(reader, [ids(PLAN.text_tokens, seed) for seed in range(8)], PLAN)
    return bases


def test_bases_count_all_tokens_alike(reader: TextReader) -> None:
    bases = learned(reader)
    assert not bases.looks_at_attention
    attention = torch.rand(3, 1, 7)
    torch.testing.assert_close(bases.token_worth(attention), torch.ones(2, 7))


def test_what_comes_back_costs_about_what_is_expected(reader: TextReader) -> None:
    """The divergence of true predictions, of texts that were not learned from."""
    codec = SubspaceCodec(learned(reader), reader.rotary)
    expected, tried, num_bytes = 0.0, [], 0
    for seed in range(20, 24):
        tokens = ids(PLAN.text_tokens, seed)
        (read,) = reader.read([(tokens[: PLAN.read_tokens], tokens[PLAN.read_tokens :])])
        true = read.history.layers
        segment = {"start_token": 0, "num_tokens": PLAN.read_tokens}
        encoded = codec.encode(true.__getitem__, **segment, attention=read.history.attention, max_damage=0.05)
        restored = codec.open(encoded.params, **segment).decode_all(encoded.blocks)
        # The first token comes back to the bit.
        assert torch.equal(restored[2].v[0], true[2].v[0])
        assert not torch.equal(restored[2].v, true[2].v)
        expected += encoded.damage / 4
        num_bytes += encoded.num_bytes
        tried.append((read, restored.__getitem__))
    assert expected == pytest.approx(0.05, rel=0.1)
    measured = sum(reader.divergences(tried)) / 4
    assert expected / 3 < measured < 3 * expected
    assert num_bytes < 4 * PLAN.read_tokens * 3 * vector_size(reader.shape) * 2 / 6


def test_ranks_share_one_file(tmp_path: Path) -> None:
    model = build_latent_model(tmp_path / "model", num_layers=2)
    lines = [
        *learn_to_files(Checkpoint(str(model)), None, num_pieces=4, tp_size=2, cache_dir=tmp_path / "cache")
    ]
    assert sum(line.startswith("wrote ") for line in lines) == 1


def test_other_models_with_latent_kv_are_refused(tmp_path: Path) -> None:
    model = build_minicpm3_model(tmp_path / "model")
    names = "deepseek_v2 and deepseek_v3 and glm4_moe_lite and kimi_k2"
    with pytest.raises(CodecError, match=f"{names}, not for minicpm3"):
        list(learn_to_files(Checkpoint(str(model)), tmp_path / "bases", cache_dir=tmp_path))
