"""Which file has a model's bases, and what a server does without one."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.bases import ModelBases, older_path, replace_bases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.errors import ConfigError
from krul_backend.segment import ModelIdentity
from krul_sglang.adapter import model_bases
from krul_sglang.adapter.model_bases import BasesFile
from krul_sglang.adapter.unsupported import UnsupportedSetupError
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.learning.background import BackgroundLearningError, LearningProcess, RecentTurns
from krul_sglang.models.checkpoint import Checkpoint, UnknownWeightsError, bases_path
from tests.support.codec_builders import rotary_table
from tests.support.engine_builders import TensorPool
from tests.support.present import present
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
    path = bases_path(Checkpoint(str(model)), cache_dir)
    assert path.parent == cache_dir / "bases"
    assert path.suffix == ".safetensors"
    write_weights(model.with_name("a copy"), b"weights", mtime_s=1_100_000_000)
    assert bases_path(Checkpoint(str(model.with_name("a copy"))), cache_dir) == path
    assert bases_path(Checkpoint(str(model)), cache_dir) == path


def test_other_weights_have_another_file(model: Path, cache_dir: Path) -> None:
    path = bases_path(Checkpoint(str(model)), cache_dir)
    write_weights(model, b"trained", mtime_s=1_100_000_000)
    assert bases_path(Checkpoint(str(model)), cache_dir) != path


def test_each_rank_has_a_file_of_its_own(model: Path, cache_dir: Path) -> None:
    ranks = [(0, 1), (0, 2), (1, 2), (0, 4), (1, 4), (2, 4), (3, 4)]
    assert len({bases_path(Checkpoint(str(model)), cache_dir, *rank) for rank in ranks}) == len(ranks)


@pytest.mark.parametrize("name", ["no/such-model", "empty"])
def test_a_model_without_weights_here_has_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / "empty") if name == "empty" else name
    with pytest.raises(UnknownWeightsError, match=path):
        bases_path(Checkpoint(path), tmp_path / "cache")


def test_weights_that_were_written_after_the_process_started_have_a_file(
    model: Path, cache_dir: Path
) -> None:
    """They have just been downloaded: bases are learned from what is there now."""
    path = bases_path(Checkpoint(str(model)), cache_dir)
    for file in model.iterdir():
        os.utime(file)
    assert bases_path(Checkpoint(str(model)), cache_dir) == path


def test_a_hub_name_has_the_file_of_its_revision_in_the_servers_own_download_folder(tmp_path: Path) -> None:
    hub, cache_dir = tmp_path / "hub", tmp_path / "cache"
    repository = hub / "models--org--name"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    newest, older = (Checkpoint("org/name", revision, str(hub)) for revision in (None, "v2"))
    assert bases_path(newest, cache_dir) != bases_path(older, cache_dir)
    assert bases_path(older, cache_dir) == bases_path(replace(older, revision="b" * 40), cache_dir)
    with pytest.raises(UnknownWeightsError, match="org/name"):
        bases_path(Checkpoint("org/name"), cache_dir)


class LearningInAThread(LearningProcess):
    """Stands for the process: calls what ``learning`` holds, and fails if that does."""

    learning: Callable[[Checkpoint, Path, int], Iterator[str]]

    def __init__(
        self, checkpoint: Checkpoint, cache_dir: Path, tp_size: int, recent: RecentTurns | None = None
    ) -> None:
        self.recent = recent
        self._lines = self.learning(checkpoint, cache_dir, tp_size)
        self.is_closed = False

    def lines(self) -> Iterator[str]:
        return self._lines

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def ended_files() -> Iterator[None]:
    """All files are closed when a test has ended: until then a thread watches each."""
    yield
    while Rank.files:
        Rank.files.pop().served.close()


class Rank:
    """A rank of a server with the strategy ``subspace`` for ``model``."""

    files: ClassVar[list[BasesFile]] = []

    def __init__(self, model: Path, cache_dir: Path, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.checkpoint = Checkpoint(str(model))
        self.path = bases_path(self.checkpoint, cache_dir, tp_rank, tp_size)
        self.identity = ModelIdentity(
            str(model), "d" * 64, "float32", NUM_LAYERS, 2, 8, 8, 4, tp_rank, tp_size
        )
        self._cache_dir = cache_dir
        self.prepared: list[SubspaceCodec] = []
        self.older: list[SubspaceCodec] = []

    def have_learned(self, bases: ModelBases) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        bases.save(self.path)

    def start(self, dtype: torch.dtype = torch.float32, **changed: Any) -> BasesFile:
        pool: Any = TensorPool(replace(SHAPE, dtype=dtype), NUM_LAYERS, num_slots=4)
        return BasesFile(
            self.checkpoint, self._cache_dir, self.identity, pool, **{"rotary": ROTARY, **changed}
        )

    def learn(self, file: BasesFile) -> None:
        """Go on with the start of the only rank."""
        Rank.files.append(file)
        file.learn(RankAgreement(None, 1), self.make_room, self.prepare)

    def make_room(self, num_bytes: int) -> None:
        """There is as much as is wanted."""

    def prepare(self, subspace: SubspaceCodec, is_older: bool) -> None:
        """Stands for what the engine does with bases that came later."""
        (self.older if is_older else self.prepared).append(subspace)

    def serve(self) -> SubspaceCodec:
        """Start where the bases are there."""
        return present(self.start().served.subspace)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bases_serve_a_pool_of_another_type(model: Path, cache_dir: Path, dtype: torch.dtype) -> None:
    """They are learned for bf16; numbers of the pool's own type come back."""
    rank = Rank(model, cache_dir)
    rank.have_learned(make_bases(SHAPE, [2, 1], damage_factor=1.5))
    codec = present(rank.start(dtype).served.subspace)
    assert codec.bases.damage_factor == 1.5
    assert codec.bases.shape.dtype is dtype
    assert {kv.k.dtype for kv in codec.draw(4)} == {dtype}


def test_each_rank_reads_its_own_bases(model: Path, cache_dir: Path) -> None:
    ranks = [Rank(model, cache_dir, tp_rank=rank, tp_size=2) for rank in range(2)]
    for factor, rank in zip((1.0, 2.0), ranks, strict=True):
        rank.have_learned(make_bases(SHAPE, [2, 1], damage_factor=factor))
    assert [rank.serve().bases.damage_factor for rank in ranks] == [1.0, 2.0]


def test_a_server_with_bases_learns_nothing(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_bases, "LearningProcess", None)
    rank = Rank(model, cache_dir)
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    file = rank.start()
    before = file.served.subspace
    rank.learn(file)
    assert file.served.subspace is before is not None
    assert file.served.state == "read at the start"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [None, Path.unlink, truncate, flip_a_bit])
def test_missing_and_damaged_bases_are_learned_while_the_server_serves(
    model: Path, cache_dir: Path, damage: Callable[[Path], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, bases, may_end = Rank(model, cache_dir), make_bases(SHAPE, [2, 1]), threading.Event()
    if damage is not None:
        rank.have_learned(make_bases(SHAPE, [2, 1], seed=1))
        damage(rank.path)

    def learning(self: object, checkpoint: Checkpoint, learn_in: Path, tp_size: int) -> Iterator[str]:
        assert (checkpoint, learn_in, tp_size) == (rank.checkpoint, cache_dir, 1)
        yield "3 of 5"
        may_end.wait(60)
        rank.have_learned(bases)

    monkeypatch.setattr(LearningInAThread, "learning", learning, raising=False)
    monkeypatch.setattr(model_bases, "LearningProcess", LearningInAThread)
    file = rank.start()
    assert file.served.subspace is None
    rank.learn(file)
    wait_until(lambda: file.served.state == "learning: 3 of 5")
    assert file.served.subspace is None
    may_end.set()
    wait_until(lambda: file.served.state == "learned while serving")
    assert file.served.subspace is not None
    assert rank.prepared == [file.served.subspace]
    assert torch.equal(file.served.subspace.bases.groups[0].mean, bases.groups[0].mean)


@pytest.mark.parametrize("cause", ["process", "another shape", "a folder", "nothing"])
def test_a_server_goes_on_without_bases_if_none_can_be_learned(
    model: Path,
    cache_dir: Path,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank = Rank(model, cache_dir)
    expected = {
        "process": "no memory",
        "another shape": "4 layers of .* the model has 3 of",
        "a folder": "no bases in",
        "nothing": "no bases in",
    }[cause]
    rank.have_learned(make_bases(SHAPE, [2, 2]))
    if cause == "a folder":
        make_a_folder(rank.path)
    elif cause != "another shape":
        rank.path.unlink()

    def learning(self: object, *given: object) -> Iterator[str]:
        yield "begins"
        if cause == "process":
            raise BackgroundLearningError("no memory")

    monkeypatch.setattr(LearningInAThread, "learning", learning, raising=False)
    monkeypatch.setattr(model_bases, "LearningProcess", LearningInAThread)
    file = rank.start()
    assert file.served.subspace is None
    caplog.clear()
    rank.learn(file)
    wait_until(lambda: file.served.state.startswith("failed: "))
    assert re.search(expected, file.served.state)
    assert file.served.subspace is None
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert re.search(expected, warning.getMessage())
    assert rank.prepared == []


def test_a_rank_that_does_not_lead_waits_for_its_file(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_bases, "LearningProcess", None)
    monkeypatch.setattr(model_bases, "_POLL_S", 0.01)
    rank = Rank(model, cache_dir, tp_rank=1, tp_size=2)
    rank.have_learned(make_bases(SHAPE, [2, 1], seed=1))
    truncate(rank.path)
    file = rank.start(rank=1, ranks_per_host=2)
    agreement: Any = SimpleNamespace(gather=lambda mine, shape: [torch.ones(1), mine])
    Rank.files.append(file)
    file.learn(agreement, rank.make_room, rank.prepare)
    assert file.served.state == "left to the first rank of this host"
    time.sleep(0.1)
    assert file.served.subspace is None, "the damaged file is still there"
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    wait_until(lambda: file.served.state == "learned while serving")
    assert file.served.subspace is not None


def test_a_first_rank_that_has_its_bases_learns_for_the_others(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    def learning(self: object, *given: object) -> Iterator[str]:
        yield "1 of 2"
        may_end.wait(60)
        has_ended.set()

    monkeypatch.setattr(LearningInAThread, "learning", learning, raising=False)
    monkeypatch.setattr(model_bases, "LearningProcess", LearningInAThread)
    rank = Rank(model, cache_dir, tp_rank=0, tp_size=2)
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    file = rank.start(ranks_per_host=2)
    before = file.served.subspace
    agreement: Any = SimpleNamespace(gather=lambda mine, shape: [mine, torch.zeros(1)])
    Rank.files.append(file)
    file.learn(agreement, rank.make_room, rank.prepare)
    wait_until(lambda: file.served.state == "learning: 1 of 2")
    may_end.set()
    assert has_ended.wait(60)
    wait_until(lambda: file.served.state == "read at the start")
    assert file.served.subspace is before


def test_bases_without_room_on_the_device_leave_the_server_native(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def to(self: ModelBases, device: torch.device) -> ModelBases:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.80 GiB")

    monkeypatch.setattr(model_bases, "LearningProcess", None)
    monkeypatch.setattr(model_bases, "_POLL_S", 0.01)
    rank = Rank(model, cache_dir)
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    with monkeypatch.context() as patch:
        patch.setattr(ModelBases, "to", to)
        file = rank.start()
        rank.learn(file)
    assert file.served.subspace is None
    assert file.served.state == "failed: CUDA out of memory. Tried to allocate 3.80 GiB"
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "--mem-fraction-static" in warning.getMessage()
    # Others, which may be smaller, are taken.
    rank.have_learned(make_bases(SHAPE, [2, 1], seed=1))
    wait_until(lambda: file.served.subspace is not None)


def test_other_errors_with_bases_end_the_start(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(self: ModelBases, device: torch.device) -> ModelBases:
        raise RuntimeError("an illegal memory access was encountered")

    rank = Rank(model, cache_dir)
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    monkeypatch.setattr(ModelBases, "to", to)
    with pytest.raises(RuntimeError, match="illegal"):
        rank.start()


def test_learning_ends_with_the_server(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    was_closed = threading.Event()

    def learning(self: object, *given: object) -> Iterator[str]:
        yield "begins"
        was_closed.wait(60)
        raise BackgroundLearningError("ended by SIGKILL")

    monkeypatch.setattr(LearningInAThread, "learning", learning, raising=False)
    monkeypatch.setattr(LearningInAThread, "close", lambda self: was_closed.set())
    monkeypatch.setattr(model_bases, "LearningProcess", LearningInAThread)
    rank = Rank(model, cache_dir)
    file = rank.start()
    rank.learn(file)
    wait_until(lambda: file.served.state == "learning: begins")
    file.served.close()
    wait_until(lambda: not any(thread.name == "krul-bases" for thread in threading.enumerate()))
    assert was_closed.is_set()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# ---- after the first bases ----


def older_file(rank: Rank, bases: ModelBases) -> None:
    """These were the rank's bases before those that it has."""
    rank.have_learned(bases)
    replace_bases(rank.path, make_bases(SHAPE, [2, 1], seed=9))


def test_older_bases_that_segments_name_are_read_from_beside_the_file(model: Path, cache_dir: Path) -> None:
    rank, before = Rank(model, cache_dir), make_bases(SHAPE, [2, 1])
    older_file(rank, before)
    file = rank.start()
    rank.learn(file)
    assert file.may_come(before.digest)
    wait_until(lambda: bool(rank.older))
    assert [codec.bases.digest for codec in rank.older] == [before.digest]
    assert rank.prepared == []
    # They may have had to make room for others.
    wait_until(lambda: file.may_come(before.digest) and len(rank.older) > 1)


@pytest.mark.parametrize("damage", [Path.unlink, truncate])
def test_bases_that_nobody_has_do_not_come(
    model: Path, cache_dir: Path, damage: Callable[[Path], None]
) -> None:
    rank, before = Rank(model, cache_dir), make_bases(SHAPE, [2, 1])
    older_file(rank, before)
    damage(older_path(rank.path, before.digest))
    file = rank.start()
    rank.learn(file)
    wait_until(lambda: not file.may_come(before.digest))
    assert rank.older == []


def test_bases_may_come_as_long_as_the_first_are_being_learned(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning from the same text gives the same bases."""
    may_end = threading.Event()

    def learning(self: object, *given: object) -> Iterator[str]:
        yield "begins"
        may_end.wait(60)
        raise BackgroundLearningError("no memory")

    monkeypatch.setattr(LearningInAThread, "learning", learning, raising=False)
    monkeypatch.setattr(model_bases, "LearningProcess", LearningInAThread)
    rank = Rank(model, cache_dir)
    file = rank.start()
    rank.learn(file)
    assert file.may_come("a" * 64)
    wait_until(lambda: not file._older.may_come("a" * 64))
    assert file.may_come("a" * 64)
    may_end.set()
    wait_until(lambda: not file.may_come("a" * 64))


def test_bases_that_another_process_wrote_are_taken_at_once(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_bases, "_POLL_S", 0.01)
    rank = Rank(model, cache_dir)
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    file = rank.start()
    rank.learn(file)
    truncate(rank.path)
    wait_until(lambda: "are damaged" in caplog.text or "no bases in" in caplog.text)
    assert file.served.num_had == 1
    others = make_bases(SHAPE, [2, 1], seed=1)
    rank.have_learned(others)
    wait_until(lambda: file.served.num_had == 2)
    assert file.served.subspace is rank.prepared[0]
    assert file.served.subspace.bases.digest == others.digest
    # The same ones again are none.
    rank.have_learned(others)
    time.sleep(0.1)
    assert file.served.num_had == 2


class Relearning:
    """A server whose turns are unlike what its bases were learned from, where learning is ``learning``."""

    def __init__(self, rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[RecentTurns | None] = []
        self.refusal: str | None = None
        rank.have_learned(make_bases(SHAPE, [2, 1]))
        self._rank = rank
        monkeypatch.setattr(LearningInAThread, "learning", self.learning, raising=False)
        monkeypatch.setattr(model_bases, "LearningProcess", self.process)
        monkeypatch.setattr(model_bases, "_POLL_S", 0.01)

    def process(self, *given: Any) -> LearningInAThread:
        process = LearningInAThread(*given)
        self.given.append(process.recent)
        return process

    def learning(self, *given: object) -> Iterator[str]:
        yield "begins"
        if self.refusal is not None:
            raise BackgroundLearningError(self.refusal)
        self._rank.have_learned(make_bases(SHAPE, [2, 1], seed=len(self.given)))


def meet_unlike_turns(file: BasesFile, num_tokens: int = 5000) -> None:
    served = file.served
    served.drift.add_unfamiliar(5000)
    if served.recent is not None:
        num_pages = num_tokens // 4
        keys = [f"page {page}" for page in range(num_pages)]
        served.recent.add(keys, np.arange(num_pages * 4, dtype=np.int64), range(num_pages))


def test_unlike_turns_are_learned_from(model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(model, cache_dir)
    relearning = Relearning(rank, monkeypatch)
    file = rank.start(relearn_within=0.02)
    rank.learn(file)
    time.sleep(0.1)
    assert relearning.given == [], "nothing is unlike yet"
    meet_unlike_turns(file)
    wait_until(lambda: file.served.num_had == 2)
    (given,) = relearning.given
    assert given is not None
    assert given.max_damage == 0.02
    assert sorted(token for piece in given.pieces for token in piece) == list(range(5000))
    wait_until(lambda: file.served.as_dict()["relearned"] == 1)
    assert (file.served.state, file.served.refusal) == ("learned again", None)
    time.sleep(0.1)
    assert len(relearning.given) == 1, "not again for some hours"
    monkeypatch.setattr(file, "_relearn_at_s", time.monotonic())
    wait_until(lambda: file.served.as_dict()["relearned"] == 2)


def test_new_bases_that_are_not_better_are_refused(
    model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(model, cache_dir)
    relearning = Relearning(rank, monkeypatch)
    relearning.refusal = "not clearly better"
    file = rank.start(relearn_within=0.02)
    before = file.served.subspace
    rank.learn(file)
    meet_unlike_turns(file)
    wait_until(lambda: file.served.as_dict()["relearning_refused"] == "not clearly better")
    time.sleep(0.1)
    assert len(relearning.given) == 1
    assert file._relearn_at_s > time.monotonic() + 20 * 3600
    assert (file.served.subspace, file.served.state) == (before, "read at the start")
    assert file.served.num_relearned == 0


@pytest.mark.parametrize("cause", ["switched off", "too few tokens", "other weights"])
def test_bases_are_not_learned_again_if(
    cause: str, model: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(model, cache_dir)
    relearning = Relearning(rank, monkeypatch)
    file = rank.start(relearn_within=None if cause == "switched off" else 0.02)
    rank.learn(file)
    assert (file.served.recent is None) == (cause == "switched off")
    if cause == "other weights":
        file.served.keep_no_text()
    meet_unlike_turns(file, 4000 if cause == "too few tokens" else 5000)
    assert file.served.drift.is_unlike
    time.sleep(0.2)
    assert relearning.given == []


def test_weights_that_left_are_refused(model: Path, cache_dir: Path) -> None:
    rank = Rank(model, cache_dir)
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="there are no weights in"):
        rank.start()


def test_a_model_whose_rotary_embedding_is_unknown_is_refused(model: Path, cache_dir: Path) -> None:
    rank = Rank(model, cache_dir)
    rank.have_learned(make_bases(SHAPE, [2, 1]))
    with pytest.raises(UnsupportedSetupError, match="rotary embedding"):
        rank.start(rotary=None)
