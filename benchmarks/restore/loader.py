"""The load stream of a restore: a thread that fills the pool layer after layer, each tail with one copy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from benchmarks.restore.model import KVPool
from benchmarks.restore.stored import StoredConversation
from benchmarks.restore.tiers import Tier
from krul_backend.codec.restore import restore_layer
from krul_backend.device import Device, Event

PendingChecks = dict[tuple[int, int], Future[None]]
"""By segment and layer."""


class Loading:
    """One restore's loads. ``marks[l]``: start and end of layer ``l``; all are there after ``finish``."""

    ended: Future[None]

    def __init__(self, device: Device, num_layers: int) -> None:
        self.marks: list[tuple[Event, Event]] = []
        self.num_bytes = 0
        self._device = device
        self._loaded = [threading.Event() for _ in range(num_layers)]

    def add(self, start: Event, end: Event, num_bytes: int) -> None:
        """The next layer has been loaded, or queued on the load stream."""
        self.num_bytes += num_bytes
        self.marks.append((start, end))
        self._loaded[len(self.marks) - 1].set()

    def fail(self) -> None:
        """Nobody waits any longer; ``wait`` raises."""
        for loaded in self._loaded:
            loaded.set()

    def wait(self, layer: int) -> None:
        """What the current stream is given from now on runs after the load of ``layer``.

        Raises what the loading thread raised.
        """
        self._loaded[layer].wait()
        if layer >= len(self.marks):
            self.finish()
        self._device.wait_for(self.marks[layer][1])

    def finish(self) -> None:
        """Wait until the thread has ended. Raises what it raised."""
        self.ended.result()


class LayerLoader:
    """Loads from one tier into one pool. Blocks are checked ahead of their copies, as the engine does."""

    def __init__(self, device: Device, pool: KVPool) -> None:
        self._device = device
        self._pool = pool
        self._worker = ThreadPoolExecutor(1, "load", initializer=device.bind_thread)
        self._stream = device.new_stream()
        self._checker = ThreadPoolExecutor(1 if device.shares_cores else 4, "check")

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        self._checker.shutdown(wait=True)

    def start(
        self, stored: StoredConversation, tier: Tier, head_ends: Sequence[int], slots: torch.Tensor
    ) -> Loading:
        """Begin to fill ``slots`` (int64, at least the conversation's tokens) from ``head_ends[l]`` on."""
        loading = Loading(self._device, stored.num_layers)
        loading.ended = self._worker.submit(self._load, loading, stored, tier, head_ends, slots)
        return loading

    def _load(
        self,
        loading: Loading,
        stored: StoredConversation,
        tier: Tier,
        head_ends: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        checks: PendingChecks = {}
        try:
            with torch.inference_mode(), self._device.on_stream(self._stream):
                if tier.lies_in_memory:
                    self._announce(checks, stored, tier, head_ends)
                blocks: list[dict[int, torch.Tensor]] = [{} for _ in stored.segments]
                for layer in range(stored.num_layers):
                    start = self._device.record()
                    num_bytes = sum(
                        self._load_segment(stored, tier, number, layer, head_ends, slots, of_segment, checks)
                        for number, of_segment in enumerate(blocks)
                    )
                    loading.add(start, self._device.record(), num_bytes)
        except BaseException:
            for checked in checks.values():
                checked.cancel()
            loading.fail()
            raise

    def _announce(
        self, checks: PendingChecks, stored: StoredConversation, tier: Tier, head_ends: Sequence[int]
    ) -> None:
        """Begin to check all that will be copied, in that order."""
        for layer in range(stored.num_layers):
            for number in range(len(stored.segments)):
                tail_start = stored.tail_start(number, layer, head_ends[stored.last_use[layer]])
                if tail_start is not None:
                    key = stored.key(number, layer)
                    checks[number, layer] = self._checker.submit(tier.check, key, tail_start)

    def _load_segment(
        self,
        stored: StoredConversation,
        tier: Tier,
        number: int,
        layer: int,
        head_ends: Sequence[int],
        slots: torch.Tensor,
        blocks: dict[int, torch.Tensor],
        checks: PendingChecks,
    ) -> int:
        """One layer of one segment. Returns the bytes copied; ``blocks`` keeps what later layers need.

        ::

            [first_token, h_last)  of the block: not read; h_last is the head of the layer that needs it last
            [h_last, h_l)          read for a later layer
            [h_l, end_token)       read and decoded into the pool
        """
        segment = stored.segments[number]
        num_bytes = 0
        tail_start = stored.tail_start(number, layer, head_ends[stored.last_use[layer]])
        if tail_start is not None:
            if (number, layer) in checks:
                checks[number, layer].result()
            blocks[layer] = tier.read(stored.key(number, layer), tail_start)
            num_bytes = blocks[layer].numel()
        first = max(segment.first_token, head_ends[layer])
        if first < segment.end_token:
            restore_layer(
                segment.decoder,
                layer,
                blocks,
                first - segment.first_token,
                segment.end_token - segment.first_token,
                self._pool.k[layer],
                self._pool.v[layer],
                slots[first : segment.end_token],
            )
        return num_bytes
