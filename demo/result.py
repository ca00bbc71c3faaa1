"""What the demo measured: one row per turn, rounds of turns, and the summary with its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from demo.conversations import Conversation
from demo.server import StoredAmounts
from demo.summary import quantiles
from krul_sglang.cli.timed_answer import TurnResult, format_seconds

ServerName = Literal["device", "recompute", "krul"]
SERVERS: tuple[ServerName, ...] = ("device", "recompute", "krul")
"""SGLang with a device pool that holds everything; SGLang with a small pool; the same small pool and krul."""

MAX_RECALL_LOSS = 0.02
"""Where answers may differ, the demo fails if krul's recall is this much below that of ``recompute``."""

Quantiles = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One turn, which all three servers were asked with the same prompt.

    ``save_s``: from the krul server's answer until it had saved the turn; ``stored`` is what it holds then.
    ``expected``: a string that a right answer contains, None if unknown.
    """

    conversation: str
    turn: int
    device: TurnResult
    recompute: TurnResult
    krul: TurnResult
    save_s: float
    stored: StoredAmounts
    kind: str | None
    expected: str | None

    def of(self, server: ServerName) -> TurnResult:
        results = {"device": self.device, "recompute": self.recompute, "krul": self.krul}
        return results[server]

    def is_same(self, server: ServerName) -> bool:
        """Whether the answer is that of the server that never evicts."""
        return self.of(server).answer == self.device.answer

    def is_correct(self, server: ServerName) -> bool | None:
        """Whether the answer contains what is expected; None where nothing is."""
        return None if self.expected is None else self.expected in self.of(server).answer

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came with krul than without."""
        return self.recompute.ttft_s / self.krul.ttft_s


@dataclass(frozen=True)
class Round:
    """The same turn of all conversations, or all returning turns together (``turn`` None).

    Token counts are sums over the turns; ``speedup`` compares TTFT turn by turn. ``stored`` is what krul
    held at the end of the round.
    """

    turn: int | None
    num_turns: int
    prompt_tokens: int
    restored_tokens: int
    ttft_s: dict[ServerName, Quantiles]
    speedup: Quantiles
    save_s: Quantiles
    stored: StoredAmounts


@dataclass(frozen=True)
class Summary:
    """Counts over all turns. ``recall`` is over turns that expect something, None if there are none.

    ``answers_must_be_same``: nothing is compressed and numbers are float32, so that answers of krul must be
    those of ``device``. Where they need not be, recall has to hold.
    """

    answers: int
    same_answers: dict[ServerName, int]
    returning_turns: int
    restored_turns: int
    restored_tokens: int
    recall: dict[ServerName, float] | None
    tpot_s: dict[ServerName, Quantiles]
    answers_must_be_same: bool

    @property
    def passed(self) -> bool:
        """Whether krul restored something, and its answers are as they have to be."""
        if self.restored_turns == 0:
            return False
        if self.answers_must_be_same:
            return self.same_answers["krul"] == self.answers
        return self.recall is None or self.recall["krul"] >= self.recall["recompute"] - MAX_RECALL_LOSS


def make_row(
    conversation: Conversation,
    *,
    device: TurnResult,
    recompute: TurnResult,
    krul: TurnResult,
    save_s: float,
    stored: StoredAmounts,
) -> Row:
    """Join the three results of one turn; all three must be of the same conversation and turn."""
    keys = {(result.conversation, result.turn) for result in (device, recompute, krul)}
    assert keys == {(conversation.conversation_id, krul.turn)}, keys
    asked = conversation.turns[krul.turn - 1]
    return Row(
        conversation=krul.conversation,
        turn=krul.turn,
        device=device,
        recompute=recompute,
        krul=krul,
        save_s=save_s,
        stored=stored,
        kind=asked.kind,
        expected=asked.expected,
    )


def make_rounds(rows: Sequence[Row]) -> list[Round]:
    """A round for each turn number, then one of all returning turns, if there are more than one kind."""
    turns = sorted({row.turn for row in rows})
    rounds = [_make_round(turn, [row for row in rows if row.turn == turn]) for turn in turns]
    returning = [row for row in rows if row.turn > 1]
    return [*rounds, _make_round(None, returning)] if returning else rounds


def _make_round(turn: int | None, rows: Sequence[Row]) -> Round:
    return Round(
        turn=turn,
        num_turns=len(rows),
        prompt_tokens=sum(row.krul.prompt_tokens for row in rows),
        restored_tokens=sum(row.krul.host_tokens for row in rows),
        ttft_s={server: quantiles([row.of(server).ttft_s for row in rows]) for server in SERVERS},
        speedup=quantiles([row.speedup for row in rows]),
        save_s=quantiles([row.save_s for row in rows]),
        stored=rows[-1].stored,
    )


def summarize(rows: Sequence[Row], *, answers_must_be_same: bool) -> Summary:
    asked = [row for row in rows if row.expected is not None]
    tpot_s = {
        server: [seconds for row in rows if (seconds := row.of(server).tpot_s) is not None]
        for server in SERVERS
    }
    return Summary(
        answers=len(rows),
        same_answers={server: sum(row.is_same(server) for row in rows) for server in SERVERS},
        returning_turns=sum(row.turn > 1 for row in rows),
        restored_turns=sum(row.krul.host_tokens > 0 for row in rows),
        restored_tokens=sum(row.krul.host_tokens for row in rows),
        recall={server: sum(bool(row.is_correct(server)) for row in asked) / len(asked) for server in SERVERS}
        if asked
        else None,
        tpot_s={server: quantiles(samples) for server, samples in tpot_s.items() if samples},
        answers_must_be_same=answers_must_be_same,
    )


def verdict(summary: Summary, rows: Sequence[Row]) -> list[str]:
    """Plain sentences: whether the demo passed, or why not, and what the times are."""
    rounds = make_rounds(rows)
    lines = [_failure(summary, rows) or _answers(summary)]
    returning = next((each for each in rounds if each.turn is None), None)
    if returning is not None:
        lines.append(
            f"Returning turns: first token after {_median(returning.ttft_s['krul'])} with krul, "
            f"{_median(returning.ttft_s['recompute'])} recomputed, {_median(returning.ttft_s['device'])} "
            f"where nothing was evicted. {_compare(returning.speedup)}."
        )
    if rounds[0].turn == 1:
        lines.append(f"First turns, which krul cannot help: {_with_and_without(rounds[0].ttft_s)}.")
    if set(summary.tpot_s) == set(SERVERS):
        lines.append(f"Each further token: {_with_and_without(summary.tpot_s)}.")
    return lines


def _failure(summary: Summary, rows: Sequence[Row]) -> str | None:
    if summary.restored_turns == 0:
        return (
            f"FAILED: not one of the {summary.returning_turns} returning turns took anything from krul; "
            "either nothing had left the device pool, or the krul server stored nothing (see its log)."
        )
    if summary.passed:
        return None
    if summary.answers_must_be_same:
        first = next(row for row in rows if not row.is_same("krul"))
        return (
            f"FAILED: {summary.answers - summary.same_answers['krul']} of {summary.answers} answers differ "
            "from the server that never evicts (first: conversation "
            f"{first.conversation}, turn {first.turn})."
        )
    assert summary.recall is not None
    return (
        f"FAILED: recall is {summary.recall['krul']:.0%} with krul and {summary.recall['recompute']:.0%} "
        "without."
    )


def _answers(summary: Summary) -> str:
    num_same = summary.same_answers["krul"]
    same = f"All {summary.answers}" if num_same == summary.answers else f"{num_same} of {summary.answers}"
    return (
        f"{same} answers are those of the server that never evicts; {summary.restored_turns} of "
        f"{summary.returning_turns} returning turns were restored."
    )


def _compare(speedup: Quantiles) -> str:
    low, middle, high = speedup["q25"], speedup["median"], speedup["q75"]
    if low > 1.0:
        found = f"krul is {middle:.2f} times sooner"
    elif high < 1.0:
        return f"krul is {1 / middle:.2f} times SLOWER (half of the turns: {1 / high:.2f} to {1 / low:.2f})"
    else:
        found = f"No clear difference: {middle:.2f} times sooner"
    return f"{found} (half of the turns: {low:.2f} to {high:.2f})"


def _with_and_without(seconds: dict[ServerName, Quantiles]) -> str:
    return f"{_median(seconds['krul'])} with krul, {_median(seconds['recompute'])} without"


def _median(seconds: Quantiles) -> str:
    return format_seconds(seconds["median"])
