"""Stores the states of recurrent layers, or windows, at the ends of turns and prompts, beside the KV."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from krul_backend.codec.interface import TokenRun
from krul_backend.planner import OnlineCosts
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.hint import Hint
from krul_sglang.engine.common.boundary_states import BoundaryStates, CopiedState
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.save.companion_saving import CompanionSaver
from krul_sglang.engine.save.turn import Turn

logger = logging.getLogger(__name__)

MAX_BOUNDARIES = 10_000
"""Boundaries of which it is remembered what continues them."""


class StateSaver(CompanionSaver):
    """Stores the states at the end of each turn and at that of its prompt, from where a next prompt goes on
    that does not repeat the answer as it was. KV without them ends at no boundary, and a later prompt is
    restored up to an earlier one.

    The newest boundary of a conversation is worth most. One that a single turn has continued is demoted, so
    that it leaves first when room is needed. One that several have continued ends a prompt that they share,
    and keeps its worth.

    ``pool`` is that of the KV. ``costs`` tell the store what a restore saves: the state has its share of
    that, by bytes, so that it is kept about as long as the KV.
    """

    of_end = True

    def __init__(
        self, store: KVStore, states: BoundaryStates, pool: DevicePool, costs: OnlineCosts | None = None
    ) -> None:
        super().__init__(store, states, "state", pool.num_layers, costs)
        self._states = states
        self._token_bytes = (pool.shape.k_token_bytes + pool.shape.v_token_bytes) * pool.num_layers
        self._continued_by: OrderedDict[tuple[str, str], str | None] = OrderedDict()

    def release(self, turn: Turn) -> None:
        """The copies of a turn's states are not needed any more."""
        for _ in turn.states:
            self._states.release()

    def _has_saved(self, turn: Turn, identity: ModelIdentity, write: Callable[..., bool]) -> bool:
        has_saved = False
        for end in sorted({*turn.states, len(turn.token_ids)}):
            keys = turn.page_keys[: end // self._states.page_size]
            before = replace(turn, page_keys=keys, token_ids=turn.token_ids[:end])
            has_saved = self._has_saved_end(before, turn.states.get(end), identity, write)
        return has_saved

    def _has_saved_end(
        self, turn: Turn, state: CopiedState | None, identity: ModelIdentity, write: Callable[..., bool]
    ) -> bool:
        if self.store.find_missing(identity, turn.page_keys[-1:]):
            if state is None or not state.is_whole:
                return False
            last_page = turn.token_ids[-self._states.page_size :]
            keys, tokens = self._states.names(turn.page_keys[-1], last_page, len(turn.token_ids))
            end = replace(turn, page_keys=keys, token_ids=tokens)
            run = TokenRun(state.layers.__getitem__, 0, state.num_rows)
            if not write(end, range(len(keys)), run, recompute_s=self._saved_s(len(turn.token_ids))):
                return False
            self._states.counters.stored = self.written.segments
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
                self.store.advise(Hint(demote=True), model=identity, page_keys=(before,))
            except KeyError:
                logger.debug("krul: an earlier boundary has left the store")
