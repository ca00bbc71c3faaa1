"""Stores the draft model's KV of finished turns, beside the target's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV
from krul_backend.planner import OnlineCosts
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.strategy import Strategy
from krul_backend.tiers.common.hint import NO_HINT
from krul_sglang.engine.common.draft_kv import DraftKV
from krul_sglang.engine.save.segment_writer import OffloadCounters, Reading, SegmentWriter
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import LayerEncoding

logger = logging.getLogger(__name__)


class DraftSaver:
    """Stores what the store does not hold yet of a turn's draft KV, as it is. Used by the thread that stores
    turns.

    ``segment_bytes``: of one layer of a segment at most, as the pool holds it. ``costs``: see
    ``SegmentWriter``.
    """

    def __init__(
        self, store: KVStore, draft: DraftKV, segment_bytes: int, costs: OnlineCosts | None = None
    ) -> None:
        self._store = store
        self._draft = draft
        pool, page_size = draft.pool, draft.identity.page_size
        layer_page_bytes = (pool.shape.k_token_bytes + pool.shape.v_token_bytes) * page_size
        self._segment_pages = max(1, segment_bytes // layer_page_bytes)
        self._encoding = LayerEncoding(draft.codec, Strategy.from_pairs(pool.num_layers), (0.0,))
        self._written = OffloadCounters()
        self.writer = SegmentWriter(
            store, pool.streams, pool.num_layers, self._written, while_full=nullcontext, costs=costs
        )

    def save(
        self,
        turn: Turn,
        stream: Any,
        pause: Callable[[], None],
        is_wanted: Callable[[], bool],
        reading: Reading,
    ) -> None:
        """Store a turn's missing pages, up to the first that is stale. An error does not fail the turn: the
        next one is drafted worse after a restore.

        ``pause``: see ``TurnEncoding.encode``; ``is_wanted``, ``reading``: as for ``SegmentWriter.write``.
        """
        counters, identity = self._draft.counters, self._draft.identity_for(turn.model)
        write: Callable[..., bool] = self.writer.write
        write = partial(write, turn, stream=stream, is_wanted=is_wanted, reading=reading, model=identity)
        try:
            if not turn.hint.drop and not self._has_saved(turn, identity, pause, write):
                counters.dropped_turns += 1
            if turn.hint != NO_HINT or turn.session is not None:
                self._store.advise(turn.hint, model=identity, page_keys=turn.page_keys, session=turn.session)
        except KeyError:
            logger.debug("krul: nothing is stored of a turn's draft KV")
        except Exception:
            counters.dropped_turns += 1
            logger.exception("krul: the draft KV of %d tokens could not be stored", len(turn.token_ids))
        counters.stored_tokens, counters.num_bytes = self._written.tokens, self._written.num_bytes

    def _has_saved(
        self, turn: Turn, identity: ModelIdentity, pause: Callable[[], None], write: Callable[..., bool]
    ) -> bool:
        num_pages = self._draft.num_fresh(turn.slots) // identity.page_size
        for run in self._store.find_missing(identity, turn.page_keys[:num_pages]):
            for first in range(run.start, run.stop, self._segment_pages):
                pages = range(first, min(first + self._segment_pages, run.stop))
                start, end = pages.start * identity.page_size, pages.stop * identity.page_size
                read = partial(self._read, turn, start, end)
                if not write(pages, self._encoding.encode(0, TokenRun(read, start, end - start), pause)):
                    return False
        return num_pages == len(turn.page_keys)

    def _read(self, turn: Turn, start: int, end: int, layer: int) -> LayerKV:
        return self._draft.pool.gather(layer, turn.slots[start:end])
