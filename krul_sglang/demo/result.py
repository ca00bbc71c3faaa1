"""What the demo measured: one row per turn, the summary of all rows, and what is kept of a result."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from krul_sglang.demo.conversations import Conversation
from krul_sglang.demo.player import TurnResult
from krul_sglang.json_file import quantiles

TurnKey = tuple[str, int]

MAX_DRIFT = 1.3
"""Up to this ratio of times for the same work, the two servers count as equally fast."""

PROMPT_LENGTHS = (512, 1024)
"""Returning turns are grouped by prompts of up to so many tokens, and longer ones."""

MAX_RECALL_LOSS = 0.02
"""With compressed KV, the demo fails if the krul server's recall is this much below the baseline's."""


@dataclass(frozen=True)
class Row:
    """One turn on the krul server, beside the same prompt on the two servers without krul.

    ``device_tokens + host_tokens + computed_tokens == prompt_tokens``. ``correct`` and ``baseline_correct``
    say whether the answer contains ``expected``, and are None where nothing is expected.
    """

    conversation: str
    turn: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    computed_tokens: int
    ttft_s: float
    baseline_ttft_s: float
    reference_ttft_s: float
    answer: str
    answer_equal: bool
    baseline_answer_equal: bool
    kind: str | None
    expected: str | None
    correct: bool | None
    baseline_correct: bool | None


@dataclass(frozen=True)
class Summary:
    """The summary of all turns.

    Medians are over returning turns (turn 2 and later); recall is over turns that expect something.

    ``*_restored_*`` medians are over the returning turns that took something from host memory. The
    ``*_first_*`` medians are the control: first turns are the same work on both servers, which run one after
    the other, so a difference between them comes from the machine.
    """

    answers: int
    answers_equal: int
    baseline_answers_equal: int
    returning_turns: int
    restored_turns: int
    host_hit_tokens: int
    recall: float | None
    baseline_recall: float | None
    median_ttft_s: float | None
    baseline_median_ttft_s: float | None
    median_restored_ttft_s: float | None
    baseline_median_restored_ttft_s: float | None
    median_first_ttft_s: float | None
    baseline_median_first_ttft_s: float | None
    bytes_stored: int | None
    tokens_stored: int | None
    lossless: bool

    @property
    def drift(self) -> float | None:
        """How many times slower (>= 1) one server was than the other at the same work, the first turns."""
        if self.median_first_ttft_s is None or self.baseline_median_first_ttft_s is None:
            return None
        ratio = self.median_first_ttft_s / self.baseline_median_first_ttft_s
        return max(ratio, 1 / ratio)

    @property
    def passed(self) -> bool:
        """Whether turns were restored and answers are the reference's (with compression: recall holds)."""
        if self.lossless or self.recall is None or self.baseline_recall is None:
            return self.restored_turns > 0 and self.answers_equal == self.answers
        return self.restored_turns > 0 and self.recall >= self.baseline_recall - MAX_RECALL_LOSS


def make_row(
    conversation: Conversation, krul: TurnResult, *, baseline: TurnResult, reference: TurnResult
) -> Row:
    """Join the three results of one turn; all three must be of the same conversation and turn."""
    keys = {(result.conversation, result.turn) for result in (krul, baseline, reference)}
    assert keys == {(conversation.conversation_id, krul.turn)}, keys
    asked = conversation.turns[krul.turn - 1]
    return Row(
        conversation=krul.conversation,
        turn=krul.turn,
        prompt_tokens=krul.prompt_tokens,
        device_tokens=krul.device_tokens,
        host_tokens=krul.host_tokens,
        computed_tokens=krul.computed_tokens,
        ttft_s=krul.ttft_s,
        baseline_ttft_s=baseline.ttft_s,
        reference_ttft_s=reference.ttft_s,
        answer=krul.answer,
        answer_equal=krul.answer == reference.answer,
        baseline_answer_equal=baseline.answer == reference.answer,
        kind=asked.kind,
        expected=asked.expected,
        correct=None if asked.expected is None else asked.expected in krul.answer,
        baseline_correct=None if asked.expected is None else asked.expected in baseline.answer,
    )


@dataclass(frozen=True)
class StoredAmounts:
    """The bytes that krul stores on all ranks together, and the number of tokens whose KV they are."""

    num_bytes: int
    num_tokens: int


def summarize(rows: Sequence[Row], *, stored: StoredAmounts | None, lossless: bool) -> Summary:
    returning = [row for row in rows if row.turn >= 2]
    restored = [row for row in rows if row.host_tokens > 0]
    first = [row for row in rows if row.turn == 1]
    asked = [row for row in rows if row.expected is not None]
    return Summary(
        answers=len(rows),
        answers_equal=sum(row.answer_equal for row in rows),
        baseline_answers_equal=sum(row.baseline_answer_equal for row in rows),
        returning_turns=len(returning),
        restored_turns=len(restored),
        host_hit_tokens=sum(row.host_tokens for row in rows),
        recall=_share([bool(row.correct) for row in asked]),
        baseline_recall=_share([bool(row.baseline_correct) for row in asked]),
        median_ttft_s=_median([row.ttft_s for row in returning]),
        baseline_median_ttft_s=_median([row.baseline_ttft_s for row in returning]),
        median_restored_ttft_s=_median([row.ttft_s for row in restored]),
        baseline_median_restored_ttft_s=_median([row.baseline_ttft_s for row in restored]),
        median_first_ttft_s=_median([row.ttft_s for row in first]),
        baseline_median_first_ttft_s=_median([row.baseline_ttft_s for row in first]),
        bytes_stored=None if stored is None else stored.num_bytes,
        tokens_stored=None if stored is None else stored.num_tokens,
        lossless=lossless,
    )


def without_turns(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of ``DemoResult.to_json()``: returning turns by length of the prompt instead of each turn.

    Times become quantiles; ``max_prompt_tokens`` is None for the longest prompts and for all together.
    """
    returning = [row for row in result["rows"] if row["turn"] > 1]
    groups = []
    for low, high in zip((0, *PROMPT_LENGTHS), (*PROMPT_LENGTHS, None), strict=True):
        of_length = [
            row
            for row in returning
            if low < row["prompt_tokens"] and (high is None or row["prompt_tokens"] <= high)
        ]
        if of_length:
            groups.append({"min_prompt_tokens": low + 1, "max_prompt_tokens": high, **_turns(of_length)})
    if returning:
        groups.append({"min_prompt_tokens": 1, "max_prompt_tokens": None, **_turns(returning)})
    return {
        **{name: value for name, value in result.items() if name not in ("rows", "samples")},
        "conversations": len({row["conversation"] for row in returning}),
        "returning_turns": groups,
    }


def _turns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    times = ("ttft_s", "baseline_ttft_s", "reference_ttft_s")
    return {
        "turns": len(rows),
        "prompt_tokens": sum(row["prompt_tokens"] for row in rows),
        "host_tokens": sum(row["host_tokens"] for row in rows),
        **{name: quantiles([row[name] for row in rows]) for name in times},
    }


def verdict(summary: Summary, rows: Sequence[Row]) -> str:
    """One plain sentence: what was measured, or why the demo failed."""
    if summary.restored_turns == 0:
        return (
            f"FAILED: not one of the {summary.returning_turns} returning turns took anything from krul; "
            "either nothing had left the device pool, or the krul server stored nothing (see its log)."
        )
    if not summary.passed and not summary.lossless:
        assert summary.recall is not None
        assert summary.baseline_recall is not None
        return (
            f"FAILED: compression costs too much: recall is {summary.recall:.0%} with krul and "
            f"{summary.baseline_recall:.0%} without."
        )
    if not summary.passed:
        first = next(row for row in rows if not row.answer_equal)
        return (
            f"FAILED: {summary.answers - summary.answers_equal} of {summary.answers} answers differ from the "
            f"server that never evicts (first: conversation {first.conversation}, turn {first.turn})."
        )
    assert summary.median_ttft_s is not None
    assert summary.baseline_median_ttft_s is not None
    if summary.answers_equal == summary.answers:
        answers = f"All {summary.answers} answers are equal"
    else:
        answers = f"{summary.answers_equal} of {summary.answers} answers are equal"
    return (
        f"{answers}; {summary.restored_turns} of {summary.returning_turns} "
        f"returning turns were restored, and the median first token of a returning turn came after "
        f"{format_seconds(summary.median_ttft_s)} with krul and "
        f"{format_seconds(summary.baseline_median_ttft_s)} without: "
        f"{_compare(summary.median_ttft_s, summary.baseline_median_ttft_s)}{_warn_of_drift(summary)}."
    )


def krul_states(server_info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """krul's counters in SGLang's ``/server_info``: one entry per data-parallel replica, its rank 0."""
    return [state["krul"] for state in server_info["internal_states"] if "krul" in state]


def stored_amounts(states: Sequence[Mapping[str, Any]]) -> StoredAmounts | None:
    """The amounts that are stored, from ``krul_states``; None for a server without krul.

    Every other tensor-parallel rank of a replica holds as many bytes of the same tokens as its rank 0.
    """
    if not states:
        return None
    return StoredAmounts(
        num_bytes=sum(state["stored_bytes"] * state["tp_size"] for state in states),
        num_tokens=sum(state["stored_tokens"] for state in states),
    )


def format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{1000 * seconds:.0f} ms"


def _compare(with_krul_s: float, without_s: float) -> str:
    if with_krul_s < without_s:
        return f"{without_s / with_krul_s:.2f} times sooner with krul"
    if with_krul_s > without_s:
        return f"krul is {with_krul_s / without_s:.2f} times SLOWER here"
    return "no difference"


def _warn_of_drift(summary: Summary) -> str:
    if summary.drift is None or summary.drift <= MAX_DRIFT:
        return ""
    return (
        f" (but first turns, the same work on both servers, differ by a factor of {summary.drift:.2f}: this "
        "machine is too busy for its times to mean much)"
    )


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None
