"""Finds the bases that the served model's KV is compressed in, or has them learned while it is served."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from krul_backend.atomic_file import replacing
from krul_backend.codec.coefficients.coders import FixedWidthCoder, RansCoder
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.errors import CodecError, ConfigError
from krul_backend.segment import ModelIdentity
from krul_sglang.engine.attach.shared_bases import SharedBases
from krul_sglang.engine.budget.served_bases import ServedBases
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.unsupported import FOREIGN_ROTARY
from krul_sglang.learning.background import LearningProcess
from krul_sglang.models.checkpoint import Checkpoint, UnknownWeightsError, bases_path

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class BasesFile:
    """The file of one rank's bases. One rank of each host has them learned for all, if one lacks its own.

    ``served`` holds the bases, which are read here if the file is there and sound; if there is none, that of
    ``shared`` is taken. What is read is put there.

    Raises:
        ConfigError: the weights cannot be identified, so no file is theirs.
        UnsupportedSetupError: a model whose keys keep their rotary embedding.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        cache_dir: Path,
        model: ModelIdentity,
        pool: DevicePool,
        rotary: RotaryTable | None,
        shared: SharedBases | None = None,
    ) -> None:
        if rotary is None:
            raise FOREIGN_ROTARY.error(model.name)
        self._checkpoint = checkpoint
        self._cache_dir = cache_dir
        self._model = model
        self._pool = pool
        self._rotary = rotary
        self._shared = shared
        try:
            self.path = bases_path(checkpoint, cache_dir, model.tp_rank, model.tp_size)
        except (UnknownWeightsError, OSError) as error:
            raise ConfigError(f'strategy = "subspace": no bases can be found: {error}') from error
        # Threads that copy change what torch would say later.
        self._num_cores = torch.get_num_threads()
        self._process: LearningProcess | None = None
        self._is_closed = threading.Event()
        self.served = ServedBases(end=self._end)
        state = "read at the start"
        if not self.path.exists() and self._copy_shared():
            state = "found in the store"
        self._stamp = _stamp(self.path)
        if self._stamp is None:
            return
        try:
            self.served.have(self._load(), state)
        except CodecError as error:
            logger.warning("krul: %s", error)

    def learn(
        self, agreement: RankAgreement, ranks_per_host: int, prepare: Callable[[SubspaceCodec], None]
    ) -> None:
        """Have the bases learned that ranks of this host lack. Every rank calls it at the same point.

        Returns at once. ``prepare`` is called on a thread with bases that came later, before any turn is
        stored in them.
        """
        is_there = torch.tensor([self.served.subspace is not None], dtype=torch.float64)
        of_ranks = agreement.gather(is_there, (1,))
        assert of_ranks is not None
        leader = self._model.tp_rank // ranks_per_host * ranks_per_host
        if all(bool(of_rank.item()) for of_rank in of_ranks[leader : leader + ranks_per_host]):
            return
        is_leader = self._model.tp_rank == leader
        if not is_leader and self.served.subspace is not None:
            return

        def load() -> SubspaceCodec:
            with self._pool.streams.as_current(), self._pool.streams.on_cores(self._num_cores):
                subspace = self._load()
                prepare(subspace)
                # Other threads use the bases on streams of their own.
                self._pool.streams.synchronize()
            return subspace

        self.served.follow(self._learn() if is_leader else self._wait_for_leader(), load)

    def _copy_shared(self) -> bool:
        """Write the store's bases to the file; False if there are none."""
        content = None if self._shared is None else self._shared.get()
        if content is None:
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:
                file.write(content)
        except OSError as error:
            logger.warning("krul: the store's bases cannot be written to %s: %s", self.path, error)
            return False
        return True

    def _learn(self) -> Iterator[str]:
        self._process = LearningProcess(self._checkpoint, self._cache_dir, self._model.tp_size)
        if self._is_closed.is_set():
            self._process.close()
        yield from self._process.lines()

    def _wait_for_leader(self) -> Iterator[str]:
        yield "by the first rank of this host"
        while _stamp(self.path) in (None, self._stamp) and not self._is_closed.wait(_POLL_S):
            pass

    def _end(self) -> None:
        self._is_closed.set()
        if self._process is not None:
            self._process.close()

    def _load(self) -> SubspaceCodec:
        """Read the file.

        Raises:
            CodecError: it is missing or damaged, or the bases are for other layers than the model's.
        """
        bases, pool = ModelBases.load(self.path), self._pool
        learned = replace(bases.shape, dtype=pool.shape.dtype)
        if learned != pool.shape or bases.num_layers != pool.num_layers:
            raise CodecError(
                f"the bases in {self.path} are for {bases.num_layers} layers of {bases.shape}, the model has "
                f"{pool.num_layers} of {pool.shape}"
            )
        if self._shared is not None:
            self._shared.put(self.path, bases.digest)
        of_pool = ModelBases(pool.shape, bases.groups, bases.damage_factor)
        return SubspaceCodec(of_pool.to(pool.device), self._rotary, (RansCoder(), FixedWidthCoder()))


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells one version of a file from another; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
