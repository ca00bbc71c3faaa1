"""The table of settings: every row speaks of something real, every refusal is one line that names it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.support import PAGE, SERVED, UNTESTED, page
from krul_sglang.adapter.attach import attach_turn_capture
from krul_sglang.adapter.kv_pool import open_pool
from krul_sglang.adapter.plugin import check_launch
from krul_sglang.adapter.unsupported import (
    LAUNCH_RULES,
    MODEL_RULES,
    Rule,
    UnsupportedSetupError,
    check_flags,
    check_model,
    flags_of,
    model_facts,
    options_of,
    takes_media,
)
from krul_sglang.config import KrulConfig

ROOT = Path(__file__).parents[2]
LINKER_CONFIG = "unified_cache_external_linker_config"


def by_setting(rule: Rule) -> str:
    return rule.setting


def default_flags() -> dict[str, Any]:
    from sglang.srt.server_args import ServerArgs

    return flags_of(ServerArgs(model_path="dummy"), KrulConfig())


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def test_an_ordinary_server_is_accepted() -> None:
    check_flags(default_flags())


@pytest.mark.parametrize("rule", LAUNCH_RULES, ids=by_setting)
def test_what_is_not_supported_is_refused_by_flag(rule: Rule) -> None:
    with pytest.raises(UnsupportedSetupError) as error:
        check_flags({**default_flags(), **dict(zip(rule.fields, rule.example, strict=True))})
    assert rule.setting in str(error.value)
    assert rule.reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rule", LAUNCH_RULES, ids=by_setting)
def test_it_is_refused_before_anything_starts(rule: Rule, tmp_path: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    given = dict(zip(rule.fields, rule.example, strict=True))
    options = {
        name.removeprefix("krul."): given.pop(name) for name in list(given) if name.startswith("krul.")
    }
    args = ServerArgs(
        model_path=str(tmp_path), radix_cache_backend="krul", **given, **{LINKER_CONFIG: options or None}
    )
    with pytest.raises(SystemExit) as stop:
        check_launch(args)
    assert str(stop.value.code).startswith("krul-sglang: ")
    assert rule.setting in str(stop.value.code)


@pytest.mark.parametrize(
    "values",
    [
        {"dp_size": 2, "krul.endpoint": "/run/krul"},
        {"dp_size": 2, "enable_dp_attention": True},
        {"attn_dp_size": 2},
        {"krul.strategy": "subspace"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "fp8_e4m3", "krul.strategy": "subspace"},
        {"kv_cache_dtype": "bfloat16", "krul.strategy": "subspace"},
        {"load_format": "dummy"},
        {"krul.ssd_dir": "/kv"},
        {"offload_group_size": -1},
        {"attention_backend": "flashinfer"},
        {"speculative_algorithm": "NGRAM"},
        {"speculative_algorithm": "standalone"},
        {"speculative_algorithm": "STANDALONE", "krul.truncation_reuse": True},
        {"speculative_algorithm": "EAGLE"},
        {"speculative_algorithm": "EAGLE3"},
        {"speculative_algorithm": "NEXTN"},
        {"enable_streaming_session": True},
    ],
)
def test_half_of_a_refused_setting_is_accepted(values: dict[str, Any]) -> None:
    check_flags({**default_flags(), **values})


@pytest.mark.parametrize("name", ["DFLASH", "DSPARK", "FROZEN_KV_MTP", "UNO", "OF_A_PLUGIN"])
def test_other_speculation_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=f"other than NGRAM, .*set to '{name}'"):
        check_flags({**default_flags(), "speculative_algorithm": name})


@pytest.mark.parametrize("setting", [row.setting for row in (*LAUNCH_RULES, *SERVED, *UNTESTED)])
def test_every_flag_of_the_table_is_one_of_sglang(setting: str, known_flags: set[str]) -> None:
    flags = [word.strip("(),;") for word in setting.split() if word.strip("(").startswith("--")]
    for flag in flags:
        is_known = flag in known_flags or any(known.startswith(flag.rstrip("*")) for known in known_flags)
        assert is_known if flag.endswith("*") else flag in known_flags, flag


@pytest.mark.parametrize("row", SERVED, ids=lambda row: row.setting)
def test_what_is_served_was_seen_in_a_test_that_exists(row: Any) -> None:
    assert (ROOT / row.seen_on.removeprefix("all of ")).exists()


@pytest.mark.parametrize("rule", MODEL_RULES, ids=by_setting)
def test_other_kinds_of_model_are_refused(rule: Rule) -> None:
    facts = dict.fromkeys((name for each in MODEL_RULES for name in each.fields), False)
    check_model(facts, "some/model")
    with pytest.raises(UnsupportedSetupError) as error:
        check_model({**facts, **dict(zip(rule.fields, rule.example, strict=True))}, "some/model")
    assert rule.setting in str(error.value)
    assert "--model-path" in str(error.value)
    assert "some/model" in str(error.value)
    assert "\n" not in str(error.value)


def write_config(path: Path, architecture: str, model_type: str, **fields: Any) -> None:
    config = {"architectures": [architecture], "model_type": model_type, **SMALL, **fields}
    (path / "config.json").write_text(json.dumps(config))


def facts_of(path: Path, architecture: str, model_type: str, **fields: Any) -> dict[str, bool]:
    """Of SGLang's own reading of a checkpoint's configuration."""
    from sglang.srt.configs.model_config import ModelConfig

    write_config(path, architecture, model_type, **fields)
    return model_facts(ModelConfig(str(path)))


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_length": 448}
REFUSED_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "is_encoder_decoder": ("WhisperForConditionalGeneration", "whisper", WHISPER),
    "is_embedding": ("LlamaEmbeddingModel", "llama", {}),
    "has_partial_attention": ("MiniCPMForCausalLM", "llama", {"sparse_config": {"block_size": 64}}),
}


def test_a_language_model_is_accepted(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "LlamaForCausalLM", "llama")
    assert set(facts) == {name for rule in MODEL_RULES for name in rule.fields}
    check_model(facts, "llama")


VISION = ("Qwen2VLForConditionalGeneration", "qwen2_vl")
VISION_CONFIG = {"vision_config": {"depth": 2}}


def test_a_vision_model_is_accepted_unless_a_strategy_looks_at_attention(tmp_path: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig

    plain, vision = tmp_path / "llama", tmp_path / "qwen"
    plain.mkdir()
    vision.mkdir()
    check_model(facts_of(plain, "LlamaForCausalLM", "llama"), "llama")
    assert not takes_media(ModelConfig(str(plain)))
    check_model(facts_of(vision, *VISION, **VISION_CONFIG), "qwen")
    runner: Any = SimpleNamespace(token_to_kv_pool=None, model_config=ModelConfig(str(vision)))
    assert takes_media(runner.model_config)
    with pytest.raises(UnsupportedSetupError, match=r'vision.*strategy = "krul"'):
        attach_turn_capture(runner, KrulConfig(strategy="krul"))


@pytest.mark.parametrize("fact", REFUSED_MODELS)
def test_the_kind_is_read_from_the_checkpoint(fact: str, tmp_path: Path) -> None:
    architecture, model_type, fields = REFUSED_MODELS[fact]
    facts = facts_of(tmp_path, architecture, model_type, **fields)
    assert facts[fact]
    with pytest.raises(UnsupportedSetupError, match="--model-path"):
        check_model(facts, architecture)


@pytest.mark.parametrize("fact", REFUSED_MODELS)
def test_the_kind_is_refused_before_anything_starts(fact: str, tmp_path: Path) -> None:
    from sglang.srt.server_args import ServerArgs

    architecture, model_type, fields = REFUSED_MODELS[fact]
    write_config(tmp_path, architecture, model_type, **fields)
    with pytest.raises(SystemExit) as stop:
        check_launch(ServerArgs(model_path=str(tmp_path), radix_cache_backend="krul"))
    assert str(stop.value.code).startswith("krul-sglang: ")
    assert f"({tmp_path})" in str(stop.value.code)


def test_options_are_known_by_their_own_names() -> None:
    options = options_of(KrulConfig(strategy="krul"))
    assert options["krul.strategy"] == "krul"
    assert options["krul.endpoint"] == ""


def test_a_foreign_pool_is_refused() -> None:
    class OtherPool:
        device = torch.device("cpu")

    with pytest.raises(UnsupportedSetupError, match="OtherPool"):
        open_pool(OtherPool())


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
