"""``krul-sglang size``: what it says agrees with the shapes that are served, and with what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from benchmarks.simulate.hardware import LLAMA3_8B
from benchmarks.simulate.timeline import MODELS, count_steps
from benchmarks.tables import RESULTS
from krul_backend.errors import ConfigError
from krul_sglang.cli import app as cli
from krul_sglang.sizing.on_paper import BASES_RATIO, COUNTED, read_model
from tests.support.tiny_model import LATENT_RANK, LATENT_ROTARY, build_latent_model, build_tiny_model

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def lines_of(model: Path, *args: str) -> list[str]:
    result = CliRunner().invoke(cli.app, ["size", "--model-path", str(model), *args])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def folder_of(config: dict[str, Any], path: Path) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_config_has_the_shape_that_the_benchmarks_know() -> None:
    model = read_model(LLAMA, LLAMA3_8B.name, 1, 2)
    assert model == LLAMA3_8B


def test_what_a_server_stores_of_a_token_is_what_the_shapes_say(tmp_path: Path) -> None:
    """Tensor-parallel ranks have a head each at least; latents are stored once."""
    shapes = {}
    for name, build in (("heads", build_tiny_model), ("latent", build_latent_model)):
        config = json.loads((build(tmp_path / name) / "config.json").read_text())
        shapes[name] = [read_model(config, name, ranks, 4) for ranks in (1, 2, 4)]
    assert [model.layer_token_bytes for model in shapes["heads"]] == [2 * 2 * 64 * 4] * 2 + [2 * 4 * 64 * 4]
    assert [model.layer_token_bytes for model in shapes["latent"]] == [(LATENT_RANK + LATENT_ROTARY) * 4] * 3


def test_parameters_that_a_token_meets_are_those_that_are_published() -> None:
    """37 billion of DeepSeek-V3, less 2 of the embedding and the head; its first three layers are dense."""
    model = read_model(DEEPSEEK_V3, "DeepSeek-V3", 8, 2)
    assert 61 * model.layer_parameters == pytest.approx(35.0e9, rel=0.05)
    assert model.layer_token_bytes == 1152


def test_every_line_can_be_worked_out_by_hand(tmp_path: Path) -> None:
    lines = lines_of(folder_of(LLAMA, tmp_path), "--host-memory", "64GiB", "--ssd", "1TiB", "--users", "2000")
    assert lines[:3] == [
        "a token: 32 layers x 2048 numbers x 2 B = 131072 B of KV on 1 GPU together",
        "a conversation: 10 turns x 500 tokens, in pages of 16: 5008 tokens x 131072 B = 626.0 MiB",
        "in bases: 626.0 MiB in bf16 / 12 (measured on a small model: docs/measured.md) = 52.2 MiB",
    ]
    assert lines[3] == "host memory, exact: 64.0 GiB / 626.0 MiB = 104 conversations"
    assert lines[6].startswith("SSD, in bases: 1.0 TiB / 52.2 MiB = 20")
    assert "2000 users, exact: x 626.0 MiB = 1.2 TiB; held: 1675, of them in host memory 104" in lines
    assert "reading all of it from the SSD, exact: 626.0 MiB / 6.3 GB/s = 104.2 ms" in lines
    times = {line.split(":")[0]: float(line.split()[-2]) for line in lines if line.startswith("TTFT ")}
    computed = times.pop("TTFT computed, nothing stored")
    assert len(times) == 4
    assert all(time < computed for time in times.values())
    from_ssd, from_memory = (
        times[f"TTFT from {place}, exact, heads computed meanwhile"] for place in ("the SSD", "host memory")
    )
    assert from_ssd > from_memory


def test_options_replace_what_is_assumed(tmp_path: Path) -> None:
    options = ("--host-memory", "1GiB", "--tp-size", "8", "--ratio", "4", "--ssd-gbs", "1", "--kv-bytes", "4")
    lines = lines_of(folder_of(LLAMA, tmp_path), *options, "--gpu", "A100", "--turns", "1")
    assert "in bases: 64.0 MiB in bf16 / 4 = 16.0 MiB" in lines
    assert any("8 x A100" in line for line in lines)
    assert not any("the SSD" in line and line.startswith("TTFT") for line in lines)


def test_latent_kv_has_no_bases(tmp_path: Path) -> None:
    lines = lines_of(folder_of(DEEPSEEK_V3, tmp_path), "--host-memory", "64GiB")
    assert "in bases: not measured for latent KV" in lines
    assert not any(", in bases" in line for line in lines)


def test_fp8_kv_takes_as_much_in_bases_as_bf16(tmp_path: Path) -> None:
    of_types = []
    for kv_bytes in ("1", "2"):
        lines = lines_of(folder_of(LLAMA, tmp_path), "--host-memory", "64GiB", "--kv-bytes", kv_bytes)
        of_types.append([line for line in lines if "in bases" in line and "host memory" in line])
    assert of_types[0] == of_types[1] != []


@pytest.mark.parametrize(
    ("config", "problem"),
    [({"hidden_size": 8}, "has no 'num_attention_heads'"), ({"layer_types": ["sliding"]}, "full attention")],
)
def test_other_shapes_are_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_model(config, "a model", 1, 2)


def test_constants_are_those_that_were_measured_and_counted() -> None:
    for name in ("quality-recall-cpu.json", "quality-agent-cpu.json"):
        rows = orjson.loads((RESULTS / name).read_bytes())["rows"]
        (ratio,) = (row["ratio"] for row in rows if row["name"] == "subspace 0.01")
        assert ratio >= BASES_RATIO
    counted = count_steps(orjson.loads((RESULTS / "launches.json").read_bytes())["rows"], next(iter(MODELS)))
    assert (COUNTED.layer_s, COUNTED.group_s) == pytest.approx((counted.layer_s, counted.group_s), rel=0.02)
