"""Holds the bases of the served model: there at the start, or learned while the server serves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_sglang.engine.budget.gauges import show
from krul_sglang.engine.budget.recent_text import RecentText
from krul_sglang.engine.budget.text_drift import TextDrift

logger = logging.getLogger(__name__)


class ServedBases:
    """Holds one rank's newest bases, from the moment on when they are there; until then ``subspace`` is None.

    ``num_had`` counts them. ``state`` says in a few words where they come from, how far learning is, or why
    there are none. ``drift`` measures whether they should be learned again, ``recent`` is what from; None on
    a rank that does not learn. ``num_relearned``: how often that came to new bases; ``refusal``: why the last
    time it did not, None if it did.
    """

    def __init__(self, drift: TextDrift, end: Callable[[], None] = lambda: None) -> None:
        """``end`` ends the work of whoever brings bases."""
        self.subspace: SubspaceCodec | None = None
        self.num_had = 0
        self.state = "none"
        self.drift = drift
        self.recent: RecentText | None = None
        self.num_relearned = 0
        self.refusal: str | None = None
        self._end = end

    def have(self, subspace: SubspaceCodec, state: str) -> None:
        """The bases are there, and come from where ``state`` says."""
        self.subspace, self.state = subspace, state
        self.num_had += 1
        logger.info("krul: bases %s of the model: %s", subspace.bases.digest[:16], state)

    def relearned(self, tp_rank: int, refusal: str | None) -> None:
        """Learning again has ended; ``refusal`` says why its bases are not taken, None if they are."""
        self.refusal = refusal
        self.num_relearned += refusal is None
        show("bases_relearned", "How often bases were learned again.", self.num_relearned, tp_rank)
        was_refused = float(refusal is not None)
        show("bases_relearning_refused", "1 if what was learned last was refused.", was_refused, tp_rank)
        if refusal is None:
            logger.info("krul: bases were learned again, from recent turns as well")
        else:
            logger.warning("krul: the bases stay as they are: %s", refusal)

    def close(self) -> None:
        """End whatever brings bases."""
        self._end()

    def as_dict(self) -> dict[str, Any]:
        return {
            "bases": None if self.subspace is None else self.subspace.bases.digest[:16],
            "bases_state": self.state,
            "relearned": self.num_relearned,
            "relearning_refused": self.refusal,
            "text": self.drift.as_dict(),
        }
