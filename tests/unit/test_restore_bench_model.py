"""The benchmark's decoder: heads and the forward after them give what one forward over everything gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.restore.device import CpuDevice
from benchmarks.restore.model import Decoder
from benchmarks.restore.pool import scattered_slots
from tests.unit.restore_bench_builders import HISTORY_TOKENS, PAGE_SIZE, SHAPE, Bench, bench


@pytest.fixture
def built() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.mark.parametrize("head_ends", [(256, 256, 256, 256), (256, 192, 64, 0), (128, 128, 64, 64)])
def test_truncated_heads_are_those_of_a_full_prefill(built: Bench, head_ends: tuple[int, ...]) -> None:
    with torch.inference_mode():
        marks = built.restorer.recompute_heads(built.turn, head_ends)
    assert len(marks) == sum(head_end > 0 for head_end in head_ends)
    for layer, head_end in enumerate(head_ends):
        kv = built.restorer.pool.gather(layer, built.turn.slots)
        for computed, full in ((kv.k, built.history[layer].k), (kv.v, built.history[layer].v)):
            torch.testing.assert_close(computed[:head_end], full[:head_end], atol=1e-5, rtol=1e-5)
            assert computed[head_end:].isnan().all()


def test_a_forward_after_a_past_gives_the_logits_of_a_forward_over_everything(built: Bench) -> None:
    with torch.inference_mode():
        built.restorer.recompute_heads(built.turn, [HISTORY_TOKENS] * SHAPE.num_layers)
        logits, marks = built.restorer.own_forward(built.turn, num_past=HISTORY_TOKENS)
    assert len(marks) == SHAPE.num_layers
    torch.testing.assert_close(logits, built.logits, atol=1e-5, rtol=1e-5)


def test_a_missing_past_shows_in_the_logits(built: Bench) -> None:
    with torch.inference_mode():
        assert built.restorer.own_forward(built.turn, num_past=HISTORY_TOKENS)[0].isnan().all()
        built.restorer.pool.fill(0.0)
        logits, _ = built.restorer.own_forward(built.turn, num_past=HISTORY_TOKENS)
    assert (logits - built.logits).norm() > 0.1 * built.logits.norm()


def test_layers_share_weights_only_when_asked_to(built: Bench) -> None:
    def after(model: Decoder, layer: int) -> torch.Tensor:
        hidden = model.embed(built.turn.token_ids)
        return model.layer(layer, hidden, built.restorer.pool, built.turn.slots)

    shared = Decoder(SHAPE, torch.float32, CpuDevice().device, 512, is_one_layer=True)
    with torch.inference_mode():
        torch.testing.assert_close(after(shared, 0), after(shared, 3), atol=0, rtol=0)
        assert not torch.allclose(after(built.restorer.model, 0), after(built.restorer.model, 3))


def test_slots_are_whole_pages_in_another_order() -> None:
    slots = scattered_slots(8 * PAGE_SIZE, PAGE_SIZE, seed=1, device=torch.device("cpu"))
    assert sorted(slots.tolist()) == list(range(8 * PAGE_SIZE))
    pages = slots.view(8, PAGE_SIZE)
    assert (pages - pages[:, :1] == torch.arange(PAGE_SIZE)).all()
    assert (pages[:, 0] % PAGE_SIZE == 0).all()
    assert pages[:, 0].tolist() != sorted(pages[:, 0].tolist())
