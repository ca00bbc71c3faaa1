"""What the parts of a restore cost on this machine, measured by running them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.restore.restorer import Marks, Restorer, Turn
from benchmarks.restore.stored import StoredConversation
from benchmarks.restore.tiers import Tier
from krul_backend.codec.unit_restore import restore_layer

ComputeSample = tuple[int, int, float]
"""Tokens, tokens before them, seconds of one layer."""

LoadSample = tuple[int, float]
"""Bytes, seconds of one copy."""

_PARTS = 4
"""Loads and decodes are measured in so many sizes."""


@dataclass(frozen=True)
class Calibration:
    """Runs each piece ``repeats`` times after one warm-up and takes the median."""

    restorer: Restorer
    repeats: int

    @torch.inference_mode()
    def heads(self, turn: Turn) -> list[ComputeSample]:
        """Heads of lengths that double, up to the whole history. Nothing is on the device before them."""
        num_layers = self.restorer.pool.num_layers
        return self._layers(
            {
                (length, 0): partial(self.restorer.recompute_heads, turn, [length] * num_layers)
                for length in _doubling(turn.history_tokens)
            }
        )

    @torch.inference_mode()
    def own(self, turns: Iterable[Turn]) -> list[ComputeSample]:
        """New tokens after each history, half of each turn after the other half, and each turn as a whole."""
        return self._layers(
            {
                (turn.num_tokens - num_past, num_past): partial(self._own_marks, turn, num_past)
                for turn in turns
                for num_past in (0, turn.history_tokens // 2, turn.history_tokens)
            }
        )

    @torch.inference_mode()
    def loads(self, stored: StoredConversation, tier: Tier) -> list[LoadSample]:
        """A quarter, a half, ... of the blocks of the last segment: the median over layers.

        ``stored`` is native: its blocks are all of one size.
        Each is read once, as in a restore: what has just been read would come from a processor's cache.
        """
        number = len(stored.segments) - 1
        num_bytes = stored.segments[number].blocks[0].numel()
        samples = []
        for part in range(_PARTS):
            first_byte = num_bytes * part // _PARTS
            seconds = [
                self._once(partial(tier.read, stored.key(number, layer), first_byte))
                for layer in range(stored.num_layers)
            ]
            samples.append((num_bytes - first_byte, statistics.median(seconds)))
        return samples

    @torch.inference_mode()
    def decodes(self, stored: StoredConversation, turn: Turn) -> tuple[float, ...]:
        """Seconds per token of each layer: the slope through the origin that fits several lengths best."""
        segment = stored.segments[-1]
        num_tokens = segment.end_token - segment.first_token
        pool = self.restorer.pool
        slopes = []
        for layer in range(stored.num_layers):
            blocks = {source: segment.blocks[source] for source in segment.decoder.sources(layer)}
            points = []
            for part in range(_PARTS):
                first = num_tokens * part // _PARTS
                decode = partial(
                    restore_layer,
                    segment.decoder,
                    layer,
                    blocks,
                    first,
                    num_tokens,
                    pool.k[layer],
                    pool.v[layer],
                    turn.slots[segment.first_token + first : segment.end_token],
                )
                decode()
                seconds = statistics.median(self._once(decode) for _ in range(self.repeats))
                points.append((num_tokens - first, seconds))
            slopes.append(_slope(points))
        return tuple(slopes)

    def _own_marks(self, turn: Turn, num_past: int) -> Marks:
        return self.restorer.own_forward(turn, num_past)[1]

    def _layers(self, forwards: Mapping[tuple[int, int], Callable[[], Marks]]) -> list[ComputeSample]:
        """Seconds of one layer, without what a forward does before the first and after the last.

        All of them in each round, so that a moment in which the machine is busy spoils no size alone.
        """
        device = self.restorer.device
        seconds: dict[tuple[int, int], list[float]] = {size: [] for size in forwards}
        for number in range(1 + self.repeats):
            for size, forward in forwards.items():
                marks = forward()
                device.synchronize()
                if number > 0:
                    total_s = sum(start.seconds_until(end) for start, end in marks)
                    seconds[size].append(total_s / len(marks))
        return [(*size, statistics.median(of_size)) for size, of_size in seconds.items()]

    def _once(self, work: Callable[[], object]) -> float:
        device = self.restorer.device
        device.synchronize()
        start = device.record()
        work()
        end = device.record()
        device.synchronize()
        return start.seconds_until(end)


def _doubling(limit: int) -> list[int]:
    """64 or, if that is less, a quarter of ``limit``; twice that, ..., and ``limit``."""
    lengths = [min(64, limit // 4)]
    while lengths[-1] < limit:
        lengths.append(min(2 * lengths[-1], limit))
    return lengths


def _slope(points: Sequence[tuple[int, float]]) -> float:
    return sum(x * y for x, y in points) / sum(x * x for x, _ in points)
