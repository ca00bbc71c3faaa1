"""The files of older bases: kept beside the current one, and not too many of them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.bases import ModelBases, older_path, replace_bases
from tests.support.subspace_builders import make_bases

SHAPE = LayerShape(2, 8, 8, torch.bfloat16)


def replace(path: Path, seed: int) -> str:
    bases = make_bases(SHAPE, [2, 1], seed=seed)
    replace_bases(path, bases)
    # Files are told apart by their times, which a fast test would make equal.
    for number, file in enumerate(sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime_ns)):
        os.utime(file, (1_000_000_000 + number,) * 2)
    return bases.digest


def test_the_last_bases_that_were_replaced_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "bases" / "name.safetensors"
    digests = [replace(path, seed) for seed in range(6)]
    assert ModelBases.load(path).digest == digests[5]
    assert [ModelBases.load(older_path(path, digest)).digest for digest in digests[2:5]] == digests[2:5]
    assert len(list(path.parent.iterdir())) == 4


def test_equal_bases_and_damaged_ones_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "bases" / "name.safetensors"
    replace(path, 0)
    replace(path, 0)
    path.write_bytes(path.read_bytes()[:-1])
    digest = replace(path, 1)
    assert ModelBases.load(path).digest == digest
    assert list(path.parent.iterdir()) == [path]


def test_files_of_other_ranks_and_models_stay(tmp_path: Path) -> None:
    folder = tmp_path / "bases"
    path = folder / "name.safetensors"
    others = [folder / "name-0-of-2.safetensors", folder / "other.safetensors"]
    for other in others:
        for seed in range(2):
            replace(other, seed)
    before = sorted(folder.iterdir())
    for seed in range(5):
        replace(path, seed)
    assert {*before} < {*folder.iterdir()}
