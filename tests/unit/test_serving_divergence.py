"""The comparison of what servers predict, without a real server: divergences, requests and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.configuration import Configuration
from benchmarks.serving.divergence import (
    ComparedTurn,
    Predictions,
    ask_and_compare,
    common_length,
    divergences,
    rows_of,
    whole_conversations,
)
from benchmarks.serving.servers import Server
from benchmarks.serving.tables import turns_table
from benchmarks.tables import RESULTS
from demo.conversations import Conversation, UserTurn
from krul_sglang.cli.timed_answer import Message

VOCABULARY = 50


def predictions(logits: np.ndarray, num_listed: int) -> Predictions:
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs)[:, :num_listed]
    return Predictions(ids, np.take_along_axis(logprobs, ids, -1), logprobs[:, 0])


def exact(true: np.ndarray, other: np.ndarray) -> np.ndarray:
    p, q = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (true, other))
    return (p * np.log(p / q)).sum(-1)


# Divergences


def test_a_divergence_of_complete_lists_is_exact_and_of_cut_ones_is_below_but_near() -> None:
    random = np.random.default_rng(0)
    true = 3 * random.normal(size=(200, VOCABULARY))
    other = true + 0.3 * random.normal(size=true.shape)
    whole = divergences(predictions(true, VOCABULARY), predictions(other, VOCABULARY))
    assert whole == pytest.approx(exact(true, other), abs=1e-7)
    cut = divergences(predictions(true, 20), predictions(other, 20))
    assert (cut <= whole + 1e-9).all()
    assert 0.8 * whole.mean() < cut.mean() < whole.mean()


def test_lists_that_share_no_token_leave_no_more_than_the_rest() -> None:
    listed = np.log([[0.5, 0.25]])
    true = Predictions(np.array([[1, 2]]), listed, np.zeros(1))
    assert divergences(true, replace(true, top_ids=np.array([[3, 4]]))) == 0
    # 1: 0.5 against 0.25; all others: 0.5 against 0.75.
    other = replace(true, top_ids=np.array([[3, 1]]))
    assert divergences(true, other) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75))


def test_the_same_predictions_do_not_diverge_where_nothing_is_left_over() -> None:
    certain = Predictions(np.array([[7, 8]]), np.array([[np.log1p(-1e-7), np.log(2e-7)]]), np.zeros(1))
    assert divergences(certain, certain) == 0


# Requests


@dataclass
class FakeProcess:
    """Answers ``/generate``: predicts token 1 with ``certainty`` and answers two of it, then 9."""

    certainty: float
    host_tokens: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)

    def server_info(self) -> dict[str, Any]:
        budget = {"last_spent": 0.01 * len(self.asked), "last_damage": 0.5}
        state = {
            "offload": {"pending": 0},
            "load": {"pending": 0},
            "tiers": [],
            "compression": {"budget": budget},
        }
        return {"internal_states": [{"krul": state}]}

    def post_json(self, path: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        assert path == "/generate"
        self.asked.append(dict(payload))
        start = payload.get("logprob_start_len", len(payload["input_ids"]))
        num_inputs = len(payload["input_ids"]) - start
        num_outputs = min(3, payload["sampling_params"]["max_new_tokens"])
        logprob = float(np.log(self.certainty))
        top = [[logprob, 1, None], [float(np.log(1 - self.certainty)), 9, None]]
        return {
            "text": "x y",
            "meta_info": {
                "input_token_logprobs": [[None, 1, None], *[[logprob, 1, None]] * (num_inputs - 1)],
                "input_top_logprobs": [None, *[top] * (num_inputs - 1)],
                "output_token_logprobs": [[logprob, token_id, None] for token_id in (1, 1, 9)][:num_outputs],
                "output_top_logprobs": [top] * num_outputs,
                "cached_tokens_details": {"device": 1, "host": self.host_tokens},
            },
        }


def encode(messages: list[Message]) -> list[int]:
    """A token per word: 1 for the words of an answer; 5 and 6 around a message."""
    return [
        token_id
        for message in messages
        for token_id in (
            5,
            *(1 if word in "xy" else len(word) + 10 for word in message["content"].split()),
            6,
        )
    ][1:]


def test_all_servers_get_the_tokens_and_the_answers_of_the_reference() -> None:
    device, compressed = FakeProcess(0.5), FakeProcess(0.25, host_tokens=4)
    servers = [
        Server("device", 64, None, device),  # type: ignore[arg-type]
        Server("compressed", 64, {}, compressed),  # type: ignore[arg-type]
    ]
    configuration = Configuration("model", servers=("device", "compressed"), max_tokens=3)
    chosen = [
        Conversation(name, (UserTurn("aa bbb"), UserTurn("cccc"), UserTurn("d"))) for name in ("one", "two")
    ]
    told: list[str] = []
    found = ask_and_compare(servers, configuration, chosen, encode, told.append)
    of_first, of_second, _ = device.asked[::2]
    first = [12, 13, 6]
    assert of_first["input_ids"] == first
    # Nothing of a first turn is compared, so its beginning may come from the cache.
    assert "logprob_start_len" not in of_first
    assert of_second["input_ids"] == [*first, 5, 1, 1, 6, 5, 14, 6]
    for asked, forced in zip(device.asked, compressed.asked, strict=True):
        assert forced["input_ids"] == [*asked["input_ids"], 1, 1, 9]
        assert forced["sampling_params"]["max_new_tokens"] == 1
        assert forced.get("logprob_start_len") == asked.get("logprob_start_len")
    # The reference answered 1 1 9 after the first prompt: of the next prompt only that prompt is the same.
    assert of_second["logprob_start_len"] == len(first)
    assert [line.split(":")[0] for line in told] == ["device", "compressed"] * 6
    assert list(found) == ["compressed"]
    turn = found["compressed"][0]
    assert (turn.conversation, turn.turn, turn.history_tokens) == ("one", 2, 3)
    # Six tokens of the prompt after the one at the start, and three of the answer.
    assert turn.new_tokens == 6 + 3
    assert turn.kl == pytest.approx(0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75))
    assert turn.nll_delta == pytest.approx(np.log(2))
    assert turn.top1 == 1
    assert turn.unlisted == pytest.approx(0)
    assert turn.is_restored
    assert turn.expected == pytest.approx(0.03)
    assert turn.spent == pytest.approx(0.53)


def test_common_length() -> None:
    assert common_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_length([1, 2], [1, 2, 4]) == common_length([1, 2, 4], [1, 2]) == 2
    assert common_length([], [1]) == 0


# Rows


def compared(conversation: str, turn: int, **changes: Any) -> ComparedTurn:
    made = ComparedTurn(
        conversation=conversation,
        turn=turn,
        history_tokens=100,
        device_tokens=10,
        host_tokens=80,
        new_tokens=40,
        kl=0.004,
        nll_delta=0.001,
        top1=0.9,
        unlisted=0.01,
        expected=0.005,
        spent=0.009,
    )
    return replace(made, **changes)


def test_a_row_is_a_turn_of_all_conversations() -> None:
    turns = [
        compared("a", 2),
        compared("b", 2, kl=0.02, host_tokens=0, device_tokens=90, history_tokens=300),
        compared("c", 2, kl=0.006, top1=0.6),
        compared("a", 3, kl=0.012),
    ]
    second, third = rows_of("compressed", turns, 0.01)
    assert (second["turn"], second["conversations"], third["turn"], third["conversations"]) == (2, 3, 3, 1)
    assert (second["kl_median"], second["kl_p95"], second["kl_mean"]) == (0.006, 0.02, pytest.approx(0.01))
    assert second["top1"] == pytest.approx(0.8)
    assert second["restored"] == pytest.approx(160 / 500)
    assert second["on_device"] == pytest.approx(110 / 500)
    assert second["not_restored"] == 1
    assert second["expected"] == 0.005
    # The median is over the budget in one, and a conversation is at more than three times in the other.
    assert (second["keeps_budget"], third["keeps_budget"]) == (True, False)
    assert rows_of("compressed", [*turns[:2], compared("c", 2, kl=0.031)], 0.01)[0]["keeps_budget"] is False
    (native,) = rows_of("native", [compared("a", 2, expected=None, spent=None)], None)
    assert (native["expected"], native["spent"]) == (None, None)
    assert "keeps_budget" not in native


def test_conversations_of_a_length_are_counted_by_how_far_they_are_over_the_budget() -> None:
    turns = [
        # In the mean of its tokens within the budget.
        compared("a", 2, kl=0.001, new_tokens=300),
        compared("a", 3, kl=0.03, new_tokens=60, history_tokens=256),
        compared("b", 2, kl=0.021, history_tokens=200),
        compared("c", 2, kl=0.04, history_tokens=257),
    ]
    short, longer, every = whole_conversations("compressed", turns, 0.01)
    assert (short["up_to"], longer["up_to"], every["up_to"]) == (256, 512, None)
    assert (short["conversations"], longer["conversations"], every["conversations"]) == (2, 1, 3)
    assert short["kl_median"] == pytest.approx((2.1 / 360 + 0.021) / 2)
    assert (short["kl_max"], longer["kl_max"], every["kl_max"]) == (0.021, 0.04, 0.04)
    assert short["over"] == {"1": 0.5, "2": 0.5, "3": 0}
    assert longer["over"] == {"1": 1, "2": 1, "3": 1}
    assert every["over"] == pytest.approx({"1": 2 / 3, "2": 2 / 3, "3": 1 / 3})
    assert whole_conversations("native", turns, None)[0]["over"] == {}


def test_the_page_shows_every_turn_of_every_server() -> None:
    configuration = Configuration("models/smollm2", servers=("device", "compressed"))
    compressed = [compared("a", 2), compared("b", 2, host_tokens=0)]
    native = [compared("a", 2, kl=0.0, expected=None, spent=None)]
    result = {
        "configuration": {**configuration.to_json(), "dtype": "float32", "total_tokens": 9},
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"sglang": "0"},
        "duration_s": 60.0,
        "top_tokens": 256,
        "error_budgets": {"compressed": 0.01, "native": None},
        "rows": [*rows_of("compressed", compressed, 0.01), *rows_of("native", native, None)],
        "whole_conversations": [
            *whole_conversations("compressed", [*compressed, compared("c", 2, kl=0.025)], 0.01),
            *whole_conversations("native", native, None),
        ],
    }
    lines = turns_table(result, RESULTS / "serving-turns-cpu.json").splitlines()
    kl = "0.00400 | 0.00400 | 0.00400 | 0.00500"
    assert f"| compressed | 2 | 100 | 40%, 1 not | {kl} | +0.0010 | 90.0% | yes |" in lines
    assert "| native | 2 | 100 | 80% | 0.00000 | 0.00000 | 0.00000 | - | +0.0010 | 90.0% | - |" in lines
    assert "| compressed | up to 128 | 3 | 0.00400 | 0.02500 | 0.02500 | 33%, 33%, 0% |" in lines
    assert "| native | all | 1 | 0.00000 | 0.00000 | 0.00000 | - |" in lines
    assert "serving-turns-cpu.json" in lines[-1]
    assert "Budget: compressed 0.01 nats;" in lines[-1]
