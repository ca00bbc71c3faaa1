"""Segments to measure with: their manifests, their bytes, and somewhere to copy to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.tiers.configuration import TiersBenchmarkError
from benchmarks.tiers.timing import seconds_of
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds

PAGE_SIZE = 16
Bytes = npt.NDArray[np.uint8]


def make_model(num_layers: int) -> ModelIdentity:
    return ModelIdentity(
        name="benchmark",
        config_digest="0" * 64,
        dtype="bfloat16",
        num_layers=num_layers,
        num_kv_heads=8,
        k_head_dim=128,
        v_head_dim=128,
        page_size=PAGE_SIZE,
        tp_rank=0,
        tp_size=1,
    )


def page_keys(conversation: int, first: int, end: int) -> tuple[str, ...]:
    """As long as real ones: a SHA-256 in hexadecimal digits."""
    return tuple(f"{conversation:032x}{page:032x}" for page in range(first, end))


def token_ids(first: int, end: int) -> TokenIds:
    return np.arange(first * PAGE_SIZE, end * PAGE_SIZE, dtype=np.int64)


def make_manifest(
    model: ModelIdentity, conversation: int, first: int, end: int, sizes: Sequence[int]
) -> SegmentManifest:
    """Pages ``[first, end)`` of a conversation in blocks of ``sizes`` bytes."""
    return SegmentManifest(
        model=model,
        page_keys=page_keys(conversation, first, end),
        parent_key=page_keys(conversation, first - 1, first)[0] if first else None,
        start_token=first * PAGE_SIZE,
        token_ids=token_ids(first, end),
        codec="raw",
        layer_num_bytes=tuple(sizes),
    )


class Source:
    """Blocks to store, filled before any clock starts: random bytes that tell segments apart."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        rng = np.random.default_rng(block_bytes)
        self.blocks = [rng.integers(0, 256, block_bytes, dtype=np.uint8) for _ in range(num_blocks)]

    def stamp(self, number: int) -> None:
        """Write the segment's number into each block."""
        for block in self.blocks:
            block[:8].view(np.int64)[0] = number

    def check(self, number: int, blocks: Sequence[Bytes], op: str) -> None:
        """Raises TiersBenchmarkError if ``blocks`` are not what was stored as ``number``."""
        self.stamp(number)
        for layer, (given, stored) in enumerate(zip(blocks, self.blocks, strict=True)):
            if not np.array_equal(given, stored):
                raise TiersBenchmarkError(f"{op}: layer {layer} of segment {number} came back wrong")


class Ring:
    """Memory that was touched before, handed out in turn, so that no copy finds its target in a cache."""

    def __init__(self, block_bytes: int, num_blocks: int, ring_bytes: int) -> None:
        num_sets = max(2, ring_bytes // (block_bytes * num_blocks))
        memory = np.zeros((num_sets, num_blocks, block_bytes), dtype=np.uint8)
        memory.fill(1)
        self._sets = itertools.cycle([list(blocks) for blocks in memory])

    def take(self) -> list[Bytes]:
        return next(self._sets)


def copy_blocks(sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


class Operations:
    """What is timed of one kind of storage. Each operation returns its seconds; sources are filled and bytes
    compared outside."""

    def __init__(self, block_bytes: int, num_blocks: int, ring_bytes: int) -> None:
        self.model = make_model(num_blocks)
        self.block_bytes, self.num_blocks = block_bytes, num_blocks
        self.source = Source(block_bytes, num_blocks)
        self.ring = Ring(block_bytes, num_blocks, ring_bytes)
        self._numbers = itertools.count()

    def memcpy(self) -> float:
        """Of the same blocks."""
        target = self.ring.take()
        return seconds_of(lambda: copy_blocks(self.source.blocks, target))

    def next_segment(self) -> tuple[int, SegmentManifest]:
        """The number and the manifest of another segment, whose blocks are those of ``source`` now."""
        number = next(self._numbers)
        self.source.stamp(number)
        sizes = (self.block_bytes,) * self.num_blocks
        return number, make_manifest(self.model, number, 0, 1, sizes)
