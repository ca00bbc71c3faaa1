"""Bases of tiny models with recurrent layers beside attention: what is read, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BambaConfig, DynamicCache

from krul_backend.codec.layout import LayerKV
from krul_backend.errors import CodecError
from krul_sglang.learning.model_kv import pool_layers
from krul_sglang.learning.reader import ReadText, TextReader
from tests.support.tiny_model import (
    build_delta_rule_model,
    build_hybrid_model,
    build_mamba_model,
    build_sinks_model,
    build_window_pool_model,
)

NUM_READ, NUM_AFTER = 90, 12
BUILDERS = {
    "lfm2": build_hybrid_model,
    "qwen3_next": build_delta_rule_model,
    "nemotron_h": build_mamba_model,
    "mellum": partial(build_window_pool_model, window=50),
    "gpt_oss": partial(build_sinks_model, window=50),
}
LAYERS = {"lfm2": [1, 3], "qwen3_next": [1, 3], "nemotron_h": [1, 4], "mellum": [1, 3], "gpt_oss": [1, 3]}


@pytest.fixture(scope="module", params=BUILDERS)
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextReader:
    build: Callable[[Path], Path] = BUILDERS[request.param]
    path = build(tmp_path_factory.mktemp("hybrid") / "model")
    # The library's fast experts compute in no float64.
    attention = "eager" if request.param == "gpt_oss" else "sdpa"
    exact = {"dtype": torch.float64, "attn_implementation": attention, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **exact)
    assert model.config.model_type == request.param
    return TextReader(model.train(False))


def read(reader: TextReader, seed: int) -> tuple[list[int], ReadText]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(10, 500, (NUM_READ + NUM_AFTER,), generator=generator).tolist()
    (text,) = reader.read([(tokens[:NUM_READ], tokens[NUM_READ:])])
    return tokens, text


@torch.no_grad()
def log_probabilities(
    reader: TextReader, tokens: Sequence[int], text: ReadText, layers: Sequence[LayerKV]
) -> torch.Tensor:
    """What the whole model predicts of the last tokens when its cache of the first ones has this KV, the
    windows that were read, and the states that it made itself."""
    model = reader._model
    cache = DynamicCache(config=model.config)
    model(torch.tensor([tokens[:NUM_READ]]), past_key_values=cache, use_cache=True)
    own = {number: kv for number, kv in enumerate(text.before) if isinstance(kv, LayerKV)}
    for number, kv in (own | dict(zip(reader.layer_ids, layers, strict=True))).items():
        of_layer = cache.layers[number]
        kept = slice(NUM_READ - of_layer.keys.shape[-2], None)
        of_layer.keys, of_layer.values = (x[kept].transpose(0, 1)[None].to(model.dtype) for x in (kv.k, kv.v))
    output = model(torch.tensor([tokens[NUM_READ:]]), past_key_values=cache, use_cache=True)
    found: torch.Tensor = output.logits[0].log_softmax(-1)
    return found


def moved(reader: TextReader, text: ReadText, layer: int, part: str, by: torch.Tensor) -> list[LayerKV]:
    """The history with ``by`` added to the keys of a layer before their rotary embedding, or its values."""
    layers = [LayerKV(kv.k.double(), kv.v.double()) for kv in text.history.layers]
    if part == "v":
        layers[layer] = LayerKV(layers[layer].k, layers[layer].v + by)
        return layers
    turned = by if reader.rotary is None else reader.rotary.rotate(by, torch.arange(NUM_READ))
    layers[layer] = LayerKV(layers[layer].k + turned, layers[layer].v)
    return layers


def test_layers_with_kv_are_numbered_as_in_a_pool(reader: TextReader) -> None:
    _, text = read(reader, 0)
    assert list(reader.layer_ids) == LAYERS[reader._model.config.model_type]
    assert reader.num_layers == len(text.history.layers) == len(text.history.attention) == 2
    for number, kv in zip(reader.layer_ids, text.history.layers, strict=True):
        assert text.before[number] is kv
    assert len(text.before) == reader._model.config.num_hidden_layers


def test_gradients_are_finite_differences_of_the_model_s_own_forward(reader: TextReader) -> None:
    """Through the recurrences of the tokens after the history."""
    tokens, text = read(reader, 1)
    learned = [each for (each,) in reader.to_learn([text], [1])][::-1]
    predicted = log_probabilities(reader, tokens, text, text.history.layers)
    drawn = torch.multinomial(predicted.float().exp(), 1, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    for layer, of_layer in enumerate(learned):
        for part in ("k", "v"):
            gradient = getattr(of_layer.gradients[0], part)
            direction = torch.randn(gradient.shape, generator=generator)
            direction += gradient / gradient.norm() * 5
            near = [
                float(
                    log_probabilities(reader, tokens, text, moved(reader, text, layer, part, by * direction))
                    .gather(1, drawn)
                    .sum()
                )
                for by in (-1e-3, 1e-3)
            ]
            slope = (near[1] - near[0]) / 2e-3 / math.sqrt(NUM_AFTER)
            assert float((gradient * direction).sum()) == pytest.approx(slope, rel=2e-2)


def test_divergence_is_that_of_the_model_s_own_forward(reader: TextReader) -> None:
    tokens, text = read(reader, 3)
    other = moved(reader, text, 1, "v", 0.5 * torch.randn(text.history.layers[1].v.shape))
    true, changed = (log_probabilities(reader, tokens, text, each) for each in (text.history.layers, other))
    expected = float((true.exp() * (true - changed)).sum(-1).mean())
    assert expected > 1e-4
    same, found = reader.divergences([(text, text.history.layers.__getitem__), (text, other.__getitem__)])
    assert same == 0
    assert found == pytest.approx(expected, rel=1e-3)


def test_other_hybrid_models_are_refused() -> None:
    config = BambaConfig(num_hidden_layers=2, attn_layer_indices=[1])
    names = "lfm2 and qwen3_next and nemotron_h and gpt_oss and mellum"
    with pytest.raises(CodecError, match=f"{names}, not for bamba"):
        pool_layers(config)
