"""Holds the bases of the served model: there at the start, or learned while the server serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from krul_backend.codec.subspace.codec import SubspaceCodec

logger = logging.getLogger(__name__)


class ServedBases:
    """Holds one rank's bases, from the moment on when they are there; until then ``subspace`` is None.

    ``state`` says in a few words where they come from, how far learning is, or why there are none.
    """

    def __init__(self, end: Callable[[], None] = lambda: None) -> None:
        """``end`` ends the steps that are followed."""
        self.subspace: SubspaceCodec | None = None
        self.state = "none"
        self._end = end
        self._is_closed = False

    def have(self, subspace: SubspaceCodec, state: str) -> None:
        """The bases are there, and come from where ``state`` says."""
        self.subspace, self.state = subspace, state
        logger.info("krul: bases %s of the model: %s", subspace.bases.digest[:16], state)

    def follow(self, steps: Iterable[str], load: Callable[[], SubspaceCodec]) -> None:
        """Wait on a thread until ``steps``, which say how far learning is, have ended; then load the bases.

        If one of both fails, there will be no bases: that is logged once, with the cause.
        """
        self.state = "learning"
        threading.Thread(target=self._follow, args=(steps, load), name="krul-bases", daemon=True).start()

    def close(self) -> None:
        """End what is followed."""
        self._is_closed = True
        self._end()

    def _follow(self, steps: Iterable[str], load: Callable[[], SubspaceCodec]) -> None:
        try:
            for step in steps:
                self.state = f"learning: {step}"
                logger.info("krul: learning bases: %s", step)
            if not self._is_closed:
                self.have(load(), "learned while serving")
        except Exception as error:
            # Whatever it is, the server goes on without bases.
            if not self._is_closed:
                logger.warning("krul: there are no bases of the model, turns stay native: %s", error)
                logger.debug("krul: how that came", exc_info=True)
                self.state = f"failed: {error}"
