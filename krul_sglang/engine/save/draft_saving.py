"""Stores the draft model's KV of finished turns, beside the target's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV
from krul_backend.planner import OnlineCosts
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_sglang.engine.common.draft_kv import DraftKV
from krul_sglang.engine.save.companion_saving import CompanionSaver
from krul_sglang.engine.save.turn import Turn


class DraftSaver(CompanionSaver):
    """Stores a turn's missing pages of draft KV, up to the first that is stale. A turn of which it is missing
    is drafted worse after a restore.

    ``segment_bytes``: of one layer of a segment at most, as the pool holds it.
    """

    def __init__(
        self, store: KVStore, draft: DraftKV, segment_bytes: int, costs: OnlineCosts | None = None
    ) -> None:
        super().__init__(store, draft, "draft KV", draft.pool.num_layers, costs)
        self._draft = draft
        shape = draft.pool.shape
        layer_page_bytes = (shape.k_token_bytes + shape.v_token_bytes) * draft.identity.page_size
        self._segment_pages = max(1, segment_bytes // layer_page_bytes)

    def _has_saved(self, turn: Turn, identity: ModelIdentity, write: Callable[..., bool]) -> bool:
        num_pages = self._draft.num_fresh(turn.slots) // identity.page_size
        for run in self.store.find_missing(identity, turn.page_keys[:num_pages]):
            for first in range(run.start, run.stop, self._segment_pages):
                pages = range(first, min(first + self._segment_pages, run.stop))
                start, end = pages.start * identity.page_size, pages.stop * identity.page_size
                read = partial(self._read, turn, start, end)
                if not write(turn, pages, TokenRun(read, start, end - start)):
                    return False
                self._draft.counters.stored_tokens = self.written.tokens
        return num_pages == len(turn.page_keys)

    def _read(self, turn: Turn, start: int, end: int, layer: int) -> LayerKV:
        return self._draft.pool.gather(layer, turn.slots[start:end])
