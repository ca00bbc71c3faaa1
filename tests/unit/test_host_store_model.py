"""Random histories of a HostStore beside a model of it that is simple enough to be right."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.eviction import LruPolicy
from krul_backend.tiers.common.interface import Lease, Reservation, block_checksum, tail_is_right
from krul_backend.tiers.dram.arena import ALIGNMENT_BYTES, aligned_num_bytes
from krul_backend.tiers.dram.host_store import HostStore
from tests.support.store_builders import (
    PAGE_SIZE,
    commit_to,
    fill,
    flip_byte,
    make_model,
    offset_in,
    page_keys,
    stored_ids,
    tokens_of,
)

CAPACITY_BYTES = 64 * 40
MODELS = [make_model("a"), make_model("b")]


@dataclasses.dataclass
class Bytes:
    """Blocks in the arena: where they lie and what must be in them."""

    offsets: tuple[int, ...]
    content: tuple[bytes, ...]

    @property
    def taken_bytes(self) -> int:
        """Extents lie on aligned bytes, whatever a trim dropped before the first byte of the block."""
        return sum(
            aligned_num_bytes(offset + len(content)) - offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            for offset, content in zip(self.offsets, self.content, strict=True)
            if content
        )


@dataclasses.dataclass
class ModelSegment:
    data: Bytes
    keys: tuple[tuple[str, str], ...]
    """(fingerprint, page key) of every page, whether it was the first copy or not."""
    parent: tuple[str, str] | None
    first_tokens: tuple[int, ...]
    end_token: int
    num_leases: int = 0
    range_bytes: int = 1
    damage: dict[int, int] = dataclasses.field(default_factory=dict)
    """Of each damaged layer how far before its block's end the wrong byte lies."""
    is_zombie: bool = False

    @property
    def is_damaged(self) -> bool:
        return bool(self.damage)


@dataclasses.dataclass
class ModelReservation:
    reservation: Reservation
    data: Bytes
    cleared: set[str] = dataclasses.field(default_factory=set)
    """Fingerprints of the models cleared since."""


def keys_of(conversation: int, is_branch: bool, first: int, end: int) -> tuple[str, ...]:
    """A branch has pages of its own from page 3 on."""
    common = page_keys(f"c{conversation}", first, min(end, 3))
    own = page_keys(f"c{conversation}{'b' if is_branch else ''}", max(first, 3), end)
    return common + own


paths = st.tuples(st.integers(0, 1), st.booleans(), st.integers(0, 5), st.integers(1, 5))
models = st.sampled_from(MODELS)
range_sizes = st.sampled_from([0, 1, 7, 64])
choices = st.integers(0, 10**6)


class HostStoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = HostStore(CAPACITY_BYTES, LruPolicy())
        self.pending: list[ModelReservation] = []
        self.segments: dict[int, ModelSegment] = {}
        self.index: dict[tuple[str, str], int] = {}
        self.leases: list[tuple[Lease, tuple[int, ...]]] = []
        self.seed = 0

    def locate(self, reservation: Reservation) -> Bytes:
        self.seed += 1
        content = fill(reservation, self.seed)
        return Bytes(tuple(offset_in(self.store, block) for block in reservation.blocks), content)

    def live(self) -> list[int]:
        return [segment_id for segment_id, segment in self.segments.items() if not segment.is_zombie]

    def remove(self, segment_id: int) -> None:
        segment = self.segments[segment_id]
        for key in segment.keys:
            if self.index.get(key) == segment_id:
                del self.index[key]
        segment.is_zombie = True
        if segment.num_leases == 0:
            del self.segments[segment_id]

    def is_shared(self, segment_id: int) -> bool:
        segment = self.segments[segment_id]
        others = [self.segments[other] for other in self.live() if other != segment_id]
        parents = [other.parent for other in others if other.parent in segment.keys]
        return (
            any(set(other.keys) & set(segment.keys) for other in others)
            or len(parents) > 1
            or any(parent != segment.keys[-1] for parent in parents)
        )

    @rule(sizes=st.tuples(st.integers(0, 500), st.integers(0, 500)))
    def reserve(self, sizes: tuple[int, int]) -> None:
        rejected_before = self.store.stats().rejected_reservations
        reservation = self.store.reserve(sizes)
        gone = set(self.live()) - set(stored_ids(self.store))
        held = [segment for segment in self.segments.values() if segment.num_leases]
        held_bytes = sum(segment.data.taken_bytes for segment in held)
        held_bytes += sum(pending.data.taken_bytes for pending in self.pending)
        needed_bytes = sum(aligned_num_bytes(size) for size in sizes)
        if reservation is None:
            assert gone == set()
            assert self.store.stats().rejected_reservations == rejected_before + 1
            assert held_bytes > 0
            return
        assert held_bytes + needed_bytes <= CAPACITY_BYTES
        for segment_id in gone:
            assert self.segments[segment_id].num_leases == 0
            self.remove(segment_id)
        assert tuple(block.nbytes for block in reservation.blocks) == sizes
        self.pending.append(ModelReservation(reservation, self.locate(reservation)))

    @precondition(lambda self: self.pending)
    @rule(choice=choices, model=models, path=paths, range_bytes=range_sizes)
    def commit(
        self, choice: int, model: ModelIdentity, path: tuple[int, bool, int, int], range_bytes: int
    ) -> None:
        pending = self.pending.pop(choice % len(self.pending))
        conversation, is_branch, first, num_pages = path
        keys = keys_of(conversation, is_branch, first, first + num_pages)
        before = keys_of(conversation, is_branch, max(0, first - 1), first)
        end_token = (first + num_pages) * PAGE_SIZE
        sizes = tuple(len(content) for content in pending.data.content)
        first_tokens = tuple(first * PAGE_SIZE if num_bytes else end_token for num_bytes in sizes)
        manifest = SegmentManifest(
            model=model,
            page_keys=keys,
            parent_key=before[0] if before else None,
            start_token=first * PAGE_SIZE,
            token_ids=tokens_of(keys),
            codec="raw",
            layer_num_bytes=sizes,
            layer_first_token=first_tokens,
            range_bytes=range_bytes,
        )
        segment_id = commit_to(self.store, pending.reservation, manifest)
        assert segment_id not in self.segments
        full_keys = tuple((model.fingerprint, key) for key in keys)
        new_keys = [key for key in full_keys if key not in self.index]
        if new_keys and model.fingerprint not in pending.cleared:
            parent = (model.fingerprint, before[0]) if before else None
            self.segments[segment_id] = ModelSegment(
                pending.data, full_keys, parent, first_tokens, end_token, range_bytes=manifest.range_bytes
            )
            self.index.update((key, segment_id) for key in new_keys)

    @rule(
        sizes=st.tuples(st.integers(0, 200), st.integers(0, 200)),
        model=models,
        path=paths,
        range_bytes=range_sizes,
    )
    def put(
        self, sizes: tuple[int, int], model: ModelIdentity, path: tuple[int, bool, int, int], range_bytes: int
    ) -> None:
        """Both in one step, so that most histories have segments enough to overlap and to be evicted."""
        num_pending = len(self.pending)
        self.reserve(sizes)
        if len(self.pending) > num_pending:
            self.commit(num_pending, model, path, range_bytes)

    @precondition(lambda self: self.pending)
    @rule(choice=choices)
    def abort(self, choice: int) -> None:
        self.store.abort(self.pending.pop(choice % len(self.pending)).reservation)

    @rule(model=models, path=paths, wrong_token=st.none() | st.integers(0, 5 * PAGE_SIZE - 1))
    def lease(self, model: ModelIdentity, path: tuple[int, bool, int, int], wrong_token: int | None) -> None:
        conversation, is_branch, first, num_pages = path
        keys = keys_of(conversation, is_branch, first, first + num_pages)
        token_ids = tokens_of(keys)
        end = num_pages
        if wrong_token is not None and wrong_token < len(token_ids):
            token_ids[wrong_token] += 1
            end = wrong_token // PAGE_SIZE
        holders = [self.index.get((model.fingerprint, key)) for key in keys[:end]]
        holders = holders[: holders.index(None)] if None in holders else holders
        lease = self.store.lease(model, keys, token_ids)
        # A segment's own copy of a page may stand in for the indexed one: more pages than the index alone
        # gives are right.
        num_leased = lease.num_pages if lease is not None else 0
        assert len(holders) <= num_leased <= end
        if lease is None:
            return
        position = 0
        for piece in lease.slices:
            segment = self.segments[piece.segment_id]
            assert not segment.is_zombie
            num_pages = piece.end_page - piece.first_page
            stored = segment.keys[piece.first_page : piece.end_page]
            assert stored == tuple((model.fingerprint, key) for key in keys[position : position + num_pages])
            for layer, (block, content) in enumerate(zip(piece.blocks, segment.data.content, strict=True)):
                is_right = layer not in segment.damage
                assert (block.tobytes() == content) == is_right
                checksum = piece.checksums[layer]
                assert (block_checksum(block, segment.range_bytes) == checksum) == is_right
                # The ranges behind the damage are right.
                num_right = (
                    (segment.damage.get(layer, 10**6) - 1) // segment.range_bytes * segment.range_bytes
                )
                assert tail_is_right(block, checksum, min(num_right, block.nbytes), segment.range_bytes)
            assert [span.offset for span in piece.spans if span.num_bytes] == [
                offset
                for offset, num_bytes in zip(
                    segment.data.offsets, map(len, segment.data.content), strict=True
                )
                if num_bytes
            ]
            assert piece.header.layer_first_token == segment.first_tokens
            segment.num_leases += 1
            position += num_pages
        assert position == lease.num_pages
        self.leases.append((lease, tuple(piece.segment_id for piece in lease.slices)))

    @precondition(lambda self: self.leases)
    @rule(choice=choices)
    def release(self, choice: int) -> None:
        lease, segment_ids = self.leases.pop(choice % len(self.leases))
        self.store.release(lease)
        for segment_id in segment_ids:
            segment = self.segments[segment_id]
            segment.num_leases -= 1
            if segment.num_leases == 0 and segment.is_zombie:
                del self.segments[segment_id]

    @precondition(lambda self: self.segments)
    @rule(
        choice=choices,
        num_tokens=st.tuples(st.integers(-4, 20), st.integers(-4, 20)),
        shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    )
    def trim(self, choice: int, num_tokens: tuple[int, int], shares: tuple[float, float]) -> None:
        segment_id = sorted(self.segments)[choice % len(self.segments)]
        segment = self.segments[segment_id]
        wanted_tokens, wanted_sizes, drops = [], [], []
        for layer, content in enumerate(segment.data.content):
            size = int(len(content) * shares[layer])
            first = min(segment.first_tokens[layer] + num_tokens[layer], segment.end_token)
            if first == segment.end_token:
                size = 0
            elif first > segment.first_tokens[layer] and not 0 < size < len(content):
                first = segment.first_tokens[layer]
            wanted_tokens.append(first)
            wanted_sizes.append(size)
            kept = min(len(content), -(-size // segment.range_bytes) * segment.range_bytes)
            drops.append(len(content) - kept if first > segment.first_tokens[layer] else 0)
        before = self.store.stats()
        num_trimmed = self.store.trim(segment_id, wanted_tokens, wanted_sizes)
        after = self.store.stats()
        assert after.trimmed_bytes - before.trimmed_bytes == num_trimmed
        assert after.trimmed_segments - before.trimmed_segments == (num_trimmed > 0)
        if segment.is_zombie or segment.num_leases or self.is_shared(segment_id) or not any(drops):
            assert num_trimmed == 0
            return
        assert num_trimmed == sum(drops)
        segment.data = Bytes(
            tuple(offset + drop for offset, drop in zip(segment.data.offsets, drops, strict=True)),
            tuple(content[drop:] for content, drop in zip(segment.data.content, drops, strict=True)),
        )
        segment.first_tokens = tuple(
            wanted if drop else first
            for first, wanted, drop in zip(segment.first_tokens, wanted_tokens, drops, strict=True)
        )
        segment.damage = {
            layer: from_end
            for layer, from_end in segment.damage.items()
            if from_end <= len(segment.data.content[layer])
        }

    @rule(model=st.none() | models)
    def clear(self, model: ModelIdentity | None) -> None:
        cleared = {m.fingerprint for m in MODELS if model is None or m == model}
        self.store.clear(model)
        for pending in self.pending:
            pending.cleared |= cleared
        for segment_id in self.live():
            if self.segments[segment_id].keys[0][0] in cleared:
                self.remove(segment_id)

    @rule(choice=choices, layer=st.integers(0, 1), byte=choices)
    def damage(self, choice: int, layer: int, byte: int) -> None:
        idle = [
            segment
            for segment in self.segments.values()
            if segment.num_leases == 0
            and not segment.is_damaged
            and not segment.is_zombie
            and segment.data.content[layer]
        ]
        if idle:
            segment = idle[choice % len(idle)]
            content = bytearray(segment.data.content[layer])
            flip_byte(self.store, segment.data.offsets[layer] + byte % len(content))
            segment.damage[layer] = len(content) - byte % len(content)

    @precondition(lambda self: self.segments)
    @rule(choice=choices)
    def report_damage(self, choice: int) -> None:
        segment_id = sorted(self.segments)[choice % len(self.segments)]
        segment = self.segments[segment_id]
        is_found = segment.is_damaged and not segment.is_zombie
        assert self.store.report_damage(segment_id) == is_found
        if is_found:
            self.remove(segment_id)

    @rule()
    def verify(self) -> None:
        damaged = [segment_id for segment_id in self.live() if self.segments[segment_id].is_damaged]
        report = self.store.verify()
        assert report.bad_segments == tuple(damaged)
        for segment_id in damaged:
            self.remove(segment_id)

    @invariant()
    def counts_are_right(self) -> None:
        stats = self.store.stats()
        everything = [segment.data for segment in self.segments.values()]
        everything += [pending.data for pending in self.pending]
        assert stats.used_bytes == sum(data.taken_bytes for data in everything) <= CAPACITY_BYTES
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes == CAPACITY_BYTES
        assert sorted(stored_ids(self.store)) == sorted(self.live())
        assert stats.num_pages == len(self.index)
        assert stats.num_leases == len(self.leases)
        assert stats.num_reservations == len(self.pending)
        live = [self.segments[segment_id] for segment_id in self.live()]
        assert stats.stored_bytes == sum(len(block) for segment in live for block in segment.data.content)

    @invariant()
    def blocks_do_not_overlap_and_keep_their_bytes(self) -> None:
        owners = np.zeros(CAPACITY_BYTES, dtype=int)
        buffer = self.store.buffer
        datas = [segment.data for segment in self.segments.values() if not segment.is_damaged]
        datas += [pending.data for pending in self.pending]
        for data in datas:
            for offset, content in zip(data.offsets, data.content, strict=True):
                if content:
                    owners[offset : offset + len(content)] += 1
                    assert buffer[offset : offset + len(content)].tobytes() == content
        assert owners.max() <= 1

    @invariant()
    def a_path_is_what_the_index_says(self) -> None:
        for model in MODELS:
            keys = keys_of(1, False, 0, 10)
            holders = [self.index.get((model.fingerprint, key)) for key in keys]
            path = [segment.segment_id for segment in self.store.path_segments(model, keys)]
            assert path == list(dict.fromkeys(holder for holder in holders if holder is not None))

    @invariant()
    def missing_pages_are_those_not_in_the_index(self) -> None:
        for model in MODELS:
            keys = keys_of(0, True, 0, 10)
            stored = {i for i, key in enumerate(keys) if (model.fingerprint, key) in self.index}
            assert all(self.store.page_filter.may_have(model, keys[i]) for i in stored)
            missing = self.store.find_missing(model, keys)
            assert [i for run in missing for i in run] == [i for i in range(10) if i not in stored]

    def teardown(self) -> None:
        while self.leases:
            self.release(0)
        while self.pending:
            self.abort(0)
        self.store.clear()
        assert self.store.stats().used_bytes == 0
        # All of it is one extent again.
        assert self.store.reserve((CAPACITY_BYTES,)) is not None
        self.store.close()


TestHostStoreMachine = HostStoreMachine.TestCase
TestHostStoreMachine.settings = settings(
    max_examples=120, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
