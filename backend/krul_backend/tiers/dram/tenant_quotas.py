"""What each tenant takes of the arena, and which of its segments leaves first when that is too much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.dram.stored_segment import StoredSegment


@dataclass
class _Tenant:
    """``taken_bytes`` counts reservations and segments that left the index but are pinned, too."""

    policy: EvictionPolicy
    taken_bytes: int = 0
    num_segments: int = 0


class TenantQuotas:
    """One limit for every tenant. Not thread-safe. Without a limit nothing is kept.

    Each tenant has a policy of its own beside the store's, so that its own victims are found without a look
    at those of others.

    Args:
        limit_bytes: what a tenant may take of the arena, alignment included; None: all of it.
        policy: of the kind that each tenant gets.
    """

    def __init__(self, limit_bytes: int | None, policy: EvictionPolicy) -> None:
        self._limit_bytes = limit_bytes
        self._kind = policy
        self._tenants: dict[str, _Tenant] = {}

    def excess_bytes(self, tenant: str, num_bytes: int) -> int:
        """How much a tenant would be over its quota with ``num_bytes`` more; 0 or less if it would not."""
        if self._limit_bytes is None:
            return 0
        books = self._tenants.get(tenant)
        return (books.taken_bytes if books is not None else 0) + num_bytes - self._limit_bytes

    def charge(self, tenant: str, num_bytes: int) -> None:
        """A tenant takes ``num_bytes`` more; fewer if negative."""
        if self._limit_bytes is None:
            return
        books = self._books(tenant)
        books.taken_bytes += num_bytes
        self._drop_empty(tenant, books)

    def add(self, segment: StoredSegment) -> None:
        """A segment entered the index. Its bytes were charged before."""
        if self._limit_bytes is not None:
            self._books(segment.manifest.tenant).num_segments += 1

    def remove(self, segment: StoredSegment) -> None:
        """A segment left the index. Its bytes are charged as long as it takes them."""
        if self._limit_bytes is None:
            return
        tenant = segment.manifest.tenant
        books = self._books(tenant)
        books.policy.remove(segment.segment_id)
        books.num_segments -= 1
        self._drop_empty(tenant, books)

    def touch(self, path: Sequence[StoredSegment]) -> None:
        """A use of indexed segments, in conversation order."""
        if self._limit_bytes is None:
            return
        for tenant in {segment.manifest.tenant for segment in path}:
            own = [segment for segment in path if segment.manifest.tenant == tenant]
            self._books(tenant).policy.touch(own)

    def victims(self, tenant: str) -> Iterator[int]:
        """A tenant's segments, the first to leave first."""
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
