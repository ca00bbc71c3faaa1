"""One conversation at a time in a pool that is stored with an error budget, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from krul_backend.attention.rows import QueryRows
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.segment import ModelIdentity, SegmentHeader
from krul_sglang.engine.budget.correction import VARIED_BUDGET_SHARE
from krul_sglang.engine.budget.error_budget import ErrorBudget
from krul_sglang.engine.budget.probing import ProbeOutcome
from krul_sglang.engine.budget.provenance import KvProvenance
from krul_sglang.engine.budget.served_bases import ServedBases, TextDrift
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.save.offload import MAX_LAYER_BYTES, TurnOffloader
from krul_sglang.engine.save.strategy_choice import Decision
from krul_sglang.engine.save.turn import StoredPath, Turn
from tests.support.codec_builders import rotary_table
from tests.support.engine_builders import PATIENCE_S, TensorPool, make_load, make_store
from tests.support.forward_builders import Batch, Mode
from tests.support.present import present
from tests.support.subspace_builders import make_bases, make_layers

PAGE_SIZE, NUM_LAYERS, NUM_SLOTS, HEAD_DIM = 4, 4, 512, 8
SHAPE = LayerShape(1, HEAD_DIM, HEAD_DIM, torch.float32)
PAGE_BYTES = PAGE_SIZE * (SHAPE.k_token_bytes + SHAPE.v_token_bytes)
"""Of one layer of a page, as the pool holds it."""
MODEL = ModelIdentity("m", "d" * 64, "float32", NUM_LAYERS, 1, HEAD_DIM, HEAD_DIM, PAGE_SIZE, 0, 1)
ROTARY = rotary_table(HEAD_DIM)
BASES = make_bases(SHAPE, [2, 2])


class RecordedRows:
    """Query rows of a turn, as a capture hands them over."""

    def __init__(self, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        queries = torch.randn(NUM_LAYERS, 6, 1, HEAD_DIM, generator=generator)
        positions = torch.arange(num_tokens - 6, num_tokens)
        self._rows = QueryRows(queries, positions, torch.zeros(1, dtype=torch.int64), HEAD_DIM**-0.5)

    def rows(self, num_tokens: int) -> QueryRows:
        return self._rows

    def release(self) -> None:
        pass


class FakeProber:
    """Has ``outcome`` for every conversation, and remembers which it was asked about and whether its KV is
    exact."""

    def __init__(self) -> None:
        self.outcome: ProbeOutcome | None = None
        self.asked: list[tuple[StoredPath, bool]] = []

    def measure(self, path: StoredPath, is_exact: Callable[[], bool]) -> ProbeOutcome | None:
        self.asked.append((path, is_exact()))
        return self.outcome


class BudgetedServer:
    """A conversation that is computed, stored with an error budget, restored and continued."""

    def __init__(
        self, limit: float, *, tp_size: int = 1, probe_share: float = 1.0, has_bases: bool = True
    ) -> None:
        self.pool: Any = TensorPool(SHAPE, NUM_LAYERS, NUM_SLOTS)
        self.store = make_store(1 << 22)
        self.loader = LayerWiseLoader(self.store, self.pool, TransferGate(), PATIENCE_S)
        self.provenance = KvProvenance(NUM_SLOTS, self.pool.streams, self.loader.batch, torch.empty(0))
        self.subspace = SubspaceCodec(BASES, ROTARY)
        self.bases = ServedBases(TextDrift("m", 0))
        self.may_come: Callable[[str], bool] = lambda digest: False
        self.codec = ModelCodecs(SHAPE, NUM_LAYERS, ROTARY, may_come=lambda digest: self.may_come(digest))
        if has_bases:
            self.learn()
        self.model = ServedModel(replace(MODEL, tp_size=tp_size))
        self.prober = FakeProber()
        self.slots = torch.arange(0)
        self._probe_share = probe_share
        self._next_slot = 0
        self._num_shared = NUM_SLOTS
        self.budget = self.make_budget(limit)
        self.offloader = self._make_offloader(self.budget, MAX_LAYER_BYTES)

    def learn(self) -> None:
        """The bases are there."""
        self.codec.add_bases(self.subspace)
        self.bases.have(self.subspace, "learned")

    def make_budget(self, limit: float) -> ErrorBudget:
        """A budget of this server, of which its varied texts may be expected to lose ``limit``."""
        prober: Any = self.prober
        return ErrorBudget(
            limit=limit / VARIED_BUDGET_SHARE,
            probe_share=self._probe_share,
            store=self.store,
            provenance=self.provenance,
            model=self.model,
            pool=self.pool,
            codec=self.codec,
            bases=self.bases,
            prober=prober,
        )

    def decide_by(self, decision: Decision, max_layer_bytes: int = MAX_LAYER_BYTES, **more: Any) -> None:
        """Store turns from here on as this decision says, in segments of at most so many bytes per layer."""
        self.offloader.close()
        self.offloader = self._make_offloader(decision, max_layer_bytes, **more)

    def close(self) -> None:
        self.offloader.close()
        self.loader.close()
        self.store.close()

    @property
    def keys(self) -> list[str]:
        return [
            f"page {page}" if page < self._num_shared else f"page {page} of another conversation"
            for page in range(len(self.slots) // PAGE_SIZE)
        ]

    @property
    def path(self) -> StoredPath:
        return StoredPath(self.keys, np.arange(len(self.slots), dtype=np.int64), self.slots)

    @property
    def headers(self) -> list[SegmentHeader]:
        """Of the conversation's stored segments, from the first on."""
        return [segment.header for segment in self.store.path_segments(self.model.identity, self.keys)]

    def noted_damage(self) -> list[float]:
        """What the segments say that they cost, each at its own end."""
        return [
            self.codec.open(
                header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
            ).damage
            for header in self.headers
        ]

    def damage_now(self) -> list[float]:
        """What the segments cost now: the attention that they cost is shared among more tokens."""
        return [
            damage * header.end_token / len(self.slots)
            for damage, header in zip(self.noted_damage(), self.headers, strict=True)
        ]

    def compute(self, num_pages: int, *, outside: float = 0.0) -> None:
        """A forward appends tokens with KV of their own; ``outside`` as for ``make_layers``."""
        num_tokens, start_token = num_pages * PAGE_SIZE, len(self.slots)
        slots = self._take_slots(num_tokens)
        layers = make_layers(
            BASES, num_tokens, ROTARY, start_token=start_token, seed=self._next_slot, outside=outside
        )
        for layer, kv in enumerate(layers):
            self.pool.write(layer, slots, kv.k, kv.v)
        self.after_forward("decode", slots)
        self.slots = torch.cat([self.slots, slots])

    def begin_another(self, num_pages: int) -> None:
        """Another conversation begins with the first pages of this one."""
        self._num_shared = num_pages
        self.slots = self.slots[: num_pages * PAGE_SIZE]

    def store_turn(self, *, is_observed: bool = True, tenant: str = "") -> dict[str, Any]:
        """Store the conversation as a turn of which attention was recorded, or not; returns what the budget
        says of it."""
        path, model = self.path, self.model.identity
        rows: Any = RecordedRows(len(self.slots)) if is_observed else None
        self.offloader.submit(Turn(**vars(path), model=model, ready=[], attention=rows, tenant=tenant))
        self.offloader.wait()
        assert self.offloader.pop_completed()
        return self.budget.as_dict()

    def read_pool(self) -> list[LayerKV]:
        """The conversation's KV, layer by layer."""
        return [self.pool.gather(layer, self.slots) for layer in range(NUM_LAYERS)]

    def leave_and_return(self, head_ends: Sequence[int] | None = None, *, is_given_up: bool = False) -> None:
        """The whole conversation comes back into other slots, with heads that are computed as they were; if
        the load is given up, all of it is computed."""
        before = self.read_pool()
        lease = present(self.store.lease(self.model.identity, self.keys, self.path.token_ids))
        assert lease.num_pages == len(self.keys)
        self.slots = self._take_slots(len(self.slots))
        index = self.loader.start({"r": make_load(lease, self.codec, self.slots, head_ends)})
        batch = present(self.loader.batch(index))
        batch.wait_layer(NUM_LAYERS - 1)
        if is_given_up:
            batch.abandon(is_refilled=True)
        computed = [len(self.slots)] * NUM_LAYERS if is_given_up else head_ends or [0] * NUM_LAYERS
        for layer, (kv, end) in enumerate(zip(before, computed, strict=True)):
            self.pool.write(layer, self.slots[:end], kv.k[:end], kv.v[:end])
        self.after_forward("extend", torch.arange(0), index)
        assert self.loader.finish(index)

    def after_forward(self, mode: str, slots: torch.Tensor, index: int = -1) -> None:
        """A forward has written ``slots``, after the loads of this number."""
        nothing = torch.arange(0)
        batch = Batch(Mode(mode), [], nothing, nothing, hicache_consumer_index=index, out_cache_loc=slots)
        self.provenance.after_forward(batch)

    def _make_offloader(self, decision: Decision, max_layer_bytes: int, **more: Any) -> TurnOffloader:
        return TurnOffloader(
            self.store,
            PAGE_SIZE,
            self.pool,
            self.codec,
            decision,
            max_layer_bytes=max_layer_bytes,
            **{"keeps_copies": False, **more},
        )

    def _take_slots(self, num_tokens: int) -> torch.Tensor:
        slots = (torch.arange(num_tokens) + self._next_slot) % NUM_SLOTS
        self._next_slot += num_tokens
        return slots
