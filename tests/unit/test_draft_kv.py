"""The KV of a draft model comes back beside the target's, natively or in 8 bits, and never fails it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_engine_copies import losing_the_daemon

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.segment import ModelIdentity
from krul_backend.strategy import Precision
from krul_backend.tiers.common.hint import Hint
from krul_sglang.engine.common.draft_kv import DraftKV
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.draft_loads import DraftLoads
from krul_sglang.engine.restore.held_lease import HeldLease, KeyRun
from krul_sglang.engine.restore.load_batch import LoadBatch, LoadFailedError
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.save.draft_saving import DraftSaver
from krul_sglang.engine.save.offload import MAX_LAYER_BYTES
from krul_sglang.engine.save.turn import Turn
from tests.support.engine_builders import PATIENCE_S, TensorPool
from tests.support.loading_builders import NUM_LAYERS, NUM_PAGES, NUM_TOKENS, PAGE_SIZE, Rig, is_equal
from tests.support.present import present

SHAPE = LayerShape(1, 16, 16, torch.float32)
NUM_DRAFT_LAYERS = 2
OLD, NEW = torch.arange(NUM_TOKENS), torch.arange(30, 30 + NUM_TOKENS)
"""Slots of the conversation before it left the device, and those that it comes back to."""


class Draft:
    """A rig whose target has a draft model, of which a turn can be stored. ``precision``: in which it is."""

    def __init__(self, precision: Precision) -> None:
        self.rig = Rig(PATIENCE_S)
        self.stored_in = precision
        own = ModelIdentity("draft", "d2", "float32", NUM_DRAFT_LAYERS, 1, 16, 16, PAGE_SIZE, 0, 1)
        self.target = ServedModel(self.rig.model)
        self.pool: Any = TensorPool(SHAPE, NUM_DRAFT_LAYERS, num_slots=64, seed=7)
        self.kv = DraftKV(self.pool, own, self.target, "STANDALONE", precision=precision)
        self.saver = DraftSaver(self.rig.store, self.kv, MAX_LAYER_BYTES)
        self.before_layer: Callable[[int, int], None] = lambda index, layer: None
        self.loader = LayerWiseLoader(
            self.rig.store,
            self.rig.pool,
            TransferGate(),
            PATIENCE_S,
            before_layer=lambda index, layer: self.before_layer(index, layer),
            drafts=DraftLoads(self.rig.store, self.kv),
        )

    def close(self) -> None:
        self.loader.close()
        self.rig.close()

    def save(self, hint: Hint | None = None, *, is_wanted: bool = True) -> None:
        turn = Turn(
            self.rig.page_keys, self.rig.token_ids, OLD, model=self.rig.model, ready=[], hint=hint or Hint()
        )
        stream = self.pool.streams.new_stream()
        self.saver.save(turn, stream, lambda: None, lambda: is_wanted, lambda: nullcontext(True))

    def start(self, num_tokens: int = NUM_TOKENS) -> tuple[int, LoadBatch]:
        load, rig = self.rig.load(NEW[:num_tokens]), self.rig
        held = HeldLease(KeyRun.of(rig.page_keys), rig.page_keys, lambda: rig.token_ids, load.lease, 0.0)
        index = self.loader.start({"r": dataclasses.replace(load, held=held)})
        batch = present(self.loader.batch(index))
        return index, batch

    def has_come_back(self, num_tokens: int = NUM_TOKENS) -> bool:
        gather, layers = self.pool.gather, range(NUM_DRAFT_LAYERS)
        if self.stored_in is Precision.NATIVE:
            return all(
                is_equal(gather(each, OLD[:num_tokens]), gather(each, NEW[:num_tokens])) for each in layers
            )
        return all(
            is_within_half_a_step(gather(each, OLD), gather(each, NEW[:num_tokens])) for each in layers
        )

    def num_stored(self) -> int:
        missing = self.rig.store.find_missing(self.kv.identity, self.rig.page_keys)
        return NUM_PAGES - sum(map(len, missing))


def is_within_half_a_step(stored: LayerKV, come: LayerKV) -> bool:
    """Whether the first tokens of what was stored in 8 bits have come back: keys have a step per channel,
    values one per token. Half of it, and what rounding its range to fp16 adds."""
    for before, after, dim in ((stored.k, come.k, 0), (stored.v, come.v, 2)):
        steps = (before.amax(dim, keepdim=True) - before.amin(dim, keepdim=True)) / 255
        if not 0.1 < ((after - before[: len(after)]) / steps[: len(after)]).abs().max() < 0.55:
            return False
    return True


@pytest.fixture(params=[Precision.NATIVE, Precision.INT8])
def draft(request: pytest.FixtureRequest) -> Iterator[Draft]:
    draft = Draft(request.param)
    yield draft
    draft.close()


def test_it_has_come_when_the_targets_last_layer_has(draft: Draft) -> None:
    draft.save()
    assert not draft.has_come_back()
    index, batch = draft.start()
    batch.wait_layer(NUM_LAYERS - 1)
    assert draft.has_come_back()
    assert batch.draft_tokens == {"r": NUM_TOKENS}
    assert draft.loader.finish(index)
    assert draft.rig.num_leases() == 0
    assert draft.kv.counters.stored_tokens == NUM_TOKENS


@pytest.mark.parametrize("num_tokens", [PAGE_SIZE, NUM_TOKENS])
@pytest.mark.parametrize("stored_in", [Precision.NATIVE, Precision.INT8])
def test_servers_share_it_whatever_each_stores_it_in(
    draft: Draft, stored_in: Precision, num_tokens: int
) -> None:
    """Also a part of it. Its bytes are counted as they are stored."""
    draft.stored_in = stored_in
    own = dataclasses.replace(draft.kv.identity, config_digest="d2", target="")
    other = DraftKV(draft.pool, own, draft.target, "STANDALONE", precision=stored_in)
    draft.saver = DraftSaver(draft.rig.store, other, MAX_LAYER_BYTES)
    before = draft.rig.store.stats().stored_bytes
    draft.save()
    index, batch = draft.start(num_tokens)
    assert draft.loader.finish(index)
    assert batch.draft_tokens == {"r": num_tokens}
    assert draft.has_come_back(num_tokens)
    # 32 elements of a token in 4 bytes, or in one; and of 8 bits two numbers per channel and per token.
    of_layer = (
        32 * 4 * NUM_TOKENS if stored_in is Precision.NATIVE else 32 * NUM_TOKENS + 4 * (16 + NUM_TOKENS)
    )
    num_bytes = NUM_DRAFT_LAYERS * of_layer
    assert draft.rig.store.stats().stored_bytes - before == other.counters.num_bytes == num_bytes


def test_a_beginning_comes_alone(draft: Draft) -> None:
    draft.kv.note_restored(OLD, PAGE_SIZE)
    draft.save()
    assert (draft.num_stored(), draft.kv.counters.dropped_turns) == (1, 1)
    index, batch = draft.start()
    assert draft.loader.finish(index)
    assert batch.draft_tokens == {"r": PAGE_SIZE}
    assert draft.has_come_back(PAGE_SIZE)
    assert not draft.has_come_back()


def test_a_daemon_that_goes_meanwhile_costs_the_drafts_kv_alone(
    draft: Draft, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(draft.rig.store, "commit", losing_the_daemon(draft.rig.store))
    draft.save()
    assert (draft.num_stored(), draft.kv.counters.dropped_turns) == (0, 1)
    assert [each.exc_info for each in caplog.records] == [None]


def test_what_is_not_stored_fails_nothing(draft: Draft) -> None:
    index, batch = draft.start()
    assert draft.loader.finish(index)
    assert batch.draft_tokens == {}
    assert draft.rig.holds(0, NEW)


def test_what_is_damaged_fails_nothing_and_leaves_the_store(draft: Draft) -> None:
    draft.save()
    lease = present(draft.rig.store.lease(draft.kv.identity, draft.rig.page_keys, draft.rig.token_ids))
    block = lease.slices[0].blocks[1]
    block.flags.writeable = True
    block[:] = 0
    draft.rig.store.release(lease)
    index, batch = draft.start()
    assert draft.loader.finish(index)
    assert (batch.draft_tokens, draft.kv.counters.failed_loads) == ({}, 1)
    assert draft.rig.holds(NUM_LAYERS - 1, NEW)
    assert (draft.num_stored(), draft.rig.num_leases()) == (0, 0)


def test_a_target_that_fails_has_no_drafts(draft: Draft) -> None:
    draft.save()

    def fail(index: int, layer: int) -> None:
        if layer == NUM_LAYERS - 1:
            raise OSError("injected")

    draft.before_layer = fail
    index, batch = draft.start()
    with pytest.raises(LoadFailedError):
        batch.wait_layer(NUM_LAYERS - 1)
    assert not draft.loader.finish(index)
    assert batch.draft_tokens == {}
    assert (draft.has_come_back(), draft.rig.num_leases()) == (False, 0)


def test_a_load_whose_draft_comes_does_not_stand_still(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline moves with each of the draft's layers, before the target's last one has landed."""
    draft.save()
    deadlines: list[float] = []
    progressed = LoadBatch.progressed

    def note(batch: LoadBatch) -> None:
        time.sleep(0.02)
        deadlines.append(batch.deadline_s())
        progressed(batch)
        deadlines.append(batch.deadline_s())

    monkeypatch.setattr(LoadBatch, "progressed", note)
    index, _ = draft.start()
    assert draft.loader.finish(index)
    assert len(deadlines) == 2 * NUM_DRAFT_LAYERS
    assert deadlines == sorted(set(deadlines))


def test_nothing_stale_is_stored_until_it_is_computed(draft: Draft) -> None:
    draft.kv.note_restored(OLD, 0)
    draft.save()
    assert draft.num_stored() == 0
    draft.kv.note_computed(OLD.int())
    draft.save()
    assert draft.num_stored() == NUM_PAGES
    counters = draft.kv.counters
    assert (counters.missing_tokens, counters.restored_tokens) == (NUM_TOKENS, 0)


@pytest.mark.parametrize("num_restored", [0, 1, 5, NUM_TOKENS])
def test_a_conversation_is_fresh_up_to_the_first_stale_token(draft: Draft, num_restored: int) -> None:
    draft.kv.note_restored(NEW, 0)
    draft.kv.note_restored(NEW, num_restored)
    assert draft.kv.num_fresh(NEW) == num_restored
    assert draft.kv.num_fresh(OLD) == NUM_TOKENS


def test_what_is_dropped_or_revoked_is_not_stored(draft: Draft) -> None:
    draft.save(is_wanted=False)
    assert draft.num_stored() == 0
    draft.save()
    assert draft.num_stored() == NUM_PAGES
    draft.save(Hint(drop=True))
    assert draft.num_stored() == 0


def test_its_name_follows_both_models(draft: Draft) -> None:
    names = {draft.kv.identity.fingerprint, draft.target.identity.fingerprint}
    for other in (("d2", "EAGLE"), ("d3", "STANDALONE")):
        own = dataclasses.replace(draft.kv.identity, config_digest=other[0])
        names.add(DraftKV(draft.pool, own, draft.target, other[1]).identity.fingerprint)
    draft.target.rename(b"\1" * 16)
    names.add(draft.kv.identity.fingerprint)
    assert len(names) == 5


def test_acceptance_is_counted_apart_after_restores(draft: Draft) -> None:
    draft.kv.note_ended(is_restored=True, num_forwards=4, num_accepted=9)
    draft.kv.note_ended(is_restored=False, num_forwards=2, num_accepted=1)
    draft.kv.note_ended(is_restored=True, num_forwards=1, num_accepted=0)
    shown = draft.kv.as_dict()
    assert shown["after_restores"] == {"turns": 2, "forwards": 5, "accepted": 9}
    assert shown["others"] == {"turns": 1, "forwards": 2, "accepted": 1}
    lengths = [draft.kv.gauges()[f"accept_length_{turns}"][1] for turns in ("restored", "others")]
    assert lengths == [1 + 9 / 5, 1.5]
