"""Finds out which model is served: the identity that stored KV must match to be used again."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import psutil
import xxhash

from krul_backend.codec.interface import LayerShape
from krul_backend.segment import ModelIdentity
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.json_file import write_json

logger = logging.getLogger(__name__)

HASHES_FILE = "weight-hashes.json"

_SETTINGS = (
    "dtype",
    "json_model_override_args",
    "load_format",
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "quantization",
    "quantize_and_serve",
    "revision",
    "rl_on_policy_target",
    "trust_remote_code",
)
"""Server arguments that change what is computed from the same files."""
_OTHER_SOURCES = (
    "kt_weight_path",
    "modelopt_checkpoint_restore_path",
    "quantization_param_path",
    "rl_quant_profile",
)
"""Server arguments that bring weights or scales from elsewhere than the model's folder."""
_FORMATS_OF_FILES = frozenset(
    {
        *("auto", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "layered", "mistral"),
        *("npcache", "presharded", "pt", "runai_streamer", "safetensors", "sharded_state"),
    }
)
"""Load formats that read the files at the top of the model's folder, and nothing else."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_OTHER_SUFFIXES = (".json", ".py")
_BESIDE_THE_POINT = frozenset(
    {
        *("added_tokens.json", "chat_template.json", "generation_config.json", "special_tokens_map.json"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.json", "trainer_state.json", "rng_state.pt"),
        *("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    }
)
"""Files of a model's folder that change no KV of given token ids."""

_HASHED_AT_ONCE = 4
_PIECE_BYTES = 8 << 20
_YOUNGEST_REMEMBERED_S = 2.0


def identify_model(
    model_config: Any,
    settings: Mapping[str, Any],
    shape: LayerShape,
    agreement: RankAgreement,
    *,
    cache_dir: Path,
    kv_format: str,
    page_size: int,
    num_layers: int,
    tp_rank: int,
    tp_size: int,
    ranks_per_host: int,
) -> ServedModel:
    """Identify the model whose KV this rank's pool will hold. Every rank calls it at the same point.

    ``model_config`` is SGLang's, ``settings`` are the resolved server arguments, ``kv_format`` names the
    pool's elements. The first rank of each host reads the weights; a rank's KV depends on the weights of all
    ranks. If the weights cannot be identified, the identity is a random one: neither another server nor this
    one after a restart will find its KV.
    """
    mine = b""
    if tp_rank % ranks_per_host == 0:
        mine = (weights_digest(model_config, settings, cache_dir) or "unknown").encode()
    of_hosts = [digest for digest in agreement.gather_bytes(mine) if digest]
    is_known = b"unknown" not in of_hosts
    weights = b" ".join(of_hosts) if is_known else agreement.broadcast(os.urandom(16))
    config = model_config.hf_config.to_json_string(use_diff=False)
    named = repr([(name, str(settings[name])) for name in _SETTINGS])
    quantization = repr(model_config.quantization)
    digest = hashlib.sha256()
    for part in (config.encode(), named.encode(), quantization.encode(), weights):
        digest.update(len(part).to_bytes(8, "little") + part)
    identity = ModelIdentity(
        name=str(model_config.model_path),
        config_digest=digest.hexdigest(),
        dtype=kv_format,
        num_layers=num_layers,
        num_kv_heads=shape.num_kv_heads,
        k_head_dim=shape.k_head_dim,
        v_head_dim=shape.v_head_dim,
        page_size=page_size,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )
    return ServedModel(identity, is_lasting=is_known)


def weights_digest(model_config: Any, settings: Mapping[str, Any], cache_dir: Path) -> str | None:
    """A text that identifies these weights; None, with a warning, if they cannot be identified.

    For a hub name it is the commit that the local hub cache has of it. For a local folder it is a hash of all
    bytes of its weights and settings: a sample would miss a fix of a few rows, and reading costs less than
    loading does. The hashes of files are kept in ``cache_dir``, so that unchanged files are read only once.
    """
    try:
        unknown = _why_unknown(model_config, settings)
        if unknown is None:
            path = Path(model_config.model_path).expanduser()
            if path.exists():
                return _digest_of_files(path, cache_dir / HASHES_FILE)
            commit = _hub_commit(str(model_config.model_path), model_config.revision, settings)
            if commit is not None:
                return f"commit {commit}"
            unknown = f"{model_config.model_path} is no local folder, and not in the local hub cache"
    except (OSError, _UnknownWeightsError) as error:
        unknown = str(error)
    logger.warning("krul: KV of this server will not be found after a restart, nor by others: %s", unknown)
    return None


class _UnknownWeightsError(Exception):
    """The files may not be what was loaded, although they are there."""


def _why_unknown(model_config: Any, settings: Mapping[str, Any]) -> str | None:
    load_format = getattr(settings["load_format"], "value", settings["load_format"])
    if load_format not in _FORMATS_OF_FILES:
        return f"with load format {load_format} the weights are not those of the model's files"
    if getattr(model_config, "model_weights", None):
        return f"the weights come from {model_config.model_weights}"
    for name in _OTHER_SOURCES:
        if settings[name]:
            return f"{name} brings weights from {settings[name]}"
    if "qlora_adapter" in str(settings["model_loader_extra_config"]):
        return "an adapter is merged into the weights"
    return None


def _hub_commit(name: str, revision: str | None, settings: Mapping[str, Any]) -> str | None:
    """The commit of the snapshot that the engine has loaded; None if the cache has none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    for cache_dir in (settings["download_dir"], None):
        try:
            snapshot = snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
        except (HFValidationError, LocalEntryNotFoundError):
            continue
        return Path(snapshot).name
    return None


def _digest_of_files(path: Path, hashes_path: Path) -> str:
    """A hash of the names and contents of a checkpoint's files: of a folder, or of a single file."""
    start_s = time.perf_counter()
    suffixes = _WEIGHT_SUFFIXES + _OTHER_SUFFIXES
    found = [path] if path.is_file() else sorted(path.iterdir())
    files = [
        file
        for file in found
        if file.suffix in suffixes and file.name not in _BESIDE_THE_POINT and file.is_file()
    ]
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in files):
        raise _UnknownWeightsError(f"there are no weights in {path}")
    engine_start_s = psutil.Process().create_time()
    known = _read_hashes(hashes_path)
    with ThreadPoolExecutor(max_workers=_HASHED_AT_ONCE) as threads:
        hashes = list(threads.map(lambda file: _hash_of(file, known, engine_start_s), files))
    entries = {str(file.resolve()): entry for file, entry in zip(files, hashes, strict=True)}
    if any(known.get(name) != entry for name, entry in entries.items()):
        logger.info("krul: read the weights in %.1f s to know them again", time.perf_counter() - start_s)
        _write_hashes(hashes_path, known | entries)
    names_and_hashes = [[file.name, entry[-1]] for file, entry in zip(files, hashes, strict=True)]
    return xxhash.xxh3_128_hexdigest(orjson.dumps(names_and_hashes))


def _hash_of(file: Path, known: Mapping[str, list[Any]], engine_start_s: float) -> list[Any]:
    """``[size, mtime in ns, inode, hash]`` of a file, the hash from ``known`` if the rest is the same.

    Raises:
        _UnknownWeightsError: the file changed after the engine may have loaded it.
    """
    before = file.stat()
    stamp = [before.st_size, before.st_mtime_ns, before.st_ino]
    if before.st_mtime > engine_start_s:
        raise _UnknownWeightsError(f"{file} was written while the server started")
    entry = known.get(str(file.resolve()))
    if entry is not None and entry[:-1] == stamp:
        return entry
    digest = xxhash.xxh3_128()
    piece = bytearray(_PIECE_BYTES)
    with file.open("rb", buffering=0) as content:
        while num_bytes := content.readinto(piece):
            digest.update(memoryview(piece)[:num_bytes])
        after = os.fstat(content.fileno())
    if [after.st_size, after.st_mtime_ns, after.st_ino] != stamp:
        raise _UnknownWeightsError(f"{file} was written while it was read")
    return [*stamp, digest.hexdigest()]


def _read_hashes(path: Path) -> dict[str, list[Any]]:
    """What ``_write_hashes`` wrote; empty if the file is missing or damaged."""
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: entry for name, entry in content.items() if isinstance(entry, list) and len(entry) == 4}


def _write_hashes(path: Path, entries: Mapping[str, list[Any]]) -> None:
    """Write the hashes of files, except of those that changed a moment ago.

    A second change within the clock's step would leave the same time behind.
    """
    oldest_ns = (time.time() - _YOUNGEST_REMEMBERED_S) * 1e9
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json({name: entry for name, entry in entries.items() if entry[1] < oldest_ns}, path)
    except OSError as error:
        logger.warning("krul: %s could not be written, weights are read again next time: %s", path, error)
