"""One error budget for a conversation that leaves and returns: a real codec and store, without a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from krul_backend.codec.interface import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.segment import SegmentHeader
from krul_backend.strategy.sensitivity import DamageKind, LayerError
from krul_backend.strategy.strategy import Precision, Strategy
from krul_sglang.engine.budget.damage import attention_output_error
from krul_sglang.engine.budget.error_budget import ErrorBudget, table_path
from krul_sglang.engine.budget.provenance import DamagedSpan, KvProvenance, spent_damage
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.save.offload import TurnOffloader
from krul_sglang.engine.save.strategy_choice import StrategyChooser
from krul_sglang.engine.save.turn import StoredPath, Turn
from tests.support.budget_builders import (
    MODEL,
    NUM_LAYERS,
    NUM_SLOTS,
    PAGE_SIZE,
    ROTARY,
    OtherRank,
    RecordedRows,
    make_pool,
    save_known_table,
)
from tests.support.engine_builders import PATIENCE_S, make_load, make_store
from tests.support.forward_builders import Batch, Mode

LIMIT = 3e-3
FIRST_PAGES, MORE_PAGES = 32, 8


class Prober:
    """Says what it is asked, and that there is nothing to probe."""

    def __init__(self) -> None:
        self.opened: list[StoredPath] = []

    def is_on_any_rank(self, flag: bool) -> bool:
        return flag

    def open(self, path: StoredPath) -> None:
        self.opened.append(path)


class Server:
    """One conversation at a time in a pool, stored with an error budget, restored and continued."""

    def __init__(self, tmp_path: Path, agreement: RankAgreement | None = None, limit: float = LIMIT) -> None:
        save_known_table(tmp_path)
        agreement = RankAgreement(None, 1) if agreement is None else agreement
        self.pool = make_pool()
        self.store = make_store(1 << 22)
        self.loader = LayerWiseLoader(self.store, self.pool, TransferGate(), PATIENCE_S)
        self.provenance = KvProvenance(NUM_SLOTS + PAGE_SIZE, self.pool.device, self.loader.batch)
        self.codec = SegmentCodec(self.pool.shape, NUM_LAYERS, ROTARY)
        self.prober = Prober()
        prober: Any = self.prober
        self.budget = ErrorBudget(
            limit=limit,
            store=self.store,
            provenance=self.provenance,
            probe_share=1.0,
            table_path=table_path(str(tmp_path), MODEL),
            model=ServedModel(MODEL),
            pool=self.pool,
            codec=self.codec,
            prober=prober,
            agreement=agreement,
        )
        chooser = StrategyChooser(self.budget)
        self.offloader = TurnOffloader(
            self.store, ServedModel(MODEL), self.pool, self.codec, chooser, max_pending_tokens=NUM_SLOTS
        )
        self.slots = torch.arange(0)
        self._next_slot = 0

    def close(self) -> None:
        self.offloader.close()
        self.loader.close()
        self.store.close()

    @property
    def keys(self) -> list[str]:
        return [f"page {page}" for page in range(len(self.slots) // PAGE_SIZE)]

    @property
    def path(self) -> StoredPath:
        return StoredPath(self.keys, np.arange(len(self.slots), dtype=np.int32), self.slots)

    def compute(self, num_pages: int) -> None:
        """A forward appends tokens, whose KV is random."""
        slots = self._take_slots(num_pages * PAGE_SIZE)
        generator = torch.Generator().manual_seed(self._next_slot)
        for layer in range(NUM_LAYERS):
            for buffer in self.pool.buffers(layer):
                buffer[slots] = torch.randn(buffer[slots].shape, generator=generator)
        self._after_forward("decode", slots)
        self.slots = torch.cat([self.slots, slots])

    def store_turn(self, *, is_observed: bool = True) -> dict[str, Any]:
        """What the budget says of it."""
        path = self.path
        rows: Any = RecordedRows(len(self.slots)) if is_observed else None
        self.offloader.submit(Turn(path.page_keys, path.token_ids, path.slots, [], rows))
        self.offloader.wait()
        assert self.offloader.pop_completed()
        return self.budget.as_dict()

    def leave_and_return(self, head_ends: Sequence[int] | None = None) -> None:
        """The whole conversation comes back, into other slots; heads are recomputed as they were."""
        before = [self.pool.gather(layer, self.slots) for layer in range(NUM_LAYERS)]
        lease = self.store.lease(MODEL, self.keys, self.path.token_ids)
        assert lease is not None
        assert lease.num_pages == len(self.keys)
        self.slots = self._take_slots(len(self.slots))
        self.loader.queue("r", make_load(lease, self.codec, self.slots, head_ends))
        index = self.loader.start()
        if head_ends is not None:
            for layer, end in enumerate(head_ends):
                k, v = self.pool.buffers(layer)
                k[self.slots[:end]], v[self.slots[:end]] = before[layer].k[:end], before[layer].v[:end]
        batch = self.loader.batch(index)
        assert batch is not None
        batch.wait_layer(NUM_LAYERS - 1)
        self._after_forward("extend", torch.arange(0), index)
        assert self.loader.finish(index)

    def headers(self) -> list[SegmentHeader]:
        return [segment.header for segment in self.store.path_segments(MODEL, self.keys)]

    def noted_damage(self) -> list[float]:
        """What the conversation's segments say that they cost, from the first on."""
        return [self.codec.damage_of(header.codec_params, header.num_tokens) for header in self.headers()]

    def _take_slots(self, num_tokens: int) -> torch.Tensor:
        slots = (torch.arange(num_tokens) + self._next_slot) % NUM_SLOTS
        self._next_slot += num_tokens
        return slots

    def _after_forward(self, mode: str, slots: torch.Tensor, index: int = -1) -> None:
        nothing = torch.arange(0)
        batch = Batch(Mode(mode), [], nothing, nothing, hicache_consumer_index=index, out_cache_loc=slots)
        self.provenance.after_forward(batch)


@pytest.fixture
def server(tmp_path: Path) -> Any:
    server = Server(tmp_path)
    yield server
    server.close()


def test_a_returned_conversation_goes_on_with_what_is_left(server: Server) -> None:
    server.compute(FIRST_PAGES)
    first = server.store_turn()
    assert first["last_spent"] == 0
    assert 0 < first["last_damage"] <= LIMIT / 2
    assert server.noted_damage() == pytest.approx([first["last_damage"]])
    server.leave_and_return()
    server.compute(MORE_PAGES)
    second = server.store_turn()
    assert second["last_spent"] == pytest.approx(first["last_damage"])
    assert second["last_damage"] > 0
    assert server.noted_damage() == pytest.approx([first["last_damage"], second["last_damage"]])
    assert sum(server.noted_damage()) <= LIMIT


def test_only_what_a_turn_adds_is_measured(server: Server) -> None:
    """Its error, on the KV that the pool holds, against one direct computation."""
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.leave_and_return()
    server.compute(MORE_PAGES)
    damage = server.store_turn()["last_damage"]
    header = server.headers()[-1]
    assert header.start_token == FIRST_PAGES * PAGE_SIZE
    strategy = Strategy.from_json(header.codec_params["layers"])
    rows = RecordedRows(len(server.slots)).rows(0)
    expected = 0.0
    for layer in range(NUM_LAYERS):
        true = server.pool.gather(layer, server.slots)
        decoded = decode_segments(server, layer)[-1]
        start = header.start_token
        after = LayerKV(torch.cat([true.k[:start], decoded.k]), torch.cat([true.v[:start], decoded.v]))
        error = attention_output_error(
            rows.queries[layer], rows.positions, rows.kv_heads, rows.scaling, true, after
        )
        kind = DamageKind.of(strategy.layers[layer].precision)
        expected += server.budget._table.predict(LayerError(layer, kind, error), 1.0)
    assert damage == pytest.approx(expected, rel=1e-3)


def decode_segments(server: Server, layer: int) -> list[LayerKV]:
    """One layer of each stored segment of the conversation."""
    lease = server.store.lease(MODEL, server.keys, server.path.token_ids)
    assert lease is not None
    decoded = []
    for source in lease.slices:
        header = source.header
        decoder = server.codec.open(
            header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
        )
        blocks = {i: torch.from_numpy(source.blocks[i].copy()) for i in decoder.sources(layer)}
        decoded.append(decoder.decode(layer, blocks, 0, header.num_tokens))
    server.store.release(lease)
    return decoded


@pytest.mark.parametrize("returns", [True, False], ids=["returns each time", "stays on the device"])
def test_however_many_turns_the_sum_stays_within_the_limit(server: Server, returns: bool) -> None:
    """And no turn is left without a budget."""
    server.compute(MORE_PAGES)
    for turn in range(7):
        said = server.store_turn()
        noted = server.noted_damage()
        assert len(noted) == turn + 1
        assert said["last_spent"] == pytest.approx(sum(noted[:-1]))
        assert 0 < noted[-1] <= (LIMIT - sum(noted[:-1])) / (turn + 2) + 1e-9
        if returns:
            server.leave_and_return()
        server.compute(MORE_PAGES)
    assert sum(noted) <= LIMIT


def test_lossy_kv_whose_segment_left_the_store_keeps_what_it_has_lost(server: Server) -> None:
    """Stored again, with the loss noted: rounding what is rounded already costs next to nothing."""
    server.compute(FIRST_PAGES)
    first = server.store_turn()["last_damage"]
    server.leave_and_return()
    server.store.clear(MODEL)
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert said["last_spent"] == pytest.approx(first)
    (noted,) = server.noted_damage()
    assert noted == pytest.approx(first + said["last_damage"])
    server.leave_and_return()
    server.compute(MORE_PAGES)
    assert server.store_turn()["last_spent"] == pytest.approx(noted)


def test_runs_that_are_stored_together_share_what_they_cost(server: Server) -> None:
    """Their sum is what was measured, also for tokens that have lost something already."""
    server.compute(FIRST_PAGES)
    first = server.store_turn()["last_damage"]
    server.leave_and_return()
    rows: Any = RecordedRows(FIRST_PAGES * PAGE_SIZE)
    path = server.path
    turn = Turn(path.page_keys, path.token_ids, path.slots, [], rows)
    server.store.clear(MODEL)
    choice = server.offloader._chooser.choose(turn, [range(8), range(8, 32)])
    own = server.budget.as_dict()["last_damage"]
    assert choice.damages == pytest.approx(((first + own) / 4, (first + own) * 3 / 4))


def test_what_is_stored_without_evidence_keeps_what_it_has_lost(server: Server) -> None:
    """Natively, which loses nothing more; and it is still no truth when it returns."""
    server.compute(FIRST_PAGES)
    first = server.store_turn()["last_damage"]
    server.leave_and_return()
    server.store.clear(MODEL)
    server.store_turn(is_observed=False)
    (header,) = server.headers()
    assert Strategy.from_json(header.codec_params["layers"]).is_lossless
    assert server.noted_damage() == pytest.approx([first])
    server.leave_and_return()
    num_tokens = FIRST_PAGES * PAGE_SIZE
    assert server.provenance.read(server.slots) == [DamagedSpan(0, num_tokens, 0, pytest.approx(first))]


def test_native_segments_come_back_exact(server: Server) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn(is_observed=False)
    server.leave_and_return()
    assert server.provenance.read(server.slots) == []
    server.compute(MORE_PAGES)
    assert server.store_turn()["last_spent"] == 0


def test_what_nobody_measured_leaves_nothing_to_spend(server: Server) -> None:
    """Segments that another strategy stored lossy, before the server was started with this one."""
    server.compute(FIRST_PAGES)
    codec: Any = server.offloader
    decision: Any = _Always(Strategy.from_pairs(NUM_LAYERS, [], Precision.INT8))
    other = StrategyChooser(decision)
    own, codec._chooser = codec._chooser, other
    server.store_turn()
    codec._chooser = own
    server.leave_and_return()
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert (said["last_spent"], said["last_damage"]) == (None, 0.0)
    assert Strategy.from_json(server.headers()[-1].codec_params["layers"]).is_lossless
    assert server.noted_damage() == [math.inf, 0.0]


class _Always:
    """The decision of a strategy that measures nothing."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def decide(self, turn: Any, missing: Sequence[range]) -> Any:
        from krul_sglang.engine.save.strategy_choice import Choice

        return Choice(self._strategy, (None,) * len(missing))


def test_a_slot_that_is_computed_again_is_exact_again(server: Server) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.leave_and_return()
    assert [span.end for span in server.provenance.read(server.slots)] == [FIRST_PAGES * PAGE_SIZE]
    server._after_forward("decode", server.slots[:12])
    (span,) = server.provenance.read(server.slots)
    assert (span.start, span.end) == (12, FIRST_PAGES * PAGE_SIZE)
    server._after_forward("extend", server.slots[12:])
    assert server.provenance.read(server.slots) == []


def test_a_load_that_was_given_up_and_recomputed_is_exact(server: Server) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    lease = server.store.lease(MODEL, server.keys, server.path.token_ids)
    assert lease is not None
    server.loader.queue("r", make_load(lease, server.codec, server.slots))
    index = server.loader.start()
    batch = server.loader.batch(index)
    assert batch is not None
    batch.wait_layer(NUM_LAYERS - 1)
    batch.abandon(is_refilled=True)
    server._after_forward("extend", torch.arange(0), index)
    assert server.loader.finish(index)
    assert server.provenance.read(server.slots) == []


@pytest.mark.parametrize(
    ("pages", "lossy_from"), [((32, 32, 32, 32), None), ((32, 32, 8, 8), 8), ((0, 0, 0, 0), 0)]
)
def test_recomputed_heads_are_exact(server: Server, pages: tuple[int, ...], lossy_from: int | None) -> None:
    """From where a tail of a lossy layer begins, tokens are lossy."""
    server.compute(FIRST_PAGES)
    server.store_turn()
    strategy = Strategy.from_json(server.headers()[0].codec_params["layers"])
    assert all(layer.precision is not Precision.NATIVE for layer in strategy.layers)
    server.leave_and_return([page * PAGE_SIZE for page in pages])
    spans = server.provenance.read(server.slots)
    assert [span.start for span in spans] == ([] if lossy_from is None else [lossy_from * PAGE_SIZE])


def test_probes_do_not_learn_from_what_came_back_lossy(server: Server) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.budget.probe(server.path)
    assert len(server.prober.opened) == 1
    server.leave_and_return()
    server.budget.probe(server.path)
    assert len(server.prober.opened) == 1


def test_ranks_take_the_worst_of_what_they_know(tmp_path: Path) -> None:
    """Another rank has evicted more, and its KV came back with more damage."""
    asked: list[list[float]] = []

    def answer(values: torch.Tensor | None) -> torch.Tensor | None:
        assert values is not None
        if len(values) != 3:
            return values
        asked.append(values.tolist())
        return torch.tensor([2e-3, -16.0, 20.0], dtype=torch.float64)

    server = Server(tmp_path, OtherRank(answer))
    server.compute(FIRST_PAGES)
    said = server.store_turn()
    server.close()
    assert asked == [[0.0, 0.0, 0.0]]
    assert said["last_spent"] == 2e-3
    assert said["last_damage"] <= (LIMIT - 2e-3) / 2


def test_a_turn_that_another_rank_cannot_measure_is_stored_natively(tmp_path: Path) -> None:
    server = Server(tmp_path, OtherRank(lambda values: None))
    server.compute(FIRST_PAGES)
    said = server.store_turn()
    (header,) = server.headers()
    server.close()
    assert said["last_damage"] == 0
    assert Strategy.from_json(header.codec_params["layers"]).is_lossless


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_rank_that_cannot_measure_still_meets_the_others(tmp_path: Path, is_stored: bool) -> None:
    met: list[torch.Tensor | None] = []
    server = Server(tmp_path, OtherRank(met.append))
    server.compute(FIRST_PAGES)
    path = server.path
    turn = Turn(path.page_keys, path.token_ids, path.slots, [], None)
    choice = server.budget.decide(turn if is_stored else None, [range(FIRST_PAGES)])
    server.close()
    assert met == [None]
    assert choice.strategy.is_lossless


def test_tokens_that_are_stored_where_nobody_looks_count_as_unknown() -> None:
    stored = [DamagedSpan(0, 16, 0, 0.5)]
    lossy = [DamagedSpan(0, 16, 0, 0.5), DamagedSpan(16, 24, 16, 0.25)]
    assert spent_damage(stored, lossy, [range(24, 32)], 32) == 0.75
    assert spent_damage(stored, lossy, [], 32) == math.inf
    # Stored again as one segment, whose damage holds that of the earlier ones.
    assert spent_damage([DamagedSpan(0, 32, 0, 0.875)], lossy, [], 32) == 0.875
    assert spent_damage([], lossy, [range(32)], 32) == 0.75
