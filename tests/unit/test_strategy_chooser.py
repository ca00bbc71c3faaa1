"""A decision by attention hands what a capture gives to its selector, whatever kind of capture it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from krul_backend.attention.rows import QueryRows, ReadKeys, accumulate
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.pairs.selectors import Evidence, StrategySelector
from krul_backend.strategy.strategy import SUBSPACE, LayerGroups, Precision, Strategy
from krul_sglang.engine.capture.turn_capture import CapturedTurn
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.save.strategy_choice import ChoiceCounters, ConversationStatistics, SelectorDecision
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import LayerEncoding
from tests.support.attention_builders import Sequence
from tests.support.codec_builders import make_codec
from tests.support.segment_builders import MODEL

SEQUENCE = Sequence.random(num_layers=3, num_tokens=32, num_heads=2)
CODEC = make_codec(LayerShape(1, 8, 8, torch.float32), 3)
SHARED = Strategy.from_pairs(3, [(0, 2)])


class Pool:
    """Keys of token ``t`` lie in slot ``31 - t``."""

    num_layers = 3

    def gather_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return SEQUENCE.keys[layer].flip(0)[slots]


class Captured(CapturedTurn):
    """Rows of the tokens in ``[start, end)``."""

    def __init__(self, start: int, end: int, *, fails: bool = False) -> None:
        super().__init__()
        self._range = (start, end)
        self._fails = fails

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        if self._fails:
            raise RuntimeError("the device is gone")
        return accumulate(SEQUENCE.rows(self._range[0], min(self._range[1], num_tokens)), read_keys)

    def rows(self, num_tokens: int) -> QueryRows | None:
        raise AssertionError("nobody needs rows")

    def _give_place_back(self) -> None:
        """Nothing is held."""


class Remember(StrategySelector):
    name = "remember"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[AttentionStatistics | None] = []

    def select(self, evidence: Evidence) -> Strategy:
        self.seen.append(evidence.statistics)
        return SHARED


def choose(*attentions: tuple[int, CapturedTurn | None]) -> list[AttentionStatistics | None]:
    """What the selector saw of turns of one conversation: tokens stored, and what was captured."""
    selector = Remember()
    pool: Any = Pool()
    decision = SelectorDecision(selector, CODEC, pool, RankAgreement(None, 1), num_heads=2)
    for num_tokens, attention in attentions:
        keys = [f"page {page}" for page in range(num_tokens // 8)]
        slots = 31 - torch.arange(num_tokens)
        turn = Turn(keys, np.zeros(num_tokens, dtype=np.int64), slots, (), attention, model=MODEL)
        encoding = decision.decide(turn, [range(1), range(2, 3)])
        assert isinstance(encoding, LayerEncoding)
        assert (encoding.stored_as, encoding.damages) == (SHARED, (None, None))
        assert encoding.layer_token_bytes == CODEC.of(SHARED).layer_token_bytes(SHARED)
        # The last layer is decoded from the block of the first one, too.
        assert encoding.last_use == (2, 1, 2)
    return selector.seen


def test_statistics_of_a_conversation_add_up() -> None:
    _, statistics = choose((16, Captured(0, 19)), (32, Captured(16, 32)))
    assert statistics is not None
    expected = accumulate(SEQUENCE.rows(), SEQUENCE.read_keys)
    assert statistics.num_rows == 32
    torch.testing.assert_close(statistics.squared_distance, expected.squared_distance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.ir_mass, expected.ir_mass, rtol=1e-5, atol=1e-5)


def test_without_a_capture_there_is_no_evidence() -> None:
    assert choose((16, None)) == [None]


def test_a_capture_that_fails_is_no_evidence_and_no_error() -> None:
    assert choose((16, Captured(0, 16, fails=True))) == [None]


def test_conversations_are_forgotten_by_the_bytes_of_their_statistics() -> None:
    """With all query heads the sums of a large model are megabytes."""
    statistics = accumulate(SEQUENCE.rows(), SEQUENCE.read_keys)
    conversations = ConversationStatistics(max_bytes=3 * statistics.nbytes)
    for name in ("a", "b", "c", "a", "d"):
        conversations.extend([name], statistics)
    num_rows = {name: conversations.extend([name], statistics).num_rows for name in ("a", "d")}
    # The third time of "a", the second of "d"; of "b" nothing is known any more.
    assert num_rows == {"a": 3 * 32, "d": 2 * 32}
    assert conversations.extend(["b"], statistics).num_rows == 32


def test_turns_are_counted_by_how_they_are_stored() -> None:
    counters = ChoiceCounters()
    counters.add(SHARED)
    counters.add(Strategy.from_pairs(3, [], [Precision.NATIVE, Precision.INT4, Precision.INT4]))
    counters.add(LayerGroups((2, 3)))
    # It may turn out to be native when it is encoded.
    assert counters.as_dict()["subspace_turns"] == 0
    counters.note_encoded(SUBSPACE)
    assert counters.as_dict() == {
        "turns": 3,
        "subspace_turns": 1,
        "pairs": {"0-2": 1},
        "precisions": {"native": 4, "int4": 2},
    }
