"""How unlike the text is that a server stores to the text that its bases were learned from."""

from __future__ import annotations

import pytest
import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.subspace.bases import group_vectors, split_vectors
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.device import Device
from krul_sglang.engine.budget.served_bases import RecentText, TextDrift
from tests.support.budget_builders import PAGE_SIZE, BudgetedServer
from tests.support.subspace_builders import make_bases, make_layers

SHAPE = LayerShape(2, 16, 16, torch.float32)
BASES = make_bases(SHAPE, [2, 1])


@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (1.41, 2.0), (2.0, 4.0)])
def test_the_offset_says_how_much_larger_coefficients_are(
    monkeypatch: pytest.MonkeyPatch, factor: float, offset: float
) -> None:
    """In quarter octaves: twice as large is four of them."""
    layers: list[LayerKV] = []
    for basis in BASES.groups:
        kv = make_layers(BASES, 600, None)[basis.first_layer : basis.end_layer]
        vectors = basis.mean + factor * (group_vectors(kv) - basis.mean)
        layers += split_vectors(vectors, SHAPE, len(kv))
    monkeypatch.setattr(Device, "multiplies_bf16_fast", False)
    encoded = SubspaceCodec(BASES, None).encode(
        layers.__getitem__, start_token=0, num_tokens=600, attention=None, max_damage=0.001
    )
    assert encoded.mean_offset == pytest.approx(offset, abs=0.5)


def test_the_mean_is_over_the_tokens_that_were_stored_last() -> None:
    drift = TextDrift("org/name", 0)
    assert drift.as_dict() == {"last_offset": None, "mean_offset": None, "unfamiliar_share": 0.0}
    drift.add(1.0, 100)
    drift.add(4.0, 50)
    assert (drift.last, drift.mean) == (4.0, pytest.approx(2.0))
    for _ in range(2000):
        drift.add(0.5, 200)
    assert (drift.last, drift.mean) == (0.5, pytest.approx(0.5))


def test_unlike_text_is_warned_of_once_and_not_too_early(caplog: pytest.LogCaptureFixture) -> None:
    drift = TextDrift("org/name", 0)
    drift.add(3.0, 1000)
    assert caplog.records == []
    for _ in range(9):
        drift.add(3.0, 1000)
    (warning,) = caplog.messages
    assert "krul-sglang learn --model-path org/name --text" in warning
    assert "3.0" in warning


def test_familiar_text_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    drift = TextDrift("org/name", 0)
    for offset in (1.9, 2.5, 1.2) * 10:
        drift.add(offset, 1000)
    assert caplog.records == []


def test_text_is_unlike_if_the_bases_cannot_represent_much_of_it() -> None:
    drift = TextDrift("org/name", 0)
    drift.add_unfamiliar(4000)
    assert not drift.is_unlike, "too early"
    drift.add_unfamiliar(1000)
    assert drift.is_unlike
    assert drift.unfamiliar_share == 1.0
    for _ in range(200):
        drift.add(0.5, 200)
    assert drift.unfamiliar_share < 0.25
    assert not drift.is_unlike
    for _ in range(40):
        drift.add(3.0, 1000)
    assert drift.is_unlike, "its coefficients are too large"
    drift.begin_again()
    assert not drift.is_unlike


def test_the_budget_notes_what_is_unlike() -> None:
    server = BudgetedServer(0.05)
    server.compute(64, outside=100.0)
    assert server.store_turn()["text"]["unfamiliar_share"] == 1.0
    server.compute(64)
    # As many tokens that are not.
    assert server.store_turn()["text"]["unfamiliar_share"] == 0.5
    server.close()


def test_turns_are_kept_to_learn_from_but_not_those_of_tenants() -> None:
    server = BudgetedServer(0.05)
    server.bases.recent = RecentText(PAGE_SIZE)
    server.compute(64)
    server.store_turn(tenant="somebody")
    assert server.bases.recent.pieces() == []
    server.compute(8)
    server.store_turn()
    assert server.bases.recent.pieces() == [list(range(72 * PAGE_SIZE))]
    server.budget.forget_model()
    assert server.bases.recent is None
    server.close()


def test_the_budget_notes_what_it_stores() -> None:
    server = BudgetedServer(0.05)
    server.compute(64)
    assert server.budget.as_dict()["text"]["last_offset"] is None
    text = server.store_turn()["text"]
    assert text["mean_offset"] == text["last_offset"] == pytest.approx(0, abs=1.5)
    server.close()
