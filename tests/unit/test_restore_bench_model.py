"""The benchmark's decoder: heads and the forward after them give what one forward over everything gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.restore.model import Decoder, scattered_slots
from tests.support.restore_bench_builders import HISTORY_TOKENS, PAGE_SIZE, SHAPE, Bench, bench


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


def test_layers_that_share_their_matrices_are_still_different(built: Bench) -> None:
    shared = Decoder(SHAPE, torch.float32, torch.device("cpu"), 512, is_one_layer=True)
    hidden, inner = SHAPE.hidden_size, SHAPE.intermediate_size
    num_qkv = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    of_layer = hidden * (num_qkv + SHAPE.num_heads * SHAPE.head_dim + 3 * inner)
    assert built.restorer.model.num_bytes - shared.num_bytes == 4 * (SHAPE.num_layers - 1) * of_layer
    with torch.inference_mode():
        states = [
            shared.layer(layer, shared.embed(built.turn.token_ids), built.restorer.pool, built.turn.slots)
            for layer in (0, 3)
        ]
    assert (states[0] - states[1]).norm() > 0.1 * states[0].norm()


def test_slots_are_whole_pages_in_another_order() -> None:
    slots = scattered_slots(8 * PAGE_SIZE, PAGE_SIZE, seed=1, device=torch.device("cpu"))
    assert sorted(slots.tolist()) == list(range(8 * PAGE_SIZE))
    pages = slots.view(8, PAGE_SIZE)
    assert (pages - pages[:, :1] == torch.arange(PAGE_SIZE)).all()
    assert (pages[:, 0] % PAGE_SIZE == 0).all()
    assert pages[:, 0].tolist() != sorted(pages[:, 0].tolist())
