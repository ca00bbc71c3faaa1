"""One host of a Mooncake cluster as a process: an arena, a tier, and commands on standard input.

Each line in is a JSON list, an operation and its arguments; each line out is a JSON value, its result.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from krul_backend.errors import TierReadError
from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import Block, block_checksums
from krul_backend.tiers.dram.arena import Arena
from krul_backend.tiers.objects.mooncake_client import MooncakeOptions
from krul_backend.tiers.objects.tier import ObjectTier
from tests.support.store_builders import make_manifest, make_model, page_keys, read_tail, tokens_of

SIZES = (3 << 20, 1 << 20)
MODEL = make_model()


def random_bytes(manifest: SegmentManifest, seed: int) -> list[Block]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in manifest.layer_num_bytes]


class Host:
    def __init__(self, options: MooncakeOptions) -> None:
        self.arena = Arena(64 << 20)
        self.tier = ObjectTier(options, self.arena.buffer)
        self.num_ticks = 0
        threading.Thread(target=self._tick, daemon=True).start()

    def put(self, conversation: str, end: int, seed: int, damaged_layer: int | None = None) -> bool:
        """Store a segment; a damaged layer's bytes are others than its checksum says."""
        manifest = make_manifest(conversation, 0, end, SIZES)
        blocks = self._blocks()
        for block, value in zip(blocks, random_bytes(manifest, seed), strict=True):
            block[:] = value
        checksums = block_checksums(blocks)
        if damaged_layer is not None:
            blocks[damaged_layer][0] ^= 1
        done = threading.Event()
        return self.tier.put(manifest, blocks, checksums, done.set) and done.wait(30)

    def match(self, conversation: str, end: int) -> list[int]:
        """Pages that are found, and milliseconds that it took."""
        keys = page_keys(conversation, 0, end)
        started_s = time.monotonic()
        runs = self.tier.match(MODEL, keys, tokens_of(keys), 0)
        took_s = time.monotonic() - started_s
        return [sum(run.end_page - run.first_page for run in runs), int(1000 * took_s)]

    def fetch(self, conversation: str, end: int, seed: int, sizes: Sequence[int] = SIZES) -> str:
        """``right``, ``wrong``, or the message of the error. ``sizes``: of the ends that are read."""
        keys = page_keys(conversation, 0, end)
        runs = self.tier.match(MODEL, keys, tokens_of(keys), 0)
        if not runs:
            return "miss"
        blocks = self._blocks(sizes)
        landed: list[int] = []
        try:
            read_tail(self.tier, runs[0], blocks, landed.append)
        except TierReadError as error:
            return str(error)
        same = (
            np.array_equal(block, value[value.nbytes - block.nbytes :])
            for block, value in zip(blocks, random_bytes(runs[0].segment.manifest, seed), strict=True)
        )
        return "right" if all(same) and landed == [0, 1] else "wrong"

    def clear(self) -> None:
        self.tier.clear(MODEL)

    def stats(self) -> dict[str, Any]:
        return vars(self.tier.stats())

    def ticks(self) -> int:
        """Milliseconds in which this process's other threads could run."""
        return self.num_ticks

    def _blocks(self, sizes: Sequence[int] = SIZES) -> list[Block]:
        allocation = self.arena.allocate(sizes)
        assert allocation is not None, "the test's arena is too small"
        return list(self.arena.views(allocation))

    def _tick(self) -> None:
        while True:
            time.sleep(0.001)
            self.num_ticks += 1


def main() -> None:
    host = Host(MooncakeOptions(**json.loads(sys.argv[1])))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        print(json.dumps(getattr(host, operation)(*arguments)), flush=True)
    host.tier.close()


if __name__ == "__main__":
    main()
