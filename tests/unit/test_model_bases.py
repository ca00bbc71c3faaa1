"""Which file has a model's bases, and what a server says when it cannot use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from krul_backend.codec.interface import LayerShape
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.errors import ConfigError
from krul_backend.segment import ModelIdentity
from krul_sglang.config import KrulConfig
from krul_sglang.engine.attach.model_bases import load_subspace
from krul_sglang.engine.common.unsupported import UnsupportedSetupError
from krul_sglang.models.checkpoint import UnknownWeightsError, bases_path
from tests.support.codec_builders import rotary_table
from tests.support.engine_builders import TensorPool
from tests.support.subspace_builders import make_bases

NUM_LAYERS = 3
SHAPE = LayerShape(2, 8, 8, torch.bfloat16)
ROTARY = rotary_table(8)


def write_weights(model: Path, content: bytes, mtime_s: int = 1_000_000_000) -> None:
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(content)
    for file in model.iterdir():
        os.utime(file, (mtime_s, mtime_s))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_weights(tmp_path / "model", b"weights")
    return tmp_path / "model"


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_the_same_weights_have_the_same_file_wherever_they_are(model: Path, cache_dir: Path) -> None:
    path = bases_path(str(model), cache_dir)
    assert path.parent == cache_dir / "bases"
    assert path.suffix == ".safetensors"
    write_weights(model.with_name("a copy"), b"weights", mtime_s=1_100_000_000)
    assert bases_path(str(model.with_name("a copy")), cache_dir) == path
    assert bases_path(str(model), cache_dir) == path


def test_other_weights_have_another_file(model: Path, cache_dir: Path) -> None:
    path = bases_path(str(model), cache_dir)
    write_weights(model, b"trained", mtime_s=1_100_000_000)
    assert bases_path(str(model), cache_dir) != path


def test_each_rank_has_a_file_of_its_own(model: Path, cache_dir: Path) -> None:
    ranks = [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({bases_path(str(model), cache_dir, *rank) for rank in ranks}) == len(ranks)


@pytest.mark.parametrize("name", ["no/such-model", "empty"])
def test_a_model_without_weights_here_has_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / "empty") if name == "empty" else name
    with pytest.raises(UnknownWeightsError, match=path):
        bases_path(path, tmp_path / "cache")


def test_weights_that_were_written_after_the_process_started_have_a_file(
    model: Path, cache_dir: Path
) -> None:
    """They have just been downloaded: bases are learned from what is there now."""
    path = bases_path(str(model), cache_dir)
    for file in model.iterdir():
        os.utime(file)
    assert bases_path(str(model), cache_dir) == path


class Rank:
    """A rank of a server with the strategy ``subspace`` for ``model``."""

    def __init__(self, model: Path, cache_dir: Path, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.path = bases_path(str(model), cache_dir, tp_rank, tp_size)
        self._config = replace(KrulConfig(), strategy="subspace", cache_dir=str(cache_dir))
        self._identity = ModelIdentity(
            str(model), "d" * 64, "float32", NUM_LAYERS, 2, 8, 8, 4, tp_rank, tp_size
        )

    def learn(self, bases: ModelBases) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        bases.save(self.path)

    def start(self, dtype: torch.dtype = torch.float32, **changed: Any) -> SubspaceCodec:
        pool: Any = TensorPool(replace(SHAPE, dtype=dtype), NUM_LAYERS, num_slots=4)
        return load_subspace(self._config, self._identity, pool, **{"rotary": ROTARY, **changed})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bases_serve_a_pool_of_another_type(model: Path, cache_dir: Path, dtype: torch.dtype) -> None:
    """They are learned for bf16; numbers of the pool's own type come back."""
    rank = Rank(model, cache_dir)
    rank.learn(make_bases(SHAPE, [2, 1], damage_factor=1.5))
    codec = rank.start(dtype)
    assert codec.bases.damage_factor == 1.5
    assert codec.bases.shape.dtype is dtype
    assert {kv.k.dtype for kv in codec.draw(4)} == {dtype}


def test_each_rank_reads_its_own_bases(model: Path, cache_dir: Path) -> None:
    ranks = [Rank(model, cache_dir, tp_rank=rank, tp_size=2) for rank in range(2)]
    for factor, rank in zip((1.0, 2.0), ranks, strict=True):
        rank.learn(make_bases(SHAPE, [2, 1], damage_factor=factor))
    assert [rank.start().bases.damage_factor for rank in ranks] == [1.0, 2.0]


@pytest.mark.parametrize(("tp_size", "options"), [(1, ""), (2, " --tp-size 2")])
def test_a_model_that_nothing_was_learned_of_is_refused_with_the_command(
    model: Path, cache_dir: Path, tp_size: int, options: str
) -> None:
    rank = Rank(model, cache_dir, tp_size=tp_size)
    with pytest.raises(ConfigError) as error:
        rank.start()
    assert f"`krul-sglang learn --model-path {model}{options}`" in str(error.value)
    assert str(rank.path) in str(error.value)
    assert "\n" not in str(error.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, make_a_folder])
def test_a_damaged_file_is_refused_with_the_command(
    model: Path, cache_dir: Path, damage: Callable[[Path], None]
) -> None:
    rank = Rank(model, cache_dir)
    rank.learn(make_bases(SHAPE, [2, 1]))
    damage(rank.path)
    with pytest.raises(ConfigError, match=f"`krul-sglang learn --model-path {model}`") as error:
        rank.start()
    assert str(rank.path) in str(error.value)


@pytest.mark.parametrize(
    ("shape", "groups"), [(replace(SHAPE, num_kv_heads=1), [2, 1]), (SHAPE, [2, 2])], ids=["heads", "layers"]
)
def test_bases_of_another_shape_are_refused(
    model: Path, cache_dir: Path, shape: LayerShape, groups: list[int]
) -> None:
    rank = Rank(model, cache_dir)
    rank.learn(make_bases(shape, groups))
    with pytest.raises(ConfigError, match=f"{sum(groups)} layers of .* the model has 3 of"):
        rank.start()


def test_weights_that_left_are_refused(model: Path, cache_dir: Path) -> None:
    rank = Rank(model, cache_dir)
    rank.learn(make_bases(SHAPE, [2, 1]))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="there are no weights in"):
        rank.start()


def test_a_model_whose_rotary_embedding_is_unknown_is_refused(model: Path, cache_dir: Path) -> None:
    rank = Rank(model, cache_dir)
    rank.learn(make_bases(SHAPE, [2, 1]))
    with pytest.raises(UnsupportedSetupError, match="rotary embedding"):
        rank.start(rotary=None)
