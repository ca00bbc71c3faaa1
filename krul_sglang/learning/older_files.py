"""Keeps the files of older bases beside the current one: what was stored in them can be decoded on."""

from __future__ import annotations

from pathlib import Path

from krul_backend.atomic_file import replacing
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.errors import CodecError

_MOST_OLDER = 3
"""Files of older bases; the one that was written first goes."""

_DIGEST_CHARACTERS = 64


def older_path(path: Path, digest: str) -> Path:
    """Where the bases of this digest lie that were once in ``path``, or in the same place elsewhere."""
    return path.with_name(f"{path.stem}-{digest}{path.suffix}")


def write_older(path: Path, digest: str, content: bytes) -> Path:
    """Keep the bytes of a file of bases beside the current one, ``path``. Returns where.

    Raises:
        OSError: it cannot be written.
    """
    older = older_path(path, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(older) as file:
        file.write(content)
    pattern = older_path(path, "[0-9a-f]" * _DIGEST_CHARACTERS).name
    kept = sorted(path.parent.glob(pattern), key=lambda each: each.stat().st_mtime_ns)
    for surplus in kept[:-_MOST_OLDER]:
        surplus.unlink(missing_ok=True)
    return older


def replace_bases(path: Path, bases: ModelBases) -> None:
    """Write ``bases`` to the current file, ``path``; those that were there become older ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        before = ModelBases.load(path).digest
    except CodecError:
        # There were none, or damaged ones.
        before = bases.digest
    if before != bases.digest:
        write_older(path, before, path.read_bytes())
    bases.save(path)
