"""One error budget for a conversation that leaves and returns: a real codec and store, without a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from krul_backend.codec.pairs.selectors import make_selector
from krul_backend.codec.subspace.codec import EncodedSegment, SubspaceCodec
from krul_backend.strategy.strategy import Precision
from krul_sglang.engine.budget.provenance import DamagedSpan, carried_damage, spent_damage
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.save.strategy_choice import SelectorDecision
from krul_sglang.engine.save.turn import Turn
from tests.support.budget_builders import (
    BASES,
    MODEL,
    NUM_LAYERS,
    PAGE_BYTES,
    PAGE_SIZE,
    ROTARY,
    SHAPE,
    BudgetedServer,
    RecordedRows,
)
from tests.support.engine_builders import computing
from tests.support.subspace_builders import make_bases, make_layers

LIMIT = 0.05
STEPS = 0.06
USED = 0.9
"""The share of what is left that a turn is given."""
"""The codec searches in steps that change the damage by so much of it."""
FIRST_PAGES, MORE_PAGES = 32, 8


@pytest.fixture
def server() -> Iterator[BudgetedServer]:
    server = BudgetedServer(LIMIT)
    yield server
    server.close()


def is_native(server: BudgetedServer, segment: int = -1) -> bool:
    """Whether a stored segment of the conversation has the pool's bytes."""
    params = server.headers[segment].codec_params
    return bool(params["codec"] == "native")


def return_without_segments(server: BudgetedServer) -> float:
    """A conversation comes back lossy, and its segment leaves the store; returns what it has lost."""
    server.compute(FIRST_PAGES)
    lost: float = server.store_turn()["last_damage"]
    server.leave_and_return()
    server.store.clear()
    return lost


def test_a_returned_conversation_goes_on_with_what_is_left(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    first = server.store_turn()
    assert first["last_spent"] == 0
    assert first["last_damage"] == pytest.approx(USED * LIMIT, rel=STEPS)
    assert server.noted_damage() == pytest.approx([first["last_damage"]])
    server.leave_and_return()
    server.compute(MORE_PAGES)
    second = server.store_turn()
    # 32 pages of 40: as much of the attention that is spent on the conversation now.
    assert second["last_spent"] == pytest.approx(first["last_damage"] * FIRST_PAGES / 40)
    assert second["last_damage"] == pytest.approx(USED * (LIMIT - second["last_spent"]), rel=STEPS)
    assert server.noted_damage() == pytest.approx([first["last_damage"], second["last_damage"]])


@pytest.mark.parametrize("returns", [True, False], ids=["returns each time", "stays on the device"])
def test_equal_turns_get_equal_damage_and_use_the_limit(server: BudgetedServer, returns: bool) -> None:
    for turn in range(8):
        server.compute(MORE_PAGES)
        spent = server.damage_now()
        said = server.store_turn()
        assert said["last_spent"] == pytest.approx(sum(spent))
        costs = server.damage_now()
        assert costs == pytest.approx([LIMIT / (turn + 1)] * (turn + 1), rel=1 - USED + STEPS)
        assert sum(costs) <= LIMIT * (1 + 1e-6)
        assert sum(costs) == pytest.approx(LIMIT, rel=1 - USED + STEPS)
        if returns:
            server.leave_and_return()


def test_runs_that_are_stored_together_share_the_limit(server: BudgetedServer) -> None:
    """A long turn becomes several segments: each gets its share, counted at the conversation's end."""
    server.decide_by(server.budget, max_layer_bytes=MORE_PAGES * PAGE_BYTES)
    server.compute(FIRST_PAGES)
    said = server.store_turn()
    costs = server.damage_now()
    assert costs == pytest.approx([USED * LIMIT / 4] * 4, rel=STEPS)
    # Said of the run that was encoded last.
    assert said["last_damage"] == pytest.approx(costs[-1])


def test_lossy_kv_whose_segment_left_the_store_is_stored_with_what_it_has_lost(
    server: BudgetedServer,
) -> None:
    first = return_without_segments(server)
    server.compute(MORE_PAGES)
    said = server.store_turn()
    lost = first * FIRST_PAGES / 40
    assert said["last_spent"] == pytest.approx(lost)
    assert said["last_damage"] == pytest.approx(USED * (LIMIT - lost), rel=STEPS)
    assert server.noted_damage() == pytest.approx([lost + said["last_damage"]])
    server.leave_and_return()
    server.compute(MORE_PAGES)
    assert server.store_turn()["last_spent"] == pytest.approx((lost + said["last_damage"]) * 40 / 48)


def test_a_fast_copy_comes_back_exact_and_the_budget_counts_what_is_in_bases(server: BudgetedServer) -> None:
    server.decide_by(server.budget, keeps_copies=True)
    server.compute(FIRST_PAGES)
    first = server.store_turn()
    assert first["last_damage"] == pytest.approx(USED * LIMIT, rel=STEPS)
    before = server.read_pool()
    server.leave_and_return()
    for old, new in zip(before, server.read_pool(), strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)
    assert not server.provenance.read(server.slots)
    server.compute(MORE_PAGES)
    # Once the copy has gone, the conversation comes back as it is in bases.
    assert server.store_turn()["last_spent"] == pytest.approx(first["last_damage"] * FIRST_PAGES / 40)
    assert not any(is_native(server, segment) for segment in range(2))


def test_a_fast_copy_of_lossy_kv_says_what_it_has_lost(server: BudgetedServer) -> None:
    return_without_segments(server)
    lost = server.provenance.read(server.slots)
    server.decide_by(server.budget, keeps_copies=True)
    server.store_turn()
    server.leave_and_return()
    assert server.provenance.read(server.slots) == lost


def test_each_run_of_lossy_kv_carries_its_share_of_what_was_lost(server: BudgetedServer) -> None:
    """Stored as one segment, and again as four with a fifth: what was lost is not spread over the fifth."""
    lost = return_without_segments(server) * FIRST_PAGES / 40
    server.decide_by(server.budget, max_layer_bytes=MORE_PAGES * PAGE_BYTES)
    server.compute(MORE_PAGES)
    server.store_turn()
    costs = server.damage_now()
    added = USED * (LIMIT - lost) / 5
    assert costs == pytest.approx([lost / 4 + added] * 4 + [added], rel=STEPS)


def test_segments_that_were_computed_and_stored_again_count_once(server: BudgetedServer) -> None:
    """Three turns become one segment: what they cost when they were stored alone is gone with them."""
    for _ in range(3):
        server.compute(MORE_PAGES)
        server.store_turn()
    server.leave_and_return(is_given_up=True)
    server.store.clear()
    assert server.store_turn()["last_spent"] == 0
    assert len(server.headers) == 1
    (cost,) = server.damage_now()
    server.compute(MORE_PAGES)
    assert server.store_turn()["last_spent"] == pytest.approx(cost * 3 / 4)


def test_segments_that_left_dram_for_a_lower_tier_count(
    server: BudgetedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that they have lost, also before they were stored."""
    return_without_segments(server)
    server.compute(MORE_PAGES)
    server.store_turn()
    (noted,) = server.noted_damage()
    monkeypatch.setattr(server.store, "path_segments", lambda model, page_keys: [])
    server.compute(MORE_PAGES)
    assert server.store_turn()["last_spent"] == pytest.approx(noted * 40 / 48)


def unobserved(server: BudgetedServer) -> None:
    server.store_turn(is_observed=False)


def with_nothing_left(server: BudgetedServer) -> None:
    server.decide_by(server.make_budget(LIMIT / 2))
    server.store_turn()


def after_the_weights_changed(server: BudgetedServer) -> None:
    server.budget.forget_model()
    server.store_turn()


@pytest.mark.parametrize("store", [unobserved, with_nothing_left, after_the_weights_changed])
def test_what_cannot_be_compressed_is_native_and_keeps_what_it_has_lost(
    server: BudgetedServer, store: Callable[[BudgetedServer], None]
) -> None:
    """It loses nothing more; and it is still no truth when it returns."""
    lost = return_without_segments(server)
    store(server)
    assert is_native(server)
    assert server.noted_damage() == pytest.approx([lost])
    before = server.read_pool()
    server.leave_and_return()
    for kv, was in zip(server.read_pool(), before, strict=True):
        assert torch.equal(kv.k, was.k)
        assert torch.equal(kv.v, was.v)
    num_tokens = FIRST_PAGES * PAGE_SIZE
    (span,) = server.provenance.read(server.slots)
    assert (span.start, span.end, span.segment_start) == (0, num_tokens, 0)
    assert span.damage == pytest.approx(lost * num_tokens)


@pytest.mark.parametrize("returns", [True, False], ids=["returns", "stays on the device"])
def test_new_tokens_may_lose_their_share_when_nothing_is_left(server: BudgetedServer, returns: bool) -> None:
    """So a conversation comes back to its limit, and never loses more than it had lost."""
    server.compute(FIRST_PAGES)
    server.store_turn()
    limit = LIMIT / 4
    budget = server.make_budget(limit)
    server.decide_by(budget)
    (lost,) = server.damage_now()
    for turn in range(1, 5):
        if returns:
            server.leave_and_return()
        server.compute(MORE_PAGES)
        server.store_turn()
        said, num_pages = budget.as_dict(), FIRST_PAGES + turn * MORE_PAGES
        assert said["last_spent"] > limit
        assert said["last_damage"] == pytest.approx(USED * limit * MORE_PAGES / num_pages, rel=STEPS)
        assert not is_native(server)
        assert limit < sum(server.damage_now()) < lost
        lost = sum(server.damage_now())
        assert said["unfamiliar_turns"] == 0


def test_what_is_missing_before_stored_tokens_gets_what_is_left(server: BudgetedServer) -> None:
    """The tokens after it have lost nearly all of the limit, since it had lost nothing."""
    server.compute(FIRST_PAGES)
    server.store_turn(is_observed=False)
    server.compute(MORE_PAGES)
    server.store_turn()
    (first,) = (
        each for each in server.store.path_segments(MODEL, server.keys) if not each.header.start_token
    )
    server.store.report_damage(first.segment_id, "damaged")
    server.store_turn()
    assert not is_native(server, 0)
    assert 0.95 * LIMIT < sum(server.damage_now()) <= LIMIT * (1 + 1e-6)


UNFAMILIAR = 0.1
"""The length of what the bases cannot represent: in a turn of ``FIRST_PAGES`` it costs half of the limit."""


def test_rounding_gets_what_is_left_beside_what_the_bases_cannot_represent(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES, outside=UNFAMILIAR)
    said = server.store_turn()
    assert 0.3 * LIMIT < said["last_outside"] < 0.8 * LIMIT
    assert not is_native(server)
    assert said["unfamiliar_turns"] == 0
    assert said["last_damage"] == pytest.approx(USED * LIMIT, rel=STEPS)


def precision_of(server: BudgetedServer, segment: int = -1) -> Precision:
    """That of all layers of a segment, which are stored one by one."""
    header = server.headers[segment]
    opened = server.codec.open(
        header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
    )
    (precision,) = set(opened.stored_as.precisions)
    return precision


@pytest.mark.parametrize(
    ("limit", "expected"), [(2.0, Precision.INT4), (LIMIT, Precision.INT8), (1e-4, Precision.NATIVE)]
)
def test_a_turn_that_the_bases_cannot_represent_is_stored_in_as_few_bits_as_its_limit_allows(
    server: BudgetedServer, caplog: pytest.LogCaptureFixture, limit: float, expected: Precision
) -> None:
    """And says so once. What it loses is spent."""
    budget = server.make_budget(limit)
    server.decide_by(budget)
    for turn in range(2):
        server.compute(MORE_PAGES, outside=40 * UNFAMILIAR)
        spent = server.damage_now()
        server.store_turn()
        said = budget.as_dict()
        assert said["last_outside"] > limit
        assert said["last_spent"] == pytest.approx(sum(spent))
        assert precision_of(server) is expected
        assert said["unfamiliar_turns"] == turn + 1
        assert said["last_damage"] == pytest.approx(server.noted_damage()[-1])
        assert 0 <= said["last_damage"] <= USED * (limit - said["last_spent"])
        assert said["coarse_runs"] == (0 if expected is Precision.NATIVE else turn + 1)
        assert (said["last_damage"] == 0) == (expected is Precision.NATIVE)
    assert len([record for record in caplog.records if "unlike the text" in record.message]) == 1


def test_what_came_back_in_few_bits_is_spent(server: BudgetedServer) -> None:
    server.compute(MORE_PAGES, outside=8 * UNFAMILIAR)
    said = server.store_turn()
    assert precision_of(server) is Precision.INT8
    before = server.read_pool()
    server.leave_and_return()
    lost = [(a.k - b.k).abs().max() for a, b in zip(before, server.read_pool(), strict=True)]
    assert 0 < max(lost) < 0.05
    (span,) = server.provenance.read(server.slots)
    assert span.damage == pytest.approx(said["last_damage"] * span.end)
    server.compute(FIRST_PAGES)
    spent = said["last_damage"] * MORE_PAGES / (MORE_PAGES + FIRST_PAGES)
    said = server.store_turn()
    assert said["last_spent"] == pytest.approx(spent)
    assert said["last_damage"] == pytest.approx(USED * (LIMIT - spent), rel=STEPS)


def test_a_turn_of_which_nothing_was_recorded_is_native(
    server: BudgetedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once."""
    for turn in range(2):
        server.compute(MORE_PAGES)
        said = server.store_turn(is_observed=False)
        assert (said["unrecorded_turns"], said["unfamiliar_turns"], said["last_damage"]) == (turn + 1, 0, 0)
        assert is_native(server)
    assert len([record for record in caplog.records if "query_memory" in record.message]) == 1
    server.compute(MORE_PAGES)
    assert server.store_turn()["unrecorded_turns"] == 2


def compute_unlike(server: BudgetedServer, num_pages: int) -> None:
    """Every second token is one that the bases cannot represent: none of those that a step is chosen by."""
    first = len(server.slots)
    server.compute(num_pages)
    slots = server.slots[first + 1 :: 2]
    unlike = make_layers(BASES, len(slots), None, outside=8 * UNFAMILIAR)
    for layer, kv in enumerate(unlike):
        server.pool.write(layer, slots, kv.k, kv.v)


def test_a_run_that_turns_out_to_cost_too_much_is_stored_without_bases(server: BudgetedServer) -> None:
    """Of a turn of two runs, the other one is not. What follows knows what both have lost."""
    server.decide_by(server.budget, max_layer_bytes=64 * PAGE_BYTES)
    compute_unlike(server, 64)
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert said["last_outside"] < 0.1 * LIMIT
    assert precision_of(server, 0) is Precision.INT8
    assert server.headers[1].codec_params["codec"] == "subspace"
    assert said["unfamiliar_turns"] == said["coarse_runs"] == 1
    assert said["text"]["unfamiliar_share"] == pytest.approx(64 / 72)
    noted, now = server.noted_damage(), sum(server.damage_now())
    assert 0 < noted[0] <= USED * LIMIT
    assert said["last_damage"] == pytest.approx(noted[1])
    server.compute(MORE_PAGES)
    assert server.store_turn()["last_spent"] == pytest.approx(now * 72 / 80)
    assert not is_native(server)


def test_a_run_that_costs_more_than_its_sample_said_is_encoded_with_a_smaller_step(
    server: BudgetedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[float] = []
    encode = server.subspace.encode

    def encode_by_a_cheap_sample(*args: Any, max_damage: float, **options: Any) -> EncodedSegment:
        encoded = encode(*args, max_damage=1.5 * max_damage, **options)
        steps.append(encoded.params["step"])
        return encoded

    monkeypatch.setattr(server.subspace, "encode", encode_by_a_cheap_sample)
    server.compute(FIRST_PAGES)
    said = server.store_turn()
    assert said["last_damage"] == pytest.approx(USED * LIMIT, rel=STEPS)
    assert not is_native(server)
    assert server.headers[0].codec_params["step"] == steps[1] < steps[0]
    assert said["unfamiliar_turns"] == 0


def test_what_cannot_be_encoded_is_native(server: BudgetedServer, caplog: pytest.LogCaptureFixture) -> None:
    """Values that are no numbers, in a token by which no step is chosen."""
    server.compute(64)
    for layer in range(NUM_LAYERS):
        server.pool.buffers(layer)[1][server.slots[5]] = math.nan
    said = server.store_turn()
    assert is_native(server)
    assert (said["unfamiliar_turns"], said["coarse_runs"], said["last_damage"]) == (1, 0, 0)
    assert server.noted_damage() == [0]
    assert "256 tokens are not stored in the bases" in caplog.text


def test_what_a_run_loses_anyway_is_part_of_its_share(server: BudgetedServer) -> None:
    server.decide_by(server.budget, max_layer_bytes=MORE_PAGES * PAGE_BYTES)
    server.compute(MORE_PAGES, outside=UNFAMILIAR)
    server.compute(3 * MORE_PAGES)
    server.store_turn()
    assert server.damage_now() == pytest.approx([USED * LIMIT / 4] * 4, rel=STEPS)


def test_native_segments_come_back_exact(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn(is_observed=False)
    server.leave_and_return()
    assert server.provenance.read(server.slots) == []
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert said["last_spent"] == 0
    assert said["last_damage"] == pytest.approx(USED * LIMIT, rel=STEPS)


def test_bases_that_count_all_tokens_alike_need_no_attention() -> None:
    with closing(BudgetedServer(LIMIT, has_bases=False)) as server:
        server.subspace = SubspaceCodec(make_bases(SHAPE, [2, 2], slope=0.0), ROTARY)
        server.learn()
        server.compute(FIRST_PAGES)
        said = server.store_turn(is_observed=False)
        assert said["unrecorded_turns"] == 0
        assert said["last_damage"] == pytest.approx(USED * LIMIT, rel=STEPS)
        assert not is_native(server)


def test_what_nobody_measured_leaves_nothing_to_spend(server: BudgetedServer) -> None:
    """Segments that another strategy stored lossy, before the server was started with this one."""
    server.compute(FIRST_PAGES)
    int8 = make_selector("none", layer_ratio=0.0, gamma=0.0, precision=Precision.INT8)
    alone = RankAgreement(None, 1)
    server.decide_by(SelectorDecision(int8, server.codec, server.pool, alone, num_heads=1))
    server.store_turn(is_observed=False)
    server.decide_by(server.budget)
    server.leave_and_return()
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert (said["last_spent"], said["last_damage"]) == (None, 0.0)
    assert is_native(server)
    assert server.noted_damage() == [math.inf, 0.0]


def test_a_history_that_cannot_be_read_leaves_nothing_to_spend(
    server: BudgetedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionError("the daemon is gone")

    server.compute(FIRST_PAGES)
    with monkeypatch.context() as patch:
        patch.setattr(server.store, "path_segments", fail)
        said = server.store_turn()
    assert (said["last_spent"], said["last_damage"]) == (None, 0.0)
    assert is_native(server)
    assert server.noted_damage() == [0.0]


def test_a_slot_that_is_computed_again_is_exact_again(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.leave_and_return()
    assert [span.end for span in server.provenance.read(server.slots)] == [FIRST_PAGES * PAGE_SIZE]
    server.after_forward("decode", server.slots[:12])
    (span,) = server.provenance.read(server.slots)
    assert (span.start, span.end) == (12, FIRST_PAGES * PAGE_SIZE)
    server.after_forward("extend", server.slots[12:])
    assert server.provenance.read(server.slots) == []


def test_a_load_that_was_given_up_and_recomputed_is_exact(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    server.store_turn()
    server.leave_and_return(is_given_up=True)
    assert server.provenance.read(server.slots) == []


@pytest.mark.parametrize(
    ("pages", "lossy_from"), [((32, 32, 32, 32), None), ((32, 32, 8, 8), 8), ((0, 0, 0, 0), 0)]
)
def test_recomputed_heads_are_exact(
    server: BudgetedServer, pages: tuple[int, ...], lossy_from: int | None
) -> None:
    """From where a tail of some layer begins, tokens are lossy."""
    server.compute(FIRST_PAGES)
    server.store_turn()
    assert not is_native(server)
    server.leave_and_return([page * PAGE_SIZE for page in pages])
    spans = server.provenance.read(server.slots)
    assert [span.start for span in spans] == ([] if lossy_from is None else [lossy_from * PAGE_SIZE])


def test_ranks_share_the_limit() -> None:
    server = BudgetedServer(LIMIT, tp_size=2)
    server.compute(FIRST_PAGES)
    said = server.store_turn()
    server.close()
    assert said["last_damage"] == pytest.approx(USED * LIMIT / 2, rel=STEPS)


def test_a_turn_is_encoded_within_what_is_left_by_then(server: BudgetedServer) -> None:
    """Two turns that were stored before the first one was encoded do not both spend the whole budget."""
    server.compute(FIRST_PAGES)
    first = server.path
    with holding_the_encoder(server):
        for path in (first, None):
            if path is None:
                server.compute(MORE_PAGES)
                path = server.path
            rows: Any = RecordedRows(len(path.slots))
            server.offloader.submit(Turn(**vars(path), model=MODEL, ready=[], attention=rows))
            assert server.offloader.pop_completed()
        assert len(server.offloader.encoder) == 2
        # What waits is found, as it was.
        lease = server.store.lease(MODEL, first.page_keys, first.token_ids)
        assert lease is not None
        assert lease.num_pages == FIRST_PAGES
        server.store.release(lease)
    server.offloader.wait()
    costs = server.damage_now()
    assert len(costs) == 2
    assert sum(costs) <= LIMIT
    assert costs[0] == pytest.approx(USED * LIMIT * FIRST_PAGES / 40, rel=STEPS)


def test_what_is_discarded_leaves_nothing_pinned_and_no_room_taken(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    path = server.path
    with holding_the_encoder(server):
        rows: Any = RecordedRows(len(path.slots))
        server.offloader.submit(Turn(**vars(path), model=MODEL, ready=[], attention=rows))
        assert server.offloader.pop_completed()
        assert (server.store.stats().num_leases, server.offloader.encoder.waiting_bytes) != (0, 0)
        server.offloader.discard_all()
    assert (server.store.stats().num_leases, server.offloader.encoder.waiting_bytes) == (0, 0)
    assert server.headers == []


def test_kv_of_which_nobody_knows_what_it_has_lost_is_native_and_leaves_nothing_to_spend(
    server: BudgetedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    server.compute(FIRST_PAGES)
    with monkeypatch.context() as patch:
        patch.setattr(server.provenance, "read", fail)
        server.store_turn()
    assert is_native(server)
    assert server.noted_damage() == [math.inf]
    server.compute(MORE_PAGES)
    said = server.store_turn()
    assert (said["last_spent"], said["last_damage"]) == (None, 0.0)
    assert is_native(server)


@contextmanager
def holding_the_encoder(server: BudgetedServer) -> Iterator[None]:
    """The server computes meanwhile, and memory has room, so that nothing is encoded."""
    with computing(server.offloader._gate):
        yield


@pytest.mark.parametrize("is_loaded", [False, True], ids=["on the device", "loaded"])
def test_a_conversation_pays_its_share_of_a_segment_that_it_begins_with(
    server: BudgetedServer, is_loaded: bool
) -> None:
    server.compute(FIRST_PAGES)
    lost = server.store_turn()["last_damage"]
    server.begin_another(4)
    if is_loaded:
        server.leave_and_return()
    server.compute(28)
    said = server.store_turn()
    assert said["last_spent"] == pytest.approx(lost * 4 / FIRST_PAGES)
    # Its own segment is not charged with the other one's tokens, now or later.
    server.compute(MORE_PAGES)
    spent = (said["last_spent"] + said["last_damage"]) * 32 / 40
    assert server.store_turn()["last_spent"] == pytest.approx(spent)


def test_the_share_counts_when_the_segment_has_left(server: BudgetedServer) -> None:
    server.compute(FIRST_PAGES)
    lost = server.store_turn()["last_damage"]
    server.begin_another(4)
    server.leave_and_return()
    server.store.clear()
    server.compute(28)
    # All is stored again, with what the first pages have lost.
    assert server.store_turn()["last_spent"] == pytest.approx(lost * 4 / FIRST_PAGES)


def test_tokens_that_are_stored_where_nobody_looks_count_as_unknown() -> None:
    stored = [DamagedSpan(0, 16, 0, 16.0)]
    lossy = [DamagedSpan(0, 16, 0, 16.0), DamagedSpan(16, 24, 16, 8.0)]
    assert spent_damage(stored, lossy, [range(24, 32)], 32) == 0.75
    assert spent_damage(stored, lossy, [], 32) == math.inf
    # Stored again as one segment, whose damage holds that of the earlier ones.
    assert spent_damage([DamagedSpan(0, 32, 0, 28.0)], lossy, [], 32) == 0.875
    assert spent_damage([], lossy, [range(32)], 32) == 0.75


@pytest.mark.parametrize("first_lossy", [0, 8], ids=["all of it", "without a recomputed head"])
def test_a_segment_of_which_a_part_is_stored_again_counts_once(first_lossy: int) -> None:
    """Its first half has lost 3 more since; then the store was full. Its second half is stored next."""
    lossy = [DamagedSpan(first_lossy, 32, 0, 24.0)]
    carried = [carried_damage(lossy, tokens) * tokens.stop for tokens in (range(16), range(16, 32))]
    assert sum(carried) == pytest.approx(24.0)
    first_half = DamagedSpan(0, 16, 0, carried[0] + 3.0)
    assert spent_damage([first_half], lossy, [range(16, 32)], 32) == pytest.approx((24.0 + 3.0) / 32)
    second_half = DamagedSpan(16, 32, 16, carried[1] + 2.0)
    assert spent_damage([first_half, second_half], lossy, [], 32) == pytest.approx((24.0 + 5.0) / 32)
