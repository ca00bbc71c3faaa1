"""A loader with all that it needs, in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.device import Device
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.strategy.strategy import Strategy
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.load_batch import Load, LoadBatch
from krul_sglang.engine.restore.loading import LayerWiseLoader
from tests.support.codec_builders import encode_all, random_layers
from tests.support.engine_builders import PATIENCE_S, TensorPool, make_load, make_store
from tests.support.present import present
from tests.support.store_builders import commit_to
from tests.support.strict_device import check_device, lock_all

NUM_LAYERS = 3
PAGE_SIZE = 4
NUM_PAGES = 2
NUM_TOKENS = NUM_PAGES * PAGE_SIZE
SHAPE = LayerShape(2, 8, 8, torch.float32)


class Rig:
    """A store with one conversation, a pool, and a loader whose layers can be made to wait or to fail."""

    def __init__(
        self,
        timeout_s: float,
        tiers: Sequence[LowerTier] = (),
        device: Device | None = None,
        *,
        range_bytes: int = 0,
        group_size: int = 64,
        pairs: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.gate = TransferGate(max_wait_s=PATIENCE_S)
        self.store = make_store(1 << 20, tiers)
        self.pool: Any = TensorPool(SHAPE, NUM_LAYERS, num_slots=64, device=device)
        self.device: Device = self.pool.streams
        lock_all(self.device, self.store.host.buffer)
        self.codec = ModelCodecs(SHAPE, NUM_LAYERS, None, CodecOptions(group_size=group_size))
        self.layers = random_layers(SHAPE, NUM_LAYERS, NUM_TOKENS)
        self.before_layer: Callable[[int, int], None] = lambda index, layer: None
        self.loader = LayerWiseLoader(
            self.store, self.pool, self.gate, timeout_s, before_layer=lambda *at: self.before_layer(*at)
        )
        self.model = ModelIdentity("m", "d", "float32", NUM_LAYERS, 2, 8, 8, PAGE_SIZE, 0, 1)
        self.page_keys = [f"page-{page}" for page in range(NUM_PAGES)]
        self.token_ids = np.arange(NUM_TOKENS, dtype=np.int64)
        encoding, blocks, _ = encode_all(self.codec, Strategy.from_pairs(NUM_LAYERS, pairs), self.layers, 0)
        reservation = present(self.store.reserve(encoding.layer_num_bytes))
        for layer, block in blocks.items():
            reservation.blocks[layer][:] = block.numpy()
        manifest = SegmentManifest(
            self.model,
            tuple(self.page_keys),
            None,
            0,
            self.token_ids,
            "krul",
            encoding.layer_num_bytes,
            encoding.params,
            range_bytes=range_bytes,
        )
        commit_to(self.store, reservation, manifest)

    def close(self) -> None:
        self.loader.close()
        self.store.close()
        check_device(self.device)

    def load(self, slots: torch.Tensor) -> Load:
        lease = present(self.store.lease(self.model, self.page_keys, self.token_ids))
        return make_load(lease, self.codec, slots)

    def start(self, slots: torch.Tensor) -> int:
        return self.loader.start({"r": self.load(slots)})

    def batch(self, index: int) -> LoadBatch:
        return present(self.loader.batch(index))

    def num_leases(self) -> int:
        return self.store.stats().num_leases

    def holds(self, layer: int, slots: torch.Tensor) -> bool:
        return is_equal(self.pool.gather(layer, slots), self.layers[layer])


def is_equal(one: LayerKV, other: LayerKV) -> bool:
    return torch.equal(one.k, other.k) and torch.equal(one.v, other.v)
