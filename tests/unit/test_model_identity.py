"""Which checkpoint this is: every byte of it counts, and what cannot be told apart is not shared."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_backend.codec.layout import LayerShape
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.served_model import ServedModel, identify_model, weights_digest
from krul_sglang.models.checkpoint import HASHES_FILE
from tests.support.engine_builders import Meeting

LONG_AGO_S = 1_000_000_000
SHARD_BYTES = 9 << 20
SETTINGS: dict[str, Any] = {
    "dtype": "auto",
    "download_dir": None,
    "json_model_override_args": "{}",
    "kt_weight_path": None,
    "load_format": "auto",
    "lora_paths": None,
    "model_impl": "auto",
    "model_loader_extra_config": "{}",
    "modelopt_checkpoint_restore_path": None,
    "modelopt_quant": None,
    "quantization": None,
    "quantization_param_path": None,
    "quantize_and_serve": False,
    "revision": None,
    "rl_on_policy_target": None,
    "rl_quant_profile": None,
    "trust_remote_code": False,
}
ALONE = RankAgreement(None, 1)


class HuggingFaceConfig:
    def __init__(self, text: str) -> None:
        self._text = text

    def to_json_string(self, *, use_diff: bool) -> str:
        assert not use_diff
        return self._text


class ModelConfig:
    """What is looked at of SGLang's."""

    def __init__(self, path: Path | str, *, revision: str | None = None, hf_config: str = "{}") -> None:
        self.model_path = str(path)
        self.revision = revision
        self.quantization: str | None = None
        self.hf_config = HuggingFaceConfig(hf_config)


def write(path: Path, content: bytes, mtime_s: int = LONG_AGO_S) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (mtime_s, mtime_s))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    for shard in range(3):
        write(folder / f"model-{shard + 1}-of-3.safetensors", bytes([shard]) * SHARD_BYTES)
    write(folder / "model.safetensors.index.json", b'{"weight_map": {}}')
    write(folder / "config.json", b"{}")
    write(folder / "tokenizer.json", b"{}")
    write(folder / "README.md", b"a model")
    return folder


@pytest.fixture
def digest(checkpoint: Path, tmp_path: Path) -> Callable[..., str | None]:
    def of(path: Path | str = checkpoint, *, revision: str | None = None, **settings: Any) -> str | None:
        return weights_digest(ModelConfig(path, revision=revision), SETTINGS | settings, tmp_path / "cache")

    return of


def identify(
    config: ModelConfig,
    cache_dir: Path,
    agreement: RankAgreement = ALONE,
    rank: int = 0,
    kv_format: str = "float32",
) -> Any:
    shape = LayerShape(2, 64, 64, torch.float32)
    pool: Any = SimpleNamespace(shape=shape, num_layers=4, format=kv_format, is_latent=False)
    of_rank: Any = SimpleNamespace(rank=rank, num_ranks=agreement.num_ranks)
    options: dict[str, Any] = {"page_size": 16, "ranks_per_host": agreement.num_ranks}
    return identify_model(config, SETTINGS, pool, agreement, of_rank, cache_dir=cache_dir, **options)


def test_one_changed_byte_in_the_middle_of_a_shard_is_seen(
    digest: Callable[..., str | None], checkpoint: Path
) -> None:
    before = digest()
    content = bytearray(bytes([1]) * SHARD_BYTES)
    content[SHARD_BYTES // 2 + 4321] ^= 1
    write(checkpoint / "model-2-of-3.safetensors", bytes(content), LONG_AGO_S + 1)
    assert before != digest() is not None


def test_shards_in_another_order_are_other_weights(
    digest: Callable[..., str | None], checkpoint: Path
) -> None:
    before = digest()
    first, second = (checkpoint / f"model-{number}-of-3.safetensors" for number in (1, 2))
    first.rename(checkpoint / "aside")
    second.rename(first)
    (checkpoint / "aside").rename(second)
    assert before != digest() is not None


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "hf_quant_config.json", "modeling.py"]
)
def test_changed_settings_beside_the_weights_are_seen(
    name: str, digest: Callable[..., str | None], checkpoint: Path
) -> None:
    before = digest()
    write(checkpoint / name, b'{"rope_theta": 1}')
    assert before != digest() is not None


@pytest.mark.parametrize("name", ["tokenizer.json", "README.md", "generation_config.json", "optimizer.pt"])
def test_what_changes_no_kv_of_given_tokens_does_not_count(
    name: str, digest: Callable[..., str | None], checkpoint: Path
) -> None:
    before = digest()
    write(checkpoint / name, b'{"temperature": 1}')
    assert before == digest() is not None


def test_the_same_files_elsewhere_are_the_same_weights(
    digest: Callable[..., str | None], checkpoint: Path, tmp_path: Path
) -> None:
    for path in checkpoint.iterdir():
        write(tmp_path / "copy" / path.name, path.read_bytes(), LONG_AGO_S + 77)
    assert digest() == digest(tmp_path / "copy") is not None


def test_a_checkpoint_of_one_file(digest: Callable[..., str | None], tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", b"one")
    before = digest(tmp_path / "model.gguf", load_format="gguf")
    write(tmp_path / "model.gguf", b"two", LONG_AGO_S + 1)
    assert before != digest(tmp_path / "model.gguf", load_format="gguf") is not None


def test_files_that_did_not_change_are_not_read_again(
    digest: Callable[..., str | None], checkpoint: Path, tmp_path: Path
) -> None:
    before = digest()
    shard = checkpoint / "model-3-of-3.safetensors"
    write(shard, bytes([9]) * SHARD_BYTES)
    assert digest() == before, "the file's time, size and place say that it is the same"
    os.utime(shard, (LONG_AGO_S, LONG_AGO_S + 1))
    assert digest() not in (before, None)
    (tmp_path / "cache" / HASHES_FILE).write_bytes(b'{"damaged": ')
    os.utime(shard, (LONG_AGO_S, LONG_AGO_S))
    assert digest() not in (before, None), "without what was remembered it is read"


def test_hashes_that_were_changed_by_hand_do_no_harm(
    digest: Callable[..., str | None], tmp_path: Path
) -> None:
    expected = digest()
    for content in (b"[]", b'{"a": 1}', b"\xff", b'{"a": [1, 2, 3, 4]}'):
        (tmp_path / "cache" / HASHES_FILE).write_bytes(content)
        assert digest() == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"load_format": "dummy"},
        {"load_format": "remote"},
        {"load_format": "remote_instance"},
        {"kt_weight_path": "/experts"},
        {"model_loader_extra_config": '{"qlora_adapter_name_or_path": "a"}'},
    ],
)
def test_weights_from_elsewhere_are_unknown(
    settings: dict[str, Any], digest: Callable[..., str | None]
) -> None:
    assert digest() is not None
    assert digest(**settings) is None


def test_weights_written_while_the_server_starts_are_unknown(
    digest: Callable[..., str | None], checkpoint: Path
) -> None:
    write(checkpoint / "model-1-of-3.safetensors", b"half", mtime_s=4_000_000_000)
    assert digest() is None


def test_a_folder_without_weights_is_unknown(digest: Callable[..., str | None], tmp_path: Path) -> None:
    write(tmp_path / "remote" / "config.json", b"{}")
    assert digest(tmp_path / "remote") is None


def test_a_hub_name_stands_for_the_commit_in_the_local_cache(
    digest: Callable[..., str | None], tmp_path: Path
) -> None:
    assert digest("org/name", download_dir=str(tmp_path / "hub")) is None
    repository = tmp_path / "hub" / "models--org--name"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        write(repository / "refs" / revision, commit.encode())
        write(repository / "snapshots" / commit / "config.json", b"{}")
    hub = {"download_dir": str(tmp_path / "hub")}
    assert digest("org/name", **hub) == f"commit {'a' * 40}"
    assert digest("org/name", revision="v2", **hub) == f"commit {'b' * 40}"
    assert digest("org/name", revision="b" * 40, **hub) == f"commit {'b' * 40}"
    write(repository / "refs" / "main", b"b" * 40)
    assert digest("org/name", **hub) == f"commit {'b' * 40}"


@pytest.mark.parametrize("name", ["dtype", "quantization", "load_format", "model_impl", "revision"])
def test_settings_that_compute_other_kv_make_another_model(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identify(ModelConfig(checkpoint), tmp_path)
    assert identify(ModelConfig(checkpoint), tmp_path).identity == before.identity
    monkeypatch.setitem(SETTINGS, name, "safetensors")
    after = identify(ModelConfig(checkpoint), tmp_path)
    assert before.is_lasting
    assert after.is_lasting
    assert after.identity.fingerprint != before.identity.fingerprint
    assert identify(ModelConfig(checkpoint, hf_config='{"a": 1}'), tmp_path).identity != after.identity
    assert identify(ModelConfig(checkpoint), tmp_path, kv_format="float8_e5m2").identity != after.identity


def test_unknown_weights_are_others_at_every_start(tmp_path: Path) -> None:
    first, second = (identify(ModelConfig("org/name"), tmp_path) for _ in range(2))
    assert not first.is_lasting
    assert not second.is_lasting
    assert first.identity.fingerprint != second.identity.fingerprint


@pytest.mark.parametrize("is_known", [True, False])
def test_ranks_take_the_weights_that_the_first_of_their_host_found(
    is_known: bool, checkpoint: Path, tmp_path: Path
) -> None:
    contents: dict[int, bytes] = {}
    barrier = Barrier(2, timeout=30)

    class Ranks(Meeting):
        def broadcast(self, content: bytes) -> bytes:
            return self.gather_bytes(content)[0]

    def start(rank: int) -> ServedModel:
        path = checkpoint if rank == 0 and is_known else "org/name"
        config = ModelConfig(checkpoint)
        config.model_path = str(path)
        model: ServedModel = identify(config, tmp_path, Ranks(rank, contents, barrier), rank)
        return model

    with ThreadPoolExecutor(2) as threads:
        models = list(threads.map(start, range(2)))
    assert [model.is_lasting for model in models] == [is_known, is_known]
    digests = {model.identity.config_digest for model in models}
    assert len(digests) == 1
    assert models[0].identity.fingerprint != models[1].identity.fingerprint, "of other heads"
