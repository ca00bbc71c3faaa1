"""Finds the states of recurrent layers, or windows, at the ends of prefixes that are being loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from krul_backend.errors import KrulError
from krul_backend.planner import RestorePlan
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.restore.load_batch import Forecast, Load
from krul_sglang.engine.restore.segment_reader import open_segments


class NoStateError(KrulError):
    """The state of a boundary has left the store since it was looked up."""


@dataclass(frozen=True, eq=False)
class StateLoads:
    """Makes loads of states beside those of KV. KV without its state is of no use: what is missing fails the
    batch, whose requests are then computed."""

    store: KVStore
    states: BoundaryStates

    def lease(self, loads: Iterable[Load], begin: Callable[[Load], None]) -> list[Load]:
        """The loads of the states at the ends of ``loads``. ``begin`` makes a load ready.

        Called in the loading thread, which releases the leases of what is returned.

        Raises:
            KrulError: a state is missing, or cannot be read.
        """
        leases: list[Lease] = []
        found: list[Load] = []
        try:
            for load in loads:
                leases.append(self._lease(load))
                found.append(self._load(load, leases[-1]))
                begin(found[-1])
        except BaseException as error:
            if isinstance(error, KrulError):
                self.states.counters.failed_loads += 1
            for lease in leases:
                self.store.release(lease)
            raise
        return found

    def _lease(self, load: Load) -> Lease:
        held, num_tokens, page_size = load.held, len(load.slots), self.states.page_size
        assert held is not None
        end_key = held.page_keys[num_tokens // page_size - 1]
        last_page = held.token_ids()[num_tokens - page_size : num_tokens]
        keys, token_ids = self.states.names(end_key, last_page, load.device_tokens + num_tokens)
        lease = self.store.lease(self.states.identity, keys, token_ids)
        if lease is None or lease.num_pages < len(keys):
            if lease is not None:
                self.store.release(lease)
            raise NoStateError(f"the state after {num_tokens} loaded tokens is not stored any more")
        return lease

    def _load(self, load: Load, lease: Lease) -> Load:
        assert load.state is not None
        slots = load.state.slot
        num_rows = lease.num_pages * self.states.identity.page_size
        # What a window has before the loaded tokens is on the device.
        num_there = num_rows - len(slots)
        plan = RestorePlan((num_there,) * self.states.pool.num_layers, 0.0)
        readers = open_segments(lease, self.states.codec, num_rows)
        if num_there:
            slots = torch.cat([slots.new_zeros(num_there), slots])
        return Load(lease, readers, slots, 0, plan, Forecast(0.0, 0.0, 0.0))
