"""What bases are learned from: checkpoints with quantized weights, under other names, of models that see,
with code of their own, or without some weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2VLForConditionalGeneration

from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.coded_tail import tensors_of
from krul_sglang.learning.bases import LearningError
from krul_sglang.learning.command import _load, learn_to_files, memory_of_learning
from krul_sglang.models.checkpoint import Checkpoint
from tests.support.tiny_model import (
    build_latent_model,
    build_sinks_model,
    build_tiny_model,
    build_vision_model,
)

Stored = Iterator[tuple[str, torch.Tensor]]
BLOCK, GROUP = 128, 32
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def powers_of_two(largest: torch.Tensor, of_type: float) -> torch.Tensor:
    """Scales by which numbers fit into a type, and which take nothing from its numbers."""
    return torch.exp2(torch.ceil(torch.log2(largest / of_type)))


def in_fp8_blocks(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Stored]:
    scales = torch.exp2(torch.arange(weight.numel() // BLOCK**2).view(-1, weight.shape[1] // BLOCK) % 3 - 9.0)
    of_each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    stored = (weight / of_each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return stored.float() * of_each, iter([(name, stored), (f"{name}_scale_inv", scales)])


def in_fp8_channels(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Stored]:
    scales = powers_of_two(weight.abs().amax(1, keepdim=True), 448)
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return stored.float() * scales, iter([(name, stored), (f"{name}_scale", scales)])


def in_packed_int4(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Stored]:
    groups = weight.unflatten(1, (-1, GROUP))
    scales = powers_of_two(groups.abs().amax(-1), 7)
    stored = (groups / scales[..., None]).round().clamp(-8, 7).flatten(1)
    # Eight to a number, the first one in its lowest bits, and none of them negative.
    shifted = (stored.long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    packed = shifted.sum(-1).to(torch.int32)
    shape = torch.tensor(weight.shape)
    plain = stored.unflatten(1, (-1, GROUP)) * scales[..., None]
    return plain.flatten(1), iter(
        [(f"{name}_packed", packed), (f"{name}_scale", scales), (f"{name}_shape", shape)]
    )


def in_mxfp4(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, Stored]:
    groups = weight.transpose(1, 2).unflatten(-1, (-1, GROUP))
    scales = powers_of_two(groups.abs().amax(-1), 6)
    codes = (groups.abs() / scales[..., None])[..., None].sub(FP4).abs().argmin(-1)
    plain = FP4[codes] * groups.sign() * scales[..., None]
    nibbles = (codes + 8 * (groups < 0)).unflatten(-1, (-1, 2))
    blocks = (nibbles[..., 0] + 16 * nibbles[..., 1]).to(torch.uint8)
    exponents = (scales.log2() + 127).to(torch.uint8)
    whole = plain.flatten(-2).transpose(1, 2)
    return whole, iter([(f"{name}_blocks", blocks), (f"{name}_scales", exponents)])


def of_compressed_tensors(form: str, **schemes: Any) -> dict[str, Any]:
    """What such a checkpoint says of its linear layers."""
    groups = {"group_0": {"targets": ["Linear"], **schemes}}
    named = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return {**named, "config_groups": groups, "ignore": ["lm_head"]}


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
CHANNELS = of_compressed_tensors(
    "float-quantized",
    weights={**FP8, "strategy": "channel"},
    input_activations={**FP8, "strategy": "token", "dynamic": True},
)
PACKED = of_compressed_tensors("pack-quantized", weights=INT4)
Store = Callable[[str, torch.Tensor], tuple[torch.Tensor, Stored]]
FORMS: dict[str, tuple[Callable[[Path], Path], Store, dict[str, Any]]] = {
    "fp8": (build_tiny_model, in_fp8_blocks, BLOCKS),
    "fp8, experts": (partial(build_tiny_model, num_experts=4), in_fp8_blocks, BLOCKS),
    "compressed-tensors, fp8": (build_tiny_model, in_fp8_channels, CHANNELS),
    "compressed-tensors, int4": (build_tiny_model, in_packed_int4, PACKED),
    "mxfp4": (partial(build_sinks_model, window=100), in_mxfp4, {"quant_method": "mxfp4"}),
}


def learned(path: Path, **more: Any) -> ModelBases:
    out = path.with_suffix(".bases")
    list(learn_to_files(Checkpoint(str(path), **more), out, cache_dir=path.parent, num_pieces=3))
    return ModelBases.load(out)


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("form", FORMS)
def test_bases_are_those_of_the_numbers_that_weights_stand_for(form: str, tmp_path: Path) -> None:
    build, store, quantization = FORMS[form]
    plain, quantized = build(tmp_path / "plain"), build(tmp_path / "quantized")
    weights = load_file(plain / "model.safetensors")
    of_file, ends = {}, ("experts.gate_up_proj", "experts.down_proj") if form == "mxfp4" else "proj.weight"
    for name, weight in weights.items():
        if name.endswith(ends):
            weights[name], stored = store(name, weight)
            of_file |= dict(stored)
        else:
            of_file[name] = weight
    for path, content in ((plain, weights), (quantized, of_file)):
        contiguous = {name: tensor.contiguous() for name, tensor in content.items()}
        save_file(contiguous, path / "model.safetensors", metadata={"format": "pt"})
    change_json(quantized / "config.json", quantization_config=quantization)
    # What it takes to read a layer is more than what is in the files.
    needed = [memory_of_learning(Checkpoint(str(path)), 1) for path in (quantized, plain)]
    assert needed[0] > 0.9 * needed[1]
    assert learned(quantized).digest == learned(plain).digest


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    named = build_latent_model(tmp_path / "named", num_layers=2, q_lora_rank=96, kind="kimi_k2")
    plain = Path(shutil.copytree(named, tmp_path / "plain"))
    change_json(plain / "config.json", model_type="deepseek_v3")
    assert learned(named).digest == learned(plain).digest


def test_the_text_of_a_model_that_sees_is_read(tmp_path: Path) -> None:
    """Its layers are those of a Qwen2, where text has no images."""
    seeing = build_vision_model(tmp_path / "seeing")
    plain = Path(shutil.copytree(seeing, tmp_path / "plain"))
    whole = Qwen2VLForConditionalGeneration.from_pretrained(seeing)
    of_text = whole.config.text_config.to_dict()
    del of_text["rope_parameters"]["mrope_section"]
    alone = Qwen2ForCausalLM(Qwen2Config(**of_text))
    alone.model.load_state_dict(whole.model.language_model.state_dict())
    alone.lm_head.load_state_dict(whole.lm_head.state_dict())
    alone.save_pretrained(plain)
    ids = torch.randint(10, 500, (100,), generator=torch.Generator().manual_seed(0)).tolist()

    def gradients(path: Path) -> list[torch.Tensor]:
        _, reader = _load(Checkpoint(str(path)), "cpu")
        layers = reader.to_learn(reader.read([(ids[:80], ids[80:])]), [1])
        return [part for (layer,) in layers for part in tensors_of(layer.gradients[0])]

    for found, expected in zip(gradients(seeing), gradients(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
        assert expected.abs().max() > 1e-3
    assert learned(seeing).num_layers == whole.config.text_config.num_hidden_layers


def test_a_tokenizer_s_own_code_runs_if_it_is_trusted(tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", num_layers=1)
    code = ("from transformers import PreTrainedTokenizerFast", "class Own(PreTrainedTokenizerFast): pass")
    (path / "tokenization_own.py").write_text("\n".join(code))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "tokenization_own.Own"]}}
    change_json(path / "tokenizer_config.json", **own)
    with pytest.raises(ValueError, match="trust_remote_code"):
        learned(path)
    assert learned(path, trust_remote_code=True).num_layers == 1


def test_a_checkpoint_without_some_weights_is_refused(tmp_path: Path) -> None:
    """The library would draw them."""
    path = build_tiny_model(tmp_path / "model", num_layers=2)
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LearningError, match=r"no weights model\.layers\.1\.mlp\.up_proj\.weight"):
        learned(path)
