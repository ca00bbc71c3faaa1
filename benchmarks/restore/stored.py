"""A conversation as it is stored: one segment per turn, each encoded as one strategy says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from benchmarks.restore.model import KVPool
from benchmarks.restore.tiers import Tier
from krul_backend.codec.interface import TokenRun
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitDecoder, UnitPlan
from krul_backend.strategy.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Segment:
    """Tokens ``[first_token, end_token)``; ``blocks[l]`` uint8, whole, on the device that encoded them."""

    first_token: int
    end_token: int
    decoder: UnitDecoder
    blocks: tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class StoredConversation:
    """``name`` is that of the strategy. ``last_use[l]``: the last layer that needs the block of ``l``."""

    name: str
    strategy: Strategy
    segments: tuple[Segment, ...]

    @property
    def num_layers(self) -> int:
        return len(self.strategy.layers)

    @property
    def num_tokens(self) -> int:
        return self.segments[-1].end_token

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        decoder = self.segments[0].decoder
        last_use = {source: layer for layer in range(self.num_layers) for source in decoder.sources(layer)}
        return tuple(last_use[layer] for layer in range(self.num_layers))

    def key(self, number: int, layer: int) -> tuple[object, ...]:
        """The tier's key of a layer's block of segment ``number``."""
        return self.name, self.num_tokens, number, layer

    def put(self, tier: Tier) -> None:
        for number, segment in enumerate(self.segments):
            for layer, block in enumerate(segment.blocks):
                tier.add(self.key(number, layer), block)

    def tail_start(self, number: int, layer: int, first_token: int) -> int | None:
        """First byte of ``layer``'s block of segment ``number`` that tokens from ``first_token`` on need.

        ``first_token`` is a token of the conversation. None if they need nothing of it.
        """
        segment = self.segments[number]
        if first_token >= segment.end_token:
            return None
        return segment.decoder.tail_start(layer, max(0, first_token - segment.first_token))

    def tail_bytes(self, head_ends: Sequence[int]) -> int:
        """Bytes of the parts that a restore with these heads reads: all that has to be stored for it."""
        num_bytes = 0
        for number, segment in enumerate(self.segments):
            for layer, (block, last_use) in enumerate(zip(segment.blocks, self.last_use, strict=True)):
                start = self.tail_start(number, layer, head_ends[last_use])
                num_bytes += 0 if start is None else block.numel() - start
        return num_bytes

    def decode_tails(self, head_ends: Sequence[int], pool: KVPool, slots: torch.Tensor) -> None:
        """Write rows from ``head_ends[l]`` on, decoded from whole blocks: the oracle for loading."""
        for segment in self.segments:
            for layer, head_end in enumerate(head_ends):
                # [first_token, first)  recomputed: not touched
                # [first, end_token)    decoded
                first = max(segment.first_token, head_end)
                if first >= segment.end_token:
                    continue
                blocks = {source: segment.blocks[source] for source in segment.decoder.sources(layer)}
                kv = segment.decoder.decode(
                    layer, blocks, first - segment.first_token, segment.end_token - segment.first_token
                )
                pool.write(layer, slots[first : segment.end_token], kv)


def segment_ends(num_tokens: int, num_segments: int, page_size: int) -> list[int]:
    """Ends of turns of about equal length, in whole pages; fewer turns if there are not so many pages."""
    num_pages = num_tokens // page_size
    return sorted({num_pages * turn // num_segments * page_size for turn in range(1, num_segments + 1)} - {0})


def store(
    name: str,
    codec: ModelCodecs,
    strategy: Strategy,
    pool: KVPool,
    slots: torch.Tensor,
    ends: Sequence[int],
) -> StoredConversation:
    """Encode what is in the pool at ``slots`` (int64, token after token) as segments that end at ``ends``."""
    segments = []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        read = partial(pool.gather, slots=slots[first:end])
        encoding = codec.of(strategy).encode(TokenRun(read, first, end - first), UnitPlan(strategy))
        blocks = dict(encoding.blocks)
        decoder = codec.of(strategy).open(encoding.params, start_token=first, num_tokens=end - first)
        segments.append(Segment(first, end, decoder, tuple(blocks[layer] for layer in sorted(blocks))))
    return StoredConversation(name, strategy, tuple(segments))
