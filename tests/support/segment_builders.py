"""A small conversation in three segments of every kind, stored whole or without its first tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitPlan
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.interface import KVStore
from krul_backend.strategy.strategy import Precision, Strategy
from krul_backend.tiers.common.interface import DRAM_TIER, Lease, SegmentSlice, Span, block_checksums
from tests.support.codec_builders import random_layers, rotary_table
from tests.support.store_builders import commit_to

SHAPE = LayerShape(2, 8, 4, torch.float32)
NUM_LAYERS = 4
PAGE_SIZE = 4
GROUP = 8
BOUNDS = (0, 24, 44, 56)
"""Segments of full groups, of a shorter last group, and of one group and a half."""
DEVICE_TOKENS = 8
END = BOUNDS[-1]
PAIRS = [(0, 2), (1, 3)]
TABLE = rotary_table(SHAPE.k_head_dim)
MODEL = ModelIdentity("m", "d", "float32", NUM_LAYERS, 2, 8, 4, PAGE_SIZE, 0, 1)
LAYERS = random_layers(SHAPE, NUM_LAYERS, END)

MIXED = Strategy.from_pairs(
    NUM_LAYERS, [], [Precision.INT8, Precision.INT4, Precision.INT2, Precision.NATIVE]
)
KINDS = {
    "native": Strategy.from_pairs(NUM_LAYERS),
    "coded": MIXED,
    "slerp": Strategy.from_pairs(NUM_LAYERS, PAIRS),
    "slerp-int4": Strategy.from_pairs(NUM_LAYERS, [(0, 3)], Precision.INT4),
}
Heads = tuple[int, ...]


CODEC = ModelCodecs(SHAPE, NUM_LAYERS, TABLE, CodecOptions(group_size=GROUP, retained_amount=0.2))


def rows_of(start: int, end: int) -> list[LayerKV]:
    return [LayerKV(kv.k[start:end], kv.v[start:end]) for kv in LAYERS]


class Stored(NamedTuple):
    manifest: SegmentManifest
    blocks: tuple[torch.Tensor, ...]


def stored(kind: str, start: int, end: int, kept_heads: Heads | None = None) -> Stored:
    """One segment as the offloader stores it, without what ``kept_heads`` would recompute."""
    layers = rows_of(start, end)
    run = TokenRun(layers.__getitem__, start, end - start, kept_heads)
    encoding = CODEC.of(KINDS[kind]).encode(run, UnitPlan(KINDS[kind]))
    blocks = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    for layer, block in encoding.blocks:
        blocks[layer] = block
    pages = tuple(f"page-{page}" for page in range(start // PAGE_SIZE, end // PAGE_SIZE))
    manifest = SegmentManifest(
        MODEL,
        pages,
        f"page-{start // PAGE_SIZE - 1}" if start else None,
        start,
        np.arange(start, end, dtype=np.int64),
        "krul",
        encoding.layer_num_bytes,
        encoding.params,
        encoding.layer_first_token,
    )
    return Stored(manifest, tuple(blocks))


@cache
def whole_segments(kind: str) -> tuple[Stored, ...]:
    return tuple(stored(kind, start, end) for start, end in pairwise(BOUNDS))


def in_ranges(segment: Stored, range_bytes: int) -> Stored:
    """A segment whose blocks are checked, cut and read in ranges of this size."""
    return segment._replace(manifest=replace(segment.manifest, range_bytes=range_bytes))


def store_in(store: KVStore, segment: Stored) -> None:
    """Reserve room for a segment, copy its blocks there and commit it."""
    reservation = store.reserve(segment.manifest.layer_num_bytes)
    assert reservation is not None
    for target, block in zip(reservation.blocks, segment.blocks, strict=True):
        target[:] = block.numpy()
    commit_to(store, reservation, segment.manifest)


def lease_of(segments: tuple[Stored, ...], device_tokens: int) -> Lease:
    """All pages of a conversation after ``device_tokens``, which lie in the first of its segments."""
    slices = []
    for segment_id, (manifest, blocks) in enumerate(segments):
        first_page = max(0, device_tokens - manifest.start_token) // PAGE_SIZE
        arrays = tuple(block.numpy() for block in blocks)
        # They lie in no arena: each span is where it would lie if the blocks were the whole of one.
        ends = np.cumsum([array.nbytes for array in arrays])
        slices.append(
            SegmentSlice(
                segment_id=segment_id,
                header=manifest.header,
                tier=DRAM_TIER,
                blocks=arrays,
                spans=tuple(
                    Span(int(end) - array.nbytes, array.nbytes)
                    for end, array in zip(ends, arrays, strict=True)
                ),
                checksums=block_checksums(arrays, manifest.range_bytes),
                first_page=first_page,
                end_page=len(manifest.page_keys),
            )
        )
    num_pages = sum(part.end_page - part.first_page for part in slices)
    return Lease(1, num_pages, tuple(slices))
