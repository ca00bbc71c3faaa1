"""Stores the states of recurrent layers at the ends of turns, beside the KV."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from krul_backend.codec.interface import TokenRun
from krul_backend.planner import OnlineCosts
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.strategy import Strategy
from krul_backend.tiers.common.hint import NO_HINT, Hint
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.save.segment_writer import OffloadCounters, SegmentWriter
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import LayerEncoding

logger = logging.getLogger(__name__)

MAX_BOUNDARIES = 10_000
"""Boundaries of which it is remembered what continues them."""


class StateSaver:
    """Stores the state at the end of each turn, before the turn's KV. Used by the thread that stores turns.

    The newest boundary of a conversation is worth most. One that a single turn has continued is demoted, so
    that it leaves first when room is needed. One that several have continued ends a prompt that they share,
    and keeps its worth.

    ``pool`` is that of the KV. ``costs`` tell the store what a restore saves: the state has its share of
    that, by bytes, so that it is kept about as long as the KV.
    """

    def __init__(
        self, store: KVStore, states: BoundaryStates, pool: DevicePool, costs: OnlineCosts | None = None
    ) -> None:
        self._store = store
        self._states = states
        self._token_bytes = (pool.shape.k_token_bytes + pool.shape.v_token_bytes) * pool.num_layers
        num_layers = states.pool.num_layers
        self._encoding = LayerEncoding(states.codec, Strategy.from_pairs(num_layers), (0.0,))
        self._written = OffloadCounters()
        self._continued_by: OrderedDict[tuple[str, str], str | None] = OrderedDict()
        self.writer = SegmentWriter(
            store, states.pool.streams, pool.num_layers, self._written, while_full=nullcontext, costs=costs
        )

    def save(self, turn: Turn, stream: Any, pause: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Store a turn's state. An error does not fail the turn: its KV ends at no boundary then, and a later
        prompt is restored up to an earlier one.

        ``pause``: see ``TurnEncoding.encode``; ``is_wanted``: as for ``SegmentWriter.write``.
        """
        counters, identity = self._states.counters, self._states.identity_for(turn.model)
        write: Callable[..., bool] = self.writer.write
        write = partial(write, stream=stream, is_wanted=is_wanted, model=identity)
        try:
            if not turn.hint.drop and not self._has_saved(turn, identity, pause, write):
                counters.dropped_turns += 1
            if turn.hint != NO_HINT or turn.session is not None:
                self._store.advise(
                    turn.hint, model=identity, page_keys=turn.page_keys[-1:], session=turn.session
                )
        except KeyError:
            logger.debug("krul: nothing is stored of a turn's state")
        except Exception:
            counters.dropped_turns += 1
            logger.exception("krul: the state after %d tokens could not be stored", len(turn.token_ids))
        counters.stored, counters.num_bytes = self._written.segments, self._written.num_bytes

    def release(self, turn: Turn) -> None:
        """The copy of a turn's state is not needed any more."""
        if turn.state is not None:
            self._states.release()

    def _has_saved(
        self, turn: Turn, identity: ModelIdentity, pause: Callable[[], None], write: Callable[..., bool]
    ) -> bool:
        end = replace(turn, page_keys=turn.page_keys[-1:], token_ids=turn.token_ids[-1:])
        if self._store.find_missing(identity, end.page_keys):
            if turn.state is None:
                return False
            encoded = self._encoding.encode(0, TokenRun(turn.state.__getitem__, 0, 1), pause)
            if not write(end, range(1), encoded, recompute_s=self._saved_s(len(turn.token_ids))):
                return False
        self._demote_before(turn, identity)
        return True

    def _saved_s(self, num_tokens: int) -> float:
        """Seconds of computing so many tokens that count for the state."""
        share = self._states.num_bytes / (self._states.num_bytes + num_tokens * self._token_bytes)
        return share * self.writer.recompute_s(0, num_tokens)

    def _demote_before(self, turn: Turn, identity: ModelIdentity) -> None:
        """Demote the boundary that this turn continues, unless another turn has continued it, too."""
        known, model, last = self._continued_by, identity.fingerprint, turn.page_keys[-1]
        known.setdefault((model, last))
        known.move_to_end((model, last))
        if len(known) > MAX_BOUNDARIES:
            known.popitem(last=False)
        before = next((key for key in reversed(turn.page_keys[:-1]) if (model, key) in known), None)
        if before is None:
            return
        others, known[model, before] = known[model, before], last
        if others in (None, last):
            try:
                self._store.advise(Hint(demote=True), model=identity, page_keys=(before,))
            except KeyError:
                logger.debug("krul: an earlier boundary has left the store")
