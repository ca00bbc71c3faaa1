"""Tracks which KV in the pool came back lossy, and sums what a conversation has spent of its budget."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from krul_backend.device import Device
from krul_sglang.engine.restore import Load, LoadBatch, SegmentReader


@dataclass(frozen=True)
class DamagedSpan:
    """Tokens ``[start, end)`` of a conversation that came, or would come, back lossy with one segment.

    ``segment_start`` is the first token of that segment, and identifies it within the conversation.
    ``damage`` is that of the whole segment in nats, times the tokens that the conversation had when the
    segment ended: over its length at any later time, it is what the segment costs then. Infinite if unknown.
    """

    start: int
    end: int
    segment_start: int
    damage: float


class KvProvenance:
    """Remembers for every slot of the pool whether the KV in it was decoded from a lossy segment.

    It also remembers what is moved: what came back at another position, or after other text, than it was
    computed with (see ``MovedRun``), and what was computed on top of that.

    It tracks slots, not pages: a page that left the device and was computed again is exact, and lies in slots
    that a forward has written. All notes are written by device operations after the forward, on its stream.
    None are written before the first load that is lossy or moved.

    Args:
        num_slots: of the pool.
        device: of the pool.
        batch_of: the loads of a forward by SGLang's consumer index, None if it has none.
        req_to_token: the slots of all requests by their row and position, as SGLang keeps them.
    """

    def __init__(
        self,
        num_slots: int,
        device: Device,
        batch_of: Callable[[int], LoadBatch | None],
        req_to_token: torch.Tensor,
    ) -> None:
        self._device = device
        self._batch_of = batch_of
        self._req_to_token = req_to_token
        # First token of the segment + 1; 0 where the KV is exact.
        self._segments = torch.zeros(num_slots, dtype=torch.int64, device=device.torch_device)
        self._damages = torch.zeros(num_slots, dtype=torch.float64, device=device.torch_device)
        self._is_moved = torch.zeros(num_slots, dtype=torch.bool, device=device.torch_device)
        self._is_all_exact = True
        self._is_none_moved = True

    def after_forward(self, schedule_batch: Any) -> None:
        """Note what a forward of SGLang's ``ScheduleBatch`` has computed, and what was loaded for it; drafts
        may be verified as a ``ForwardBatch``."""
        batch: LoadBatch | None = None
        if schedule_batch.forward_mode.is_extend_without_speculative():
            batch = self._batch_of(schedule_batch.hicache_consumer_index)
        for load in () if batch is None else batch.loads.values():
            self._mark_exact(load.slots)
            # Loads that were given up were recomputed instead, so they are exact.
            if batch is not None and not batch.is_abandoned:
                self._mark_loaded(load)
        slots = schedule_batch.out_cache_loc
        if slots is not None and not self._is_all_exact:
            follows_moved = None if self._is_none_moved else self._follows_moved(schedule_batch, len(slots))
            self._mark_exact(slots)
            if follows_moved is not None:
                self._is_moved.index_copy_(0, slots.long(), follows_moved)

    def read(self, slots: torch.Tensor) -> list[DamagedSpan]:
        """The lossy tokens of a conversation that lies in ``slots`` (int64 ``[T]``). Waits for the device."""
        if self._is_all_exact:
            return []
        segments = self._segments[slots].cpu().numpy()
        damages = self._damages[slots].cpu().numpy()
        is_new = (segments[1:] != segments[:-1]) | (damages[1:] != damages[:-1])
        bounds = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(segments)]
        return [
            DamagedSpan(start, end, int(segments[start]) - 1, float(damages[start]))
            for start, end in itertools.pairwise(bounds)
            if start < end and segments[start]
        ]

    def first_moved(self, slots: torch.Tensor) -> int | None:
        """The first token of a conversation in ``slots`` (int64 ``[T]``) that is moved, or was computed on
        top of what is moved; None if none is. Waits for the device."""
        if self._is_none_moved:
            return None
        moved = self._is_moved[slots].cpu().numpy()
        return int(moved.argmax()) if moved.any() else None

    def is_exact(self, slots: torch.Tensor) -> bool:
        """Whether all that lies in ``slots`` is what the model computes of the conversation alone."""
        return not self.read(slots) and self.first_moved(slots) is None

    def _follows_moved(self, schedule_batch: Any, num_slots: int) -> torch.Tensor:
        """For each new token of a forward, bool ``[num_slots]``: whether what lies before the first new one
        of its request is moved.

        Asked of that one slot: SGLang may replace a request's earlier slots by others of the same tokens,
        which another request has computed.
        """
        counts: torch.Tensor | None = None
        if schedule_batch.forward_mode.is_extend_without_speculative():
            starts, counts = self._device.from_list([schedule_batch.prefix_lens, schedule_batch.extend_lens])
        elif schedule_batch.forward_mode.is_target_verify():
            # As many drafted tokens of each request, behind its own.
            starts = schedule_batch.seq_lens
            counts = torch.full_like(starts, num_slots // len(starts))
        else:
            starts = schedule_batch.seq_lens - 1
        before = self._req_to_token[schedule_batch.req_pool_indices, (starts - 1).clamp(min=0)]
        is_moved: torch.Tensor = self._is_moved[before.long()] & (starts > 0)
        return is_moved if counts is None else is_moved.repeat_interleave(counts, output_size=num_slots)

    def _mark_exact(self, slots: torch.Tensor) -> None:
        if not self._is_all_exact:
            self._segments.index_fill_(0, slots.long(), 0)
            self._is_moved.index_fill_(0, slots.long(), False)

    def _mark_loaded(self, load: Load) -> None:
        if load.moved is not None:
            self._is_moved.index_fill_(0, load.tail_slots(-1), True)
            self._is_all_exact = self._is_none_moved = False
        for reader in load.readers:
            first = first_lossy_token(reader, load.plan.head_ends)
            if first < reader.end_token:
                slots = load.slots[first - load.device_tokens : reader.end_token - load.device_tokens]
                segment_start = reader.first_token if load.moved else reader.source.header.start_token
                self._segments.index_fill_(0, slots, segment_start + 1)
                self._damages.index_fill_(0, slots, damage_of(reader))
                self._is_all_exact = False


def damage_of(reader: SegmentReader) -> float:
    """What a conversation loses with a segment, in nats times tokens. If it reads the beginning alone, since
    another conversation goes on there, it loses that part's share."""
    header = reader.source.header
    share = (reader.end_token - reader.shift - header.start_token) / header.num_tokens
    return reader.decoder.damage * header.end_token * share


def first_lossy_token(reader: SegmentReader, head_ends: Sequence[int]) -> int:
    """The token from which on a restored segment is lossy in some layer; its end if no layer is lossy.

    Heads are recomputed, and so as exact as the history before them. A loaded tail is exact if its layer was
    stored natively and on its own, unless the stored KV was lossy already.
    """
    stored_as = reader.decoder.stored_as
    was_lossy = stored_as.is_lossless and reader.decoder.damage > 0
    firsts = [
        max(head_end, reader.first_token)
        for head_end, is_lossy in zip(head_ends, stored_as.lossy_layers, strict=True)
        if is_lossy or was_lossy
    ]
    return min([*firsts, reader.end_token])


def spent_damage(
    stored: Sequence[DamagedSpan], lossy: Sequence[DamagedSpan], missing: Sequence[range], num_tokens: int
) -> float:
    """The damage in nats that a conversation of ``num_tokens`` tokens has so far: what its segments cost now.

    ``stored`` are its segments in the store, ``lossy`` what of it came back lossy, ``missing`` the tokens
    that the store does not hold. Lossy tokens that are in no stored segment count with their share of the
    segment that they came with: what of it is stored again counts with the segments that hold it now.
    Infinite if some token is stored and the damage of its segment is not known.
    """
    stored = _held(stored, missing)
    # A segment may be both remembered and found.
    spent = sum({span.segment_start: span.damage for span in stored}.values())
    is_known = np.zeros(num_tokens, dtype=bool)
    for span in stored:
        is_known[span.start : span.end] = True
    num_lossy = _num_lossy(lossy)
    for span in lossy:
        if num_left := int((~is_known[span.start : span.end]).sum()):
            spent += span.damage * num_left / num_lossy[span.segment_start]
    for span in lossy:
        is_known[span.start : span.end] = True
    for tokens in missing:
        is_known[tokens.start : tokens.stop] = True
    return spent / num_tokens if is_known.all() else math.inf


def _held(stored: Sequence[DamagedSpan], missing: Sequence[range]) -> list[DamagedSpan]:
    """The part of each segment that the conversation holds, with its share of the damage.

    A segment ends early where the next one begins, or where tokens are missing: its other tokens are those of
    a conversation that began alike.
    """
    bounds = sorted({span.start for span in stored} | {tokens.start for tokens in missing})
    held = []
    for span in stored:
        end = min([span.end, *(bound for bound in bounds if bound > span.start)])
        share = (end - span.start) / (span.end - span.start)
        held.append(replace(span, end=end, damage=span.damage * share))
    return held


def carried_damage(lossy: Sequence[DamagedSpan], tokens: range) -> float:
    """The damage in nats, at the end of these tokens, that their KV already has: their share of each segment
    that they came with."""
    num_lossy = _num_lossy(lossy)
    return (
        sum(
            span.damage * num_inside / num_lossy[span.segment_start]
            for span in lossy
            if (num_inside := min(span.end, tokens.stop) - max(span.start, tokens.start)) > 0
        )
        / tokens.stop
    )


def _num_lossy(lossy: Sequence[DamagedSpan]) -> Counter[int]:
    """How many tokens came back lossy with each segment, by its first token."""
    num_lossy: Counter[int] = Counter()
    for span in lossy:
        num_lossy[span.segment_start] += span.end - span.start
    return num_lossy
