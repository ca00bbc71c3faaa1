"""A tiny decoder, its pool and a stored history for the tests of the restore benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.restore.model import Decoder, KVPool, ModelShape, scattered_slots
from benchmarks.restore.restorer import LayerLoader, Restorer, Turn
from benchmarks.restore.setting import strategies
from benchmarks.restore.stored import StoredConversation, segment_ends, store
from benchmarks.restore.tiers import DramTier
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.device import Device

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=50,
)
PAGE_SIZE = 64
HISTORY_TOKENS = 4 * PAGE_SIZE
NEW_TOKENS = 10
NUM_TOKENS = HISTORY_TOKENS + NEW_TOKENS
NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Bench:
    """``history[l]`` and ``logits``: what computing everything gives. ``stored`` by strategy, two turns."""

    restorer: Restorer
    loader: LayerLoader
    tier: DramTier
    turn: Turn
    history: list[LayerKV]
    logits: torch.Tensor
    stored: dict[str, StoredConversation]


@contextmanager
def bench() -> Iterator[Bench]:
    """fp32, with every stored history in host memory and a pool that holds nothing but NaN."""
    device = Device(torch.device("cpu"))
    kv_shape = SHAPE.kv_shape(torch.float32)
    pool = KVPool(kv_shape, SHAPE.num_layers, 2 * (HISTORY_TOKENS + PAGE_SIZE), device.torch_device)
    model = Decoder(SHAPE, torch.float32, device.torch_device, NUM_TOKENS)
    slots = scattered_slots(pool.num_slots, PAGE_SIZE, seed=1, device=device.torch_device)
    token_ids = torch.arange(NUM_TOKENS) * 7 % SHAPE.vocab_size
    turn = Turn(token_ids, slots[:NUM_TOKENS], HISTORY_TOKENS)
    loader = LayerLoader(device, pool)
    restorer = Restorer(model, pool, device, loader)
    try:
        with torch.inference_mode():
            logits = restorer.own_forward(turn, num_past=0)[0]
            history = [pool.gather(layer, slots[:HISTORY_TOKENS]) for layer in range(pool.num_layers)]
            codec = ModelCodecs(kv_shape, SHAPE.num_layers, model.rotary)
            ends = segment_ends(HISTORY_TOKENS, 2, PAGE_SIZE)
            stored = {
                name: store(name, codec, strategy, pool, slots, ends)
                for name, strategy in strategies(SHAPE.num_layers).items()
            }
        tier = DramTier(device)
        for conversation in stored.values():
            conversation.put(tier)
        pool.fill(NAN)
        yield Bench(restorer, loader, tier, turn, history, logits, stored)
    finally:
        loader.close()
