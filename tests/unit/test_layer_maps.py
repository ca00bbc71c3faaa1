"""Maps learned from finished turns, on a pool in this process whose layers depend on each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.attention.rows import QueryRows, ReadKeys, accumulate
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import LayerKV
from krul_backend.codec.layer_map import LayerMap, LayerMapFitter, LayerMaps, save_layer_maps
from krul_backend.codec.options import CodecOptions, Sharing
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.segment import ModelIdentity
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Pair, Precision, Strategy
from krul_sglang.engine.budget.error_budget import ErrorBudget, table_path
from krul_sglang.engine.budget.layer_maps import TOKENS_PER_CHANNEL, LayerMapLearner, layer_maps_path
from krul_sglang.engine.budget.provenance import KvProvenance
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.save.offload import TurnOffloader
from krul_sglang.engine.save.strategy_choice import StrategyChooser
from krul_sglang.engine.save.turn import Turn
from tests.support.codec_builders import rotary_table
from tests.support.engine_builders import PATIENCE_S, make_load, make_store
from tests.support.strategy_builders import make_statistics

PAGE_SIZE, NUM_LAYERS, NUM_SLOTS, HEAD_DIM = 4, 4, 512, 8
WIDTH = 2 * HEAD_DIM
NEEDED = TOKENS_PER_CHANNEL * WIDTH
NEIGHBOURS = [(0, 1), (1, 2), (2, 3)]
PRECISIONS = (Precision.INT8, Precision.INT4)
PAIR_BYTES = 2 * 8 * (WIDTH + 1) ** 2
MODEL = ModelIdentity("m", "d" * 64, "float32", NUM_LAYERS, 1, HEAD_DIM, HEAD_DIM, PAGE_SIZE, 0, 1)
STATISTICS = make_statistics(
    [[0.0, 2.0, 9.0, 9.0], [2.0, 0.0, 1.0, 9.0], [9.0, 1.0, 0.0, 3.0], [9.0, 9.0, 3.0, 0.0]], [1.0] * 4
)
"""Layers 1 and 2 are the most similar neighbours, 2 and 3 the least."""

ROTARY = rotary_table(HEAD_DIM)
GENERATOR = torch.Generator().manual_seed(7)
WEIGHTS = torch.linalg.qr(torch.randn(NUM_LAYERS, WIDTH, WIDTH, generator=GENERATOR)).Q
BIASES = torch.randn(NUM_LAYERS, WIDTH, generator=GENERATOR)


def make_pool() -> DevicePool:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = DevicePool(
        MHATokenToKVPool(
            size=NUM_SLOTS,
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            head_num=1,
            head_dim=HEAD_DIM,
            layer_num=NUM_LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
    )
    write_kv(pool, torch.arange(NUM_SLOTS), seed=0)
    return pool


def write_kv(pool: DevicePool, slots: torch.Tensor, seed: int) -> None:
    """Each layer an affine function of the one below it, rotary embedding off, and a little noise."""
    own = torch.Generator().manual_seed(seed)
    vectors = torch.randn(len(slots), WIDTH, generator=own)
    for layer in range(NUM_LAYERS):
        k, v = pool.buffers(layer)
        k[slots] = ROTARY.rotate(vectors[:, None, :HEAD_DIM], torch.arange(len(slots)))
        v[slots] = vectors[:, None, HEAD_DIM:]
        vectors = vectors @ WEIGHTS[layer] + BIASES[layer]
        vectors += 0.01 * torch.randn(vectors.shape, generator=own)


class OtherRank(RankAgreement):
    """This rank and one that has what ``answer`` makes of this rank's values."""

    def __init__(self, answer: Any) -> None:
        super().__init__(None, 2)
        self._answer = answer

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor] | None:
        other = self._answer(values)
        return None if values is None or other is None else [values, other]


class Bench:
    """A pool, and conversations in it; their slots are used again and again."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "maps" / "m.npz"
        self.pool = make_pool()
        self._next_slot = 0
        self._num_conversations = 0

    def learner(self, **changes: Any) -> LayerMapLearner:
        options: dict[str, Any] = {
            "path": self.path,
            "model": MODEL,
            "pool": self.pool,
            "rotary": ROTARY,
            "precisions": PRECISIONS,
            "max_bytes": 1 << 20,
            "agreement": RankAgreement(None, 1),
        }
        return LayerMapLearner(**(options | changes))

    def turn(self, num_pages: int = WIDTH // PAGE_SIZE) -> Turn:
        """The first turn of a new conversation, with KV of its own."""
        self._num_conversations += 1
        num_tokens = num_pages * PAGE_SIZE
        slots = (torch.arange(num_tokens) + self._next_slot) % NUM_SLOTS
        self._next_slot += num_tokens
        write_kv(self.pool, slots, seed=self._num_conversations)
        keys = [f"{self._num_conversations}-{page}" for page in range(num_pages)]
        return Turn(keys, np.arange(num_tokens, dtype=np.int32), slots, [])

    def teach(self, learner: LayerMapLearner) -> None:
        """As many turns as it takes."""
        for _ in range(TOKENS_PER_CHANNEL + len(NEIGHBOURS)):
            learner.learn(self.turn(), STATISTICS)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pairs_of(maps: LayerMaps) -> list[Pair]:
    return list(dict.fromkeys(pair for pair, _ in maps))


def digests(maps: LayerMaps) -> dict[tuple[Pair, Precision], str]:
    return {key: layer_map.digest for key, layer_map in maps.items()}


def test_pairs_are_fitted_one_by_one_when_enough_tokens_were_seen(bench: Bench) -> None:
    learner = bench.learner()
    for _ in range(TOKENS_PER_CHANNEL):
        assert not learner.maps
        learner.learn(bench.turn(), STATISTICS)
    assert learner.num_learned_tokens == NEEDED
    counts = []
    for _ in range(4):
        learner.learn(bench.turn(), STATISTICS)
        counts.append(len(learner.maps))
    assert counts == [2, 4, 6, 6]
    # Nearest first, but those that can be used together before the others.
    assert pairs_of(learner.maps) == [(1, 2), (0, 1), (2, 3)]
    assert learner.as_dict() == {"pairs": 3, "learned_tokens": NEEDED, "is_complete": True}


def test_maps_are_those_of_the_last_tokens_of_each_turn_at_their_positions(bench: Bench) -> None:
    learner = bench.learner()
    fitter = LayerMapFitter(bench.pool.shape, ROTARY)
    for _ in range(TOKENS_PER_CHANNEL):
        turn = bench.turn(num_pages=10)
        learner.learn(turn, STATISTICS)
        fitter.add(
            *(bench.pool.gather(layer, turn.slots[-WIDTH:]) for layer in (1, 2)), start_token=40 - WIDTH
        )
    learner.learn(bench.turn(), STATISTICS)
    for precision in PRECISIONS:
        assert learner.maps[(1, 2), precision].digest == fitter.fit(precision).digest


def test_only_new_pages_of_a_conversation_count(bench: Bench) -> None:
    learner = bench.learner()
    whole = bench.turn(num_pages=3)
    first = dataclasses.replace(whole, page_keys=whole.page_keys[:2], slots=whole.slots[:8])
    seen = []
    for turn in (first, first, whole, whole):
        learner.learn(turn, STATISTICS)
        seen.append(learner.num_learned_tokens)
    assert seen == [8, 8, 12, 12]


def test_a_map_never_changes(bench: Bench) -> None:
    learner = bench.learner()
    bench.teach(learner)
    before = digests(learner.maps)
    assert len(before) == len(NEIGHBOURS) * len(PRECISIONS)
    bench.teach(learner)
    assert digests(learner.maps) == before


def test_a_run_starts_with_the_maps_of_the_last_one(bench: Bench) -> None:
    learner = bench.learner()
    bench.teach(learner)
    again = bench.learner()
    assert digests(again.maps) == digests(learner.maps)
    assert again.as_dict()["is_complete"]
    bench.teach(again)
    assert digests(again.maps) == digests(learner.maps)
    assert again.num_learned_tokens == 0


@pytest.mark.parametrize(
    "maps",
    [
        {((0, 1), precision): LayerMap(torch.zeros(3, 3), torch.zeros(3)) for precision in PRECISIONS},
        {((0, 2), Precision.INT8): LayerMap(torch.eye(WIDTH), torch.zeros(WIDTH))},
        {((0, 1), Precision.INT2): LayerMap(torch.eye(WIDTH), torch.zeros(WIDTH))},
        {((0, 1), Precision.INT8): LayerMap(torch.full((WIDTH, WIDTH), torch.nan), torch.zeros(WIDTH))},
    ],
    ids=["another width", "no neighbours", "another precision", "not finite"],
)
def test_maps_of_something_else_are_learned_again(
    bench: Bench, maps: LayerMaps, caplog: pytest.LogCaptureFixture
) -> None:
    bench.path.parent.mkdir()
    save_layer_maps(bench.path, maps)
    learner = bench.learner()
    assert not learner.maps
    assert "learned again" in caplog.text
    bench.teach(learner)
    assert digests(bench.learner().maps) == digests(learner.maps) != {}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, bytes, dict[Any, str]]:
    """A bench, a good file, and the digests of what it holds."""
    bench = Bench(tmp_path_factory.mktemp("written"))
    learner = bench.learner()
    bench.teach(learner)
    return bench, bench.path.read_bytes(), digests(learner.maps)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_never_stops_the_start_or_changes_a_map(
    written: tuple[Bench, bytes, dict[Any, str]], data: st.DataObject
) -> None:
    bench, content, true_digests = written
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    bench.path.write_bytes(damaged[: data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))])
    for key, digest in digests(bench.learner().maps).items():
        assert digest == true_digests[key]


def test_a_damaged_file_is_replaced(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.path.parent.mkdir()
    bench.path.write_bytes(b"no maps")
    learner = bench.learner()
    assert "learned again" in caplog.text
    bench.teach(learner)
    assert digests(bench.learner().maps) == digests(learner.maps) != {}


def test_memory_bounds_the_number_of_pairs(bench: Bench) -> None:
    for max_bytes, expected in (
        (PAIR_BYTES - 1, []),
        (PAIR_BYTES, [(1, 2)]),
        (3 * PAIR_BYTES - 1, [(1, 2), (0, 1)]),
    ):
        learner = bench.learner(max_bytes=max_bytes, path=bench.path.with_name(f"{max_bytes}.npz"))
        bench.teach(learner)
        assert pairs_of(learner.maps) == expected
    # What an earlier run had more room for is bounded, too.
    bench.teach(bench.learner())
    assert len(pairs_of(bench.learner(max_bytes=2 * PAIR_BYTES).maps)) == 2


def test_a_pair_that_one_rank_cannot_fit_is_left_out_on_all(bench: Bench) -> None:
    other_fits = iter([None, torch.ones(1), None])

    def answer(values: torch.Tensor | None) -> torch.Tensor | None:
        return values if values is None or len(values) == len(NEIGHBOURS) else next(other_fits)

    learner = bench.learner(agreement=OtherRank(answer))
    bench.teach(learner)
    assert pairs_of(learner.maps) == [(0, 1)]
    assert learner.as_dict()["pairs"] == 1


def test_ranks_start_with_the_pairs_that_all_of_them_have(bench: Bench) -> None:
    bench.teach(bench.learner())
    other = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    assert pairs_of(bench.learner(agreement=OtherRank(lambda values: other)).maps) == [(0, 1), (2, 3)]
    assert not bench.learner(agreement=OtherRank(lambda values: torch.zeros(3))).maps


def test_a_layer_that_is_not_finite_has_no_maps_and_the_others_do(bench: Bench) -> None:
    learner = bench.learner()
    for number in range(TOKENS_PER_CHANNEL + len(NEIGHBOURS)):
        turn = bench.turn()
        if number == 3:
            bench.pool.buffers(0)[0][turn.slots[0]] = torch.inf
        learner.learn(turn, STATISTICS)
    assert pairs_of(learner.maps) == [(1, 2), (2, 3)]


def test_a_turn_that_cannot_be_read_is_only_missing(bench: Bench) -> None:
    learner = bench.learner()
    bad = bench.turn()
    learner.learn(dataclasses.replace(bad, slots=bad.slots + 2 * NUM_SLOTS), STATISTICS)
    bench.teach(learner)
    assert pairs_of(learner.maps) == [(1, 2), (0, 1), (2, 3)]
    hopeless = bench.learner(path=bench.path.with_name("none.npz"))
    for _ in range(TOKENS_PER_CHANNEL + len(NEIGHBOURS)):
        bad = bench.turn()
        hopeless.learn(dataclasses.replace(bad, slots=bad.slots + 2 * NUM_SLOTS), STATISTICS)
    assert not hopeless.maps
    assert hopeless.as_dict()["is_complete"]


def test_files_differ_by_model_rank_and_kind_of_keys() -> None:
    models = [
        MODEL,
        dataclasses.replace(MODEL, config_digest="e" * 64),
        dataclasses.replace(MODEL, dtype="bfloat16"),
        dataclasses.replace(MODEL, tp_size=2),
        dataclasses.replace(MODEL, tp_rank=1, tp_size=2),
    ]
    paths = {layer_maps_path("~/cache", model, rotary) for model in models for rotary in (None, ROTARY)}
    assert len(paths) == 2 * len(models)


class RecordedRows:
    """Query rows of a turn, as a capture hands them over."""

    def __init__(self, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        queries = torch.randn(NUM_LAYERS, 6, 1, HEAD_DIM, generator=generator)
        positions = torch.arange(num_tokens - 6, num_tokens)
        self._rows = QueryRows(queries, positions, torch.zeros(1, dtype=torch.int64), HEAD_DIM**-0.5)

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics:
        return accumulate(self._rows, read_keys)

    def rows(self, num_tokens: int) -> QueryRows:
        return self._rows

    def release(self) -> None:
        pass


def save_known_table(cache_dir: Path) -> None:
    """Every layer costs about one nat per unit of error."""
    path = table_path(str(cache_dir), MODEL)
    path.parent.mkdir(parents=True)
    table = SensitivityTable(path.stem, NUM_LAYERS)
    for _ in range(60):
        for layer in range(NUM_LAYERS):
            for kind in DamageKind:
                table.update([LayerError(layer, kind, 0.01)], 0.01)
    table.save(path)


def test_the_budget_stores_predicted_pairs_once_there_are_maps(bench: Bench, tmp_path: Path) -> None:
    """Chosen, stored and loaded again: to the bit what a direct round trip gives, and close to the truth."""
    save_known_table(tmp_path)
    learner, agreement = bench.learner(), RankAgreement(None, 1)
    codec = SegmentCodec(
        bench.pool.shape, NUM_LAYERS, ROTARY, CodecOptions(sharing=Sharing.PREDICTED), learner.maps
    )
    store = make_store(1 << 22)
    loader = LayerWiseLoader(store, bench.pool, TransferGate(), PATIENCE_S)
    budget = ErrorBudget(
        limit=6e-4,
        store=store,
        provenance=KvProvenance(NUM_SLOTS + PAGE_SIZE, bench.pool.device, loader.batch),
        probe_share=0.0,
        table_path=table_path(str(tmp_path), MODEL),
        model=ServedModel(MODEL),
        pool=bench.pool,
        codec=codec,
        learner=learner,
        prober=None,  # type: ignore[arg-type]
        agreement=agreement,
    )
    chooser = StrategyChooser(budget, bench.pool, agreement, num_heads=1)
    offloader = TurnOffloader(
        store, ServedModel(MODEL), bench.pool, codec, chooser, max_pending_tokens=NUM_SLOTS
    )

    def store_turn() -> tuple[Turn, int]:
        turn = bench.turn(num_pages=32)
        before = store.stats().stored_bytes
        offloader.submit(dataclasses.replace(turn, attention=RecordedRows(128)))
        offloader.wait()
        assert offloader.pop_completed()
        return turn, store.stats().stored_bytes - before

    try:
        _, unpaired_bytes = store_turn()
        assert not chooser.counters.pairs
        bench.teach(learner)
        turn, paired_bytes = store_turn()
        assert paired_bytes < unpaired_bytes
        assert budget.as_dict()["layer_maps"]["pairs"] == 3

        lease = store.lease(MODEL, turn.page_keys, turn.token_ids)
        assert lease is not None
        (source,) = lease.slices
        chosen = Strategy.from_json(source.header.codec_params["layers"]).pairs
        assert set(chosen) & set(NEIGHBOURS) == set(chosen) != set()
        expected = decode_directly(bench, codec, turn, source.header.codec_params)
        true = [bench.pool.gather(layer, turn.slots) for layer in range(NUM_LAYERS)]
        targets = (turn.slots + 256) % NUM_SLOTS
        loader.queue("r", make_load(lease, codec, targets))
        assert loader.finish(loader.start())
        for layer in range(NUM_LAYERS):
            loaded = bench.pool.gather(layer, targets)
            assert torch.equal(loaded.k, expected[layer].k)
            assert torch.equal(loaded.v, expected[layer].v)
        for pair in chosen:
            for layer in pair:
                loaded = bench.pool.gather(layer, targets)
                assert (loaded.v - true[layer].v).square().sum() < 1e-3 * true[layer].v.square().sum()
    finally:
        offloader.close()
        loader.close()
        store.close()


def decode_directly(bench: Bench, codec: SegmentCodec, turn: Turn, params: Any) -> list[LayerKV]:
    """The turn, encoded with the strategy that was stored, and decoded, without a store."""
    kv = [bench.pool.gather(layer, turn.slots) for layer in range(NUM_LAYERS)]
    strategy = Strategy.from_json(params["layers"])
    encoding = codec.prepare(
        strategy, kv.__getitem__, start_token=0, num_tokens=len(turn.slots), damage=params["damage"]
    )
    assert encoding.params == params
    blocks: dict[int, torch.Tensor] = {}
    for unit in strategy.units:
        blocks.update(
            zip(unit, codec.encode_unit(encoding, unit, [kv[layer] for layer in unit]), strict=True)
        )
    decoder = codec.open(params, start_token=0, num_tokens=len(turn.slots))
    return [decoder.decode(layer, blocks, 0, len(turn.slots)) for layer in range(NUM_LAYERS)]
