"""Layers that are similar by construction: the selector finds them, and sharing them is cheap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.quality.methods import Compression
from benchmarks.quality.model import HistoryModel, load_model
from benchmarks.quality.protocol import Outcome, Protocol
from benchmarks.quality.teacher_forced import QUESTION_KINDS, TeacherForced, dialogue
from benchmarks.variants import make_variant
from krul_backend.codec.pairs.selectors import Evidence, KrulSelector, StrategySelector, UnsharedSelector
from krul_backend.codec.registry import ModelCodecs
from krul_backend.strategy.strategy import Pair, Precision, Strategy
from krul_sglang.learning.model_kv import rotary_table
from krul_sglang.models.find import REFERENCE_MODEL

NUM_LAYERS = 24
COPIES = {(2 * k, 2 * k + 1) for k in range(NUM_LAYERS // 2)}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def conversations() -> list[TeacherForced]:
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_MODEL).backend_tokenizer
    return [
        dialogue(tokenizer, kind, 256, f"control/{number}", "held_out")
        for number in range(3)
        for kind in QUESTION_KINDS
    ]


class NeighboursFrom(StrategySelector):
    """Shares each layer from ``first`` on with the next one, in pairs."""

    name = "neighbours"

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def select(self, evidence: Evidence) -> Strategy:
        pairs = [(i, i + 1) for i in range(self._first, evidence.num_layers - 1, 2)]
        return Strategy.from_pairs(evidence.num_layers, pairs)


SELECTORS: dict[str, StrategySelector] = {
    "full": UnsharedSelector(),
    # Algorithm 1 on attention distance alone: gamma leaves no layer out.
    "krul": KrulSelector(18 / NUM_LAYERS),
    # From layer 2 on each layer with its copy; from layer 3 on never.
    "copies": NeighboursFrom(2),
    "others": NeighboursFrom(3),
}


def play(
    variant: str, names: Sequence[str], conversations: Sequence[TeacherForced]
) -> dict[str, list[Outcome]]:
    model = HistoryModel(make_variant(load_model(REFERENCE_MODEL, torch.float32, "cpu"), variant))
    codec = ModelCodecs(model.shape, model.num_layers, rotary_table(model.model, 2048))
    methods = [Compression(name, name, codec, SELECTORS[name], Precision.NATIVE) for name in names]
    protocol = Protocol(model, rows_per_turn=16)
    played = [protocol.at_once(conversation, methods).outcomes for conversation in conversations]
    return {name: [outcomes[name] for outcomes in played] for name in names}


def mean(outcomes: Sequence[Outcome], measure: str) -> float:
    return sum(float(outcome.samples[measure].mean()) for outcome in outcomes) / len(outcomes)


def test_algorithm_1_finds_the_copies_and_sharing_them_is_cheap(conversations: list[TeacherForced]) -> None:
    outcomes = play("depth-doubled", list(SELECTORS), conversations)
    pairs = sum((outcome.pairs for outcome in outcomes["krul"]), Counter[Pair]())
    assert set(pairs) <= COPIES

    recall = mean(outcomes["full"], "value_recall")
    assert recall > 0.8
    for name in ("krul", "copies"):
        assert mean(outcomes[name], "value_recall") > recall - 0.02
        assert mean(outcomes[name], "kl") < 0.02
    assert mean(outcomes["others"], "kl") > 10 * mean(outcomes["copies"], "kl")
    assert mean(outcomes["others"], "nll") > mean(outcomes["copies"], "nll") + 0.03


def test_the_loss_grows_with_the_angle_between_the_copies(conversations: list[TeacherForced]) -> None:
    losses = [
        mean(play(f"rotated:{angle}", ["copies"], conversations[:3])["copies"], "kl")
        for angle in (0, 30, 60, 90)
    ]
    assert losses == sorted(losses)
    assert losses[1] > 2 * losses[0]
    assert losses[3] > 2 * losses[1]
