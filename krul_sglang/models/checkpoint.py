"""Finds out which weights a checkpoint has: a hash of its files, or the commit in the hub's cache."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import psutil
import xxhash

from krul_backend.errors import ConfigError
from krul_sglang.json_file import write_json

logger = logging.getLogger(__name__)

HASHES_FILE = "weight-hashes.json"

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
_HashEntry = Annotated[list[Any], msgspec.Meta(min_length=4, max_length=4)]
_YOUNGEST_REMEMBERED_S = 2.0


class UnknownWeightsError(Exception):
    """The files may not be what was loaded, although they are there."""


@dataclass(frozen=True)
class Checkpoint:
    """The model that a server is started with: a local folder, or a hub name.

    ``revision`` and ``download_dir`` are the server's arguments of these names, for a hub name;
    ``trust_remote_code`` lets code that comes with the model make its tokenizer.
    """

    path: str
    revision: str | None = None
    download_dir: str | None = None
    trust_remote_code: bool = False

    def weights_digest(self, cache_dir: Path, loaded_s: float | None = None) -> str:
        """A text that identifies the weights: the commit of a hub name, a hash of the files of a folder.

        For ``loaded_s`` see ``files_digest``.

        Raises:
            UnknownWeightsError: there are no such weights, or they may not be what was loaded.
            OSError: they cannot be read.
        """
        folder = Path(self.path).expanduser()
        if folder.exists():
            return files_digest(folder, cache_dir, loaded_s)
        snapshot = self._snapshot()
        if snapshot is None:
            raise UnknownWeightsError(f"{self.path} is no local folder, and not in the local hub cache")
        return f"commit {snapshot.name}"

    def num_weight_bytes(self) -> int:
        """The size of the files with weights; 0 if there are none here."""
        found = self._found()
        files = [] if found is None else [found] if found.is_file() else [*found.iterdir()]
        return sum(file.stat().st_size for file in files if file.suffix in _WEIGHT_SUFFIXES)

    def config(self) -> Any:
        """What its ``config.json`` says. Raises ConfigError if it is not here, or cannot be read."""
        found = self._found()
        if found is None:
            raise ConfigError(f"{self.path} is no local folder, and not in the local hub cache")
        try:
            return orjson.loads((found / "config.json").read_bytes())
        except (OSError, orjson.JSONDecodeError) as error:
            raise ConfigError(f"{found / 'config.json'} cannot be read: {error}") from error

    def _found(self) -> Path | None:
        folder = Path(self.path).expanduser()
        return folder if folder.exists() else self._snapshot()

    def _snapshot(self) -> Path | None:
        """The folder of this revision in the hub's local cache; None if it is not there."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        for cache_dir in dict.fromkeys((self.download_dir, None)):
            try:
                found = snapshot_download(
                    self.path, revision=self.revision, cache_dir=cache_dir, local_files_only=True
                )
            except (HFValidationError, LocalEntryNotFoundError):
                continue
            return Path(found)
        return None


def bases_path(checkpoint: Checkpoint, cache_dir: Path, tp_rank: int = 0, tp_size: int = 1) -> Path:
    """The file of the bases that were learned, or are to be learned, from the weights of a checkpoint, which
    have been loaded by now.

    ``tp_rank`` of ``tp_size`` has bases of its own heads.

    Raises:
        UnknownWeightsError: there are no such weights.
        OSError: they cannot be read.
    """
    digest = checkpoint.weights_digest(cache_dir, loaded_s=time.time())
    name = xxhash.xxh3_64_hexdigest(digest.encode())
    rank = "" if tp_size == 1 else f"-{tp_rank}-of-{tp_size}"
    return cache_dir / "bases" / f"{name}{rank}.safetensors"


def files_digest(path: Path, cache_dir: Path, loaded_s: float | None = None) -> str:
    """A hash of the names and contents of a checkpoint's files: of a folder, or of a single file.

    Hashes of single files are kept in ``cache_dir``, so that unchanged ones are read only once. ``loaded_s``:
    when the weights may have been loaded, in seconds of the system's clock; None for the start of this
    process.

    Raises:
        UnknownWeightsError: no weights, or files that were written later than that.
        OSError: they cannot be read.
    """
    hashes_path = cache_dir / HASHES_FILE
    start_s = time.perf_counter()
    suffixes = _WEIGHT_SUFFIXES + _OTHER_SUFFIXES
    found = [path] if path.is_file() else sorted(path.iterdir())
    files = [
        file
        for file in found
        if file.suffix in suffixes and file.name not in _BESIDE_THE_POINT and file.is_file()
    ]
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in files):
        raise UnknownWeightsError(f"there are no weights in {path}")
    loaded_s = psutil.Process().create_time() if loaded_s is None else loaded_s
    known = _read_hashes(hashes_path)
    with ThreadPoolExecutor(max_workers=_HASHED_AT_ONCE) as threads:
        hashes = list(threads.map(lambda file: _hash_of(file, known, loaded_s), files))
    entries = {str(file.resolve()): entry for file, entry in zip(files, hashes, strict=True)}
    if any(known.get(name) != entry for name, entry in entries.items()):
        logger.info("krul: read the weights in %.1f s to know them again", time.perf_counter() - start_s)
        _write_hashes(hashes_path, known | entries)
    names_and_hashes = [[file.name, entry[-1]] for file, entry in zip(files, hashes, strict=True)]
    return xxhash.xxh3_128_hexdigest(orjson.dumps(names_and_hashes))


def _hash_of(file: Path, known: Mapping[str, list[Any]], loaded_s: float) -> list[Any]:
    """``[size, mtime in ns, inode, hash]`` of a file, the hash from ``known`` if the rest is the same.

    Raises:
        UnknownWeightsError: the file changed after the engine may have loaded it.
    """
    before = file.stat()
    stamp = [before.st_size, before.st_mtime_ns, before.st_ino]
    if before.st_mtime > loaded_s:
        raise UnknownWeightsError(f"{file} was written while the server started")
    entry = known.get(str(file.resolve()))
    if entry is not None and entry[:-1] == stamp:
        return entry
    with file.open("rb", buffering=0) as content:
        digest = hashlib.file_digest(content, xxhash.xxh3_128)
        after = os.fstat(content.fileno())
    if [after.st_size, after.st_mtime_ns, after.st_ino] != stamp:
        raise UnknownWeightsError(f"{file} was written while it was read")
    return [*stamp, digest.hexdigest()]


def _read_hashes(path: Path) -> dict[str, list[Any]]:
    """What ``_write_hashes`` wrote; empty if the file is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _HashEntry])
    except (OSError, msgspec.MsgspecError):
        return {}


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
