"""Segments of lower tiers into DRAM."""

from __future__ import annotations

import threading

from krul_backend.errors import TierReadError
from krul_backend.segment import SegmentManifest
from krul_backend.store.tier_reader import TierReader
from krul_backend.store.tiered_lease import LowerPart
from krul_backend.tiers.common.interface import Lease
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.dram.arrivals import Arrival
from krul_backend.tiers.dram.host_store import HostStore


class Fetcher:
    """Turns runs that lower tiers hold into leases on segments in DRAM. ``num_rejected`` found no room."""

    def __init__(self, host: HostStore, reader: TierReader) -> None:
        self._host = host
        self._reader = reader
        self._admission = threading.Lock()
        self.num_rejected = 0

    def bring(self, part: LowerPart, began_at: int) -> Lease:
        """Let a held run into DRAM; the lease on it takes the place of the hold.

        Raises:
            TierReadError: there is no room. The run stays held.
        """
        tier, run = part.tier, part.run
        # One at a time: of two that miss the same segment in DRAM, the second finds the first one's.
        with self._admission:
            copy = self._copy_in_dram(part, began_at)
            if copy is None:
                arrival, lease = self._admit(part, began_at)
        if copy is not None:
            tier.release(run)
            return copy
        try:
            self._reader.start(tier, run, arrival)
        except BaseException:
            self._host.release(lease)
            raise
        return lease

    def _admit(self, part: LowerPart, began_at: int) -> tuple[Arrival, Lease]:
        """Room for a run's segment, and a lease on its pages."""
        tier, run = part.tier, part.run
        arrival = self._host.admit(
            run.manifest, run.checksums, tier.name, load_s(tier, run.manifest), began_at
        )
        if arrival is None:
            self.num_rejected += 1
            raise TierReadError(f"no room in DRAM for {run.manifest.num_bytes} bytes from {tier.name}")
        try:
            return arrival, self._host.lease_arrival(arrival, run.first_page, run.end_page)
        except BaseException:
            arrival.fail()
            raise

    def _copy_in_dram(self, part: LowerPart, began_at: int) -> Lease | None:
        """A lease on a segment in DRAM that can stand for a run: the same pages, and no layer holds less.

        Somebody else may have fetched or stored it since the run was matched.
        """
        run, header = part.run, part.part.header
        manifest, size = run.manifest, header.page_size
        if self._host.was_cleared(manifest.model, began_at):
            return None
        lease = self._host.lease(
            manifest.model,
            manifest.page_keys[run.first_page : run.end_page],
            manifest.token_ids[run.first_page * size : run.end_page * size],
            manifest.start_token + run.first_page * size,
        )
        if lease is None:
            return None
        first_tokens = lease.slices[0].header.layer_first_token
        pairs = zip(first_tokens, header.layer_first_token, strict=True)
        start_token = manifest.start_token + run.first_page * size
        if (
            len(lease.slices) == 1
            and lease.num_pages == part.num_pages
            and all(first <= max(wanted, start_token) for first, wanted in pairs)
        ):
            return lease
        self._host.release(lease)
        return None


def load_s(tier: LowerTier, manifest: SegmentManifest) -> float:
    """Seconds to read all of a segment from a tier."""
    cost = tier.cost()
    return sum(cost.load_s(num_bytes) for num_bytes in manifest.layer_num_bytes)
