"""A request whose prefix may be stored, with all that is known of it until its load starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from krul_backend.segment import TokenIds
from krul_sglang.engine.common.asking import Question
from krul_sglang.engine.common.moved_runs import FindRun
from krul_sglang.engine.restore.held_lease import HeldLease, KeyRun
from krul_sglang.engine.restore.lease_questions import Renewed
from krul_sglang.engine.restore.load_batch import Load


class State(Enum):
    """How far a returning request is.

    ::

        WAITS ---> ASKED ---> LEASED ---> PLANNED ---> its load runs (LoadBatch)
          ^          |           |           |
          |          v           |           '-- taken back, or ended
          '------- MISSED        '-- given back, computed or ended
    """

    WAITS = "waits"
    """Nothing is known of it, or what it had was given back."""
    ASKED = "asked"
    """The store is being asked. A lease that it had for another prefix is kept meanwhile."""
    MISSED = "missed"
    """The store had nothing, lately."""
    LEASED = "leased"
    """What is stored of it cannot be evicted."""
    PLANNED = "planned"
    """Its load starts with the next batch, and has its lease."""


@dataclass(frozen=True)
class Prompt:
    """What the engine knows of a request when it looks for its prefix.

    It has ``num_tokens``, of which the first ``device_tokens`` are in the pool. ``token_ids()`` are those of
    the pages after them, as for ``KVStore.lease``. ``find_run``, if given, may find more of the prompt at
    other places; it is called in the thread that asks.
    """

    num_tokens: int
    device_tokens: int
    token_ids: Callable[[], TokenIds]
    find_run: FindRun | None = None


@dataclass(eq=False)
class ReturningRequest:
    """A request whose prefix may be stored. ``ReturningRequests`` makes it, and alone changes it.

    ``run``: what the store was asked for last. ``missed_s``: when it had nothing. ``give_back_at_s``: when a
    lease goes back that nobody may want.
    """

    prompt: Prompt
    run: KeyRun | None = None
    question: Question[HeldLease | None] | None = None
    missed_s: float = -math.inf
    lease: HeldLease | None = None
    renewal: Question[Renewed | None] | None = None
    give_back_at_s: float = math.inf
    load: Load | None = None

    @property
    def state(self) -> State:
        if self.load is not None:
            return State.PLANNED
        if self.question is not None:
            return State.ASKED
        if self.lease is not None:
            return State.LEASED
        return State.WAITS if self.missed_s == -math.inf else State.MISSED

    @property
    def held(self) -> HeldLease | None:
        """The lease that its load could have; None while the store is asked for another one."""
        return self.lease if self.question is None else None
