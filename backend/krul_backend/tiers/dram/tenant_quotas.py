"""Quotas: how much of the arena each tenant takes, and which of its segments to evict beyond that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.dram.stored_segment import StoredSegment


@dataclass
class _Tenant:
    """One tenant's account. ``taken_bytes`` includes reservations, and pinned segments out of the index."""

    policy: EvictionPolicy
    taken_bytes: int = 0
    num_segments: int = 0


class TenantQuotas:
    """Applies one limit to every tenant. Without a limit it keeps no accounts. Not thread-safe.

    Each tenant has an eviction policy of its own beside the store's, so that its victims are found without
    looking at segments of others.

    Args:
        limit_bytes: how much of the arena a tenant may take, alignment included; None: all of it.
        policy: each tenant gets a fresh policy of this one's kind.
    """

    def __init__(self, limit_bytes: int | None, policy: EvictionPolicy) -> None:
        self._limit_bytes = limit_bytes
        self._kind = policy
        self._tenants: dict[str, _Tenant] = {}

    def excess_bytes(self, tenant: str, num_bytes: int) -> int:
        """By how many bytes ``num_bytes`` more would exceed a tenant's quota; 0 or less if they would not."""
        if self._limit_bytes is None:
            return 0
        books = self._tenants.get(tenant)
        return (books.taken_bytes if books is not None else 0) + num_bytes - self._limit_bytes

    def charge(self, tenant: str, num_bytes: int) -> None:
        """Add ``num_bytes``, which may be negative, to what a tenant takes."""
        if self._limit_bytes is None:
            return
        books = self._books(tenant)
        books.taken_bytes += num_bytes
        self._drop_empty(tenant, books)

    def add(self, segment: StoredSegment) -> None:
        """Note that a segment entered the index. Its bytes were charged before."""
        if self._limit_bytes is not None:
            self._books(segment.manifest.tenant).num_segments += 1

    def remove(self, segment: StoredSegment) -> None:
        """Note that a segment left the index. Its bytes stay charged until its extents are freed."""
        if self._limit_bytes is None:
            return
        tenant = segment.manifest.tenant
        books = self._books(tenant)
        books.policy.remove(segment.segment_id)
        books.num_segments -= 1
        self._drop_empty(tenant, books)

    def touch(self, path: Sequence[StoredSegment]) -> None:
        """Note a use of indexed segments, in conversation order."""
        if self._limit_bytes is None:
            return
        for tenant in {segment.manifest.tenant for segment in path}:
            own = [segment for segment in path if segment.manifest.tenant == tenant]
            self._books(tenant).policy.touch(own)

    def victims(self, tenant: str) -> Iterator[int]:
        """Ids of a tenant's segments, the first to evict first."""
        books = self._tenants.get(tenant)
        return books.policy.victims() if books is not None else iter(())

    def _books(self, tenant: str) -> _Tenant:
        books = self._tenants.get(tenant)
        if books is None:
            books = self._tenants[tenant] = _Tenant(self._kind.fresh())
        return books

    def _drop_empty(self, tenant: str, books: _Tenant) -> None:
        if not books.taken_bytes and not books.num_segments:
            del self._tenants[tenant]
