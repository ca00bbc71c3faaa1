"""Finds the bases that the served model's KV is compressed in, or has them learned while it is served."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from krul_backend.atomic_file import replacing
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.errors import CodecError, ConfigError, KrulError
from krul_backend.memory import is_out_of_memory
from krul_backend.segment import ModelIdentity
from krul_sglang.adapter.unsupported import FOREIGN_ROTARY, SCALED_BASES
from krul_sglang.engine.budget import OlderBases, RecentText, ServedBases, SharedBases, TextDrift
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.learning.background import LearningProcess, RecentTurns
from krul_sglang.models.checkpoint import Checkpoint, UnknownWeightsError, bases_path

logger = logging.getLogger(__name__)

_POLL_S = 1.0

_LONGEST_LEARNING_S = 3600.0
"""For so long segments are kept whose bases may be those that are being learned."""

_LEAST_RECENT_TOKENS = 4096
"""Bases are not learned again from fewer tokens of recent turns."""

_RELEARN_EVERY_S = 4 * 3600.0
"""Bases are learned again this long after the last time at the earliest."""

_AFTER_REFUSAL_S = 24 * 3600.0
"""The same if what was learned last was not better: other turns may have come."""


class BasesFile:
    """The file of one rank's bases. One rank of each host has them learned for all, if one lacks its own. Of
    latent KV all ranks have the same file.

    ``served`` holds the bases, which are read here if the file is there and sound; if there is none, that of
    ``shared`` is taken. What is read is put there. Bases are learned again if turns are unlike what they were
    learned from, to store recent turns within ``relearn_within`` nats; None: never.

    Segments are decoded in older bases, too. A codec asks for these (``may_come``), and what comes is added
    to the codec: a circle that is closed by ``learn``, before the first segment is decoded.

    Raises:
        ConfigError: the weights cannot be identified, so no file is theirs.
        UnsupportedSetupError: a model with a rotary embedding (``has_rotary``) that its keys keep, or a pool
            with scales.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        cache_dir: Path,
        model: ModelIdentity,
        pool: DevicePool,
        rotary: RotaryTable | None,
        shared: SharedBases | None = None,
        *,
        has_rotary: bool = True,
        rank: int = 0,
        ranks_per_host: int = 1,
        relearn_within: float | None = None,
    ) -> None:
        if rotary is None and has_rotary:
            raise FOREIGN_ROTARY.error(model.name)
        if pool.is_scaled:
            raise SCALED_BASES.error(model.dtype)
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
        # Until then the first bases may come.
        self._first_until_s = 0.0
        self._rank, self._ranks_per_host = rank, ranks_per_host
        # That learns for all ranks of this host.
        self._leader = rank // ranks_per_host * ranks_per_host
        self._relearn_within = relearn_within
        self._relearn_at_s = 0.0
        self._make_room: Callable[[int], None]
        self._prepare: Callable[[SubspaceCodec, bool], None]
        self._older = OlderBases(self.path, shared, self._add_older)
        learns_again = relearn_within is not None and rank == self._leader
        recent = RecentText(model.page_size) if learns_again else None
        self.served = ServedBases(TextDrift(model.name, rank), recent, self._end)
        state = "read at the start"
        if not self.path.exists() and self._copy_shared():
            state = "found in the store"
        self._stamp = _stamp(self.path)
        self._has_no_room = False
        if self._stamp is None:
            return
        try:
            self.served.have(self._codec(self._read()), state)
        except CodecError as error:
            logger.warning("krul: %s", error)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._has_no_room = True
            self.served.state = f"failed: {error}"
            logger.warning(
                "krul: there is no memory for the bases on %s, turns stay native; start with a lower "
                "--mem-fraction-static: %s",
                pool.device,
                error,
            )

    def learn(
        self,
        agreement: RankAgreement,
        make_room: Callable[[int], None],
        prepare: Callable[[SubspaceCodec, bool], None],
    ) -> None:
        """Have the bases learned that ranks of this host lack. Every rank calls it at the same point.

        Returns at once. From here on newer bases are taken whenever the file changes. On a thread
        ``make_room`` is called with the bytes that bases which came later will take of the device, and raises
        if they have no room; ``prepare`` with these bases, before any turn is stored in them, and whether
        they are older ones, in which none will be.
        """
        self._make_room = make_room
        self._prepare = prepare
        # What has no room now would have none either if it were learned.
        is_there = self.served.subspace is not None or self._has_no_room
        of_ranks = agreement.gather(torch.tensor([is_there], dtype=torch.float64), (1,))
        assert of_ranks is not None
        is_leader = self._rank == self._leader
        of_host = of_ranks[self._leader : self._leader + self._ranks_per_host]
        lacks = not all(bool(of_rank.item()) for of_rank in of_host)
        if lacks and (is_leader or not is_there):
            self._first_until_s = time.monotonic() + _LONGEST_LEARNING_S
        if not is_there:
            self.served.state = "learning" if is_leader else "left to the first rank of this host"
        threading.Thread(
            target=self._watch, args=(is_leader and lacks,), name="krul-bases", daemon=True
        ).start()

    def may_come(self, digest: str) -> bool:
        """Whether bases with this digest, which a stored segment names, may come. Does not wait."""
        # Learning from the program's own text gives the same bases again.
        return self._older.may_come(digest) or time.monotonic() < self._first_until_s

    def _watch(self, learns_first: bool) -> None:
        """Have the first bases learned, if that is to be done here. Then bring newer ones, until the server
        ends."""
        if learns_first:
            self._learn_first()
        while not self._is_closed.wait(_POLL_S):
            if _stamp(self.path) not in (None, self._stamp):
                try:
                    self._take()
                except Exception as error:
                    logger.warning("krul: the bases stay as they are: %s", error)
            elif self.served.drift.is_unlike and time.monotonic() >= self._relearn_at_s:
                self._relearn()

    def _learn_first(self) -> None:
        failure = self._learn("learning")
        try:
            if failure is None and not self._is_closed.is_set():
                self._take()
        except Exception as error:
            failure = str(error)
        self._first_until_s = 0.0
        if failure is not None and not self._is_closed.is_set():
            # Whatever it is, the server goes on without bases.
            logger.warning("krul: there are no bases of the model, turns stay native: %s", failure)
            self.served.state = f"failed: {failure}"

    def _learn(self, doing: str, recent: RecentTurns | None = None) -> str | None:
        """Have bases learned; meanwhile the state says how far that is. Returns why it failed, if it did."""
        before = self.served.state
        try:
            self._process = LearningProcess(self._checkpoint, self._cache_dir, self._model.tp_size, recent)
            if self._is_closed.is_set():
                self._process.close()
            for step in self._process.lines():
                self.served.state = f"{doing}: {step}"
                logger.info("krul: bases: %s", self.served.state)
        except Exception as error:
            logger.debug("krul: how learning failed", exc_info=True)
            return str(error)
        finally:
            self.served.state = before
        return None

    def _take(self) -> None:
        """Read the file. Its bases are the newest from here on, unless they are already."""
        self._stamp = _stamp(self.path)
        bases, before = self._read(), self.served.subspace
        if before is None or before.bases.digest != bases.digest:
            state = "learned while serving" if before is None else "learned again"
            self.served.have(self._prepared(bases, is_older=False), state)
        self._first_until_s = 0.0

    def _relearn(self) -> None:
        """Have the bases learned again, from recent turns as well, if there are enough of them."""
        recent = self.served.recent
        pieces = [] if recent is None else recent.pieces()
        if self._relearn_within is None or sum(map(len, pieces)) < _LEAST_RECENT_TOKENS:
            return
        refusal = self._learn("learning again", RecentTurns(pieces, self._relearn_within))
        if self._is_closed.is_set():
            return
        self._relearn_at_s = time.monotonic() + (_RELEARN_EVERY_S if refusal is None else _AFTER_REFUSAL_S)
        self.served.relearned(self._rank, refusal)

    def _copy_shared(self) -> bool:
        """Write the store's bases to the file; False if there are none."""
        try:
            content = None if self._shared is None else self._shared.get()
            if content is None:
                return False
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:
                file.write(content)
        except (KrulError, OSError) as error:
            logger.warning("krul: the store's bases cannot be copied to %s: %s", self.path, error)
            return False
        return True

    def _end(self) -> None:
        self._is_closed.set()
        if self._process is not None:
            self._process.close()

    def _add_older(self, bases: ModelBases) -> None:
        self._prepared(bases, is_older=True)
        logger.info("krul: segments in older bases %s can be decoded", bases.digest[:16])

    def _prepared(self, bases: ModelBases, *, is_older: bool) -> SubspaceCodec:
        """The codec of bases that came after the start, on the pool's device."""
        self._make_room(bases.working_bytes)
        with self._pool.streams.as_current(), self._pool.streams.on_cores(self._num_cores):
            subspace = self._codec(bases)
            self._prepare(subspace, is_older)
            # Other threads use the bases on streams of their own.
            self._pool.streams.synchronize()
        return subspace

    def _read(self) -> ModelBases:
        """Read the file, and put what is there into the store.

        Raises:
            CodecError: it is missing or damaged, or the bases are for other layers than the model's.
        """
        bases = ModelBases.load(self.path)
        self._check(bases)
        if self._shared is not None:
            self._shared.put(self.path, bases.digest)
        return bases

    def _codec(self, bases: ModelBases) -> SubspaceCodec:
        """Raises CodecError if the bases are for other layers than the model's."""
        self._check(bases)
        shape = self._pool.shape
        of_pool = ModelBases(shape.of_numbers, bases.groups, bases.damage_factor).to(self._pool.device)
        return SubspaceCodec(of_pool, self._rotary, rounds=shape.of_numbers != shape)

    def _check(self, bases: ModelBases) -> None:
        pool = self._pool
        if replace(bases.shape, dtype=pool.shape.dtype) != pool.shape or bases.num_layers != pool.num_layers:
            raise CodecError(
                f"the bases in {self.path} are for {bases.num_layers} layers of {bases.shape}, the model has "
                f"{pool.num_layers} of {pool.shape}"
            )


def _stamp(path: Path) -> tuple[int, int] | None:
    """Tells one version of a file from another; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
