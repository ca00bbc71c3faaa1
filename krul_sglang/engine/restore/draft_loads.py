"""Finds the draft model's KV of prefixes that are being loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from krul_backend.errors import KrulError
from krul_backend.planner import RestorePlan
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.common.draft_kv import DraftKV
from krul_sglang.engine.restore.load_batch import Forecast, Load
from krul_sglang.engine.restore.segment_reader import open_segments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DraftLoads:
    """Makes loads of draft KV beside those of the target: whole, since heads of a draft need what the target
    computes last."""

    store: KVStore
    draft: DraftKV

    def lease(self, loads: Mapping[str, Load], begin: Callable[[Load], None]) -> dict[str, Load]:
        """The draft's loads of a batch, by request; none for a request of which nothing can be loaded.

        ``begin`` makes a load ready. Called in the loading thread, which releases the leases of what is
        returned.
        """
        found: dict[str, Load] = {}
        for rid, load in loads.items():
            lease = self._lease(load)
            if lease is None:
                continue
            try:
                found[rid] = self._load(load, lease)
                begin(found[rid])
            except KrulError as error:
                self.draft.counters.failed_loads += 1
                logger.warning("krul: stored draft KV cannot be read: %s", error)
                found.pop(rid, None)
                self.store.release(lease)
        return found

    def _lease(self, load: Load) -> Lease | None:
        """Of the draft KV that is stored of a load's tokens."""
        held = load.held
        if held is None or load.moved is not None:
            return None
        identity, num_tokens = self.draft.identity, len(load.slots)
        page_keys = held.page_keys[: num_tokens // identity.page_size]
        return self.store.lease(identity, page_keys, held.token_ids()[:num_tokens])

    def _load(self, load: Load, lease: Lease) -> Load:
        readers = open_segments(lease, self.draft.codec, len(load.slots))
        slots = load.slots[: sum(reader.num_tokens for reader in readers)]
        plan = RestorePlan((load.device_tokens,) * self.draft.pool.num_layers, 0.0)
        return Load(lease, readers, slots, load.device_tokens, plan, Forecast(0.0, 0.0, 0.0))
