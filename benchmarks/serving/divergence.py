"""How far what a server predicts on restored KV is from what one that never evicts predicts, turn by turn.

The reference answers each turn. Every other server is then given the same token ids, the answer among them,
so that all conversations stay the same. Each server says what it predicts at the tokens that the turn adds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.configuration import Configuration
from benchmarks.serving.servers import Server
from benchmarks.tables import Columns, Row, cell
from benchmarks.tiers.timing import percentile
from demo.conversations import Conversation
from demo.player import play_order
from demo.sizing import EncodeMessages

TOP_TOKENS = 512
"""So many of the most likely tokens a server lists at each position: with more the
bound is nearer to the whole divergence, and the answer takes longer."""

P95_OVER_BUDGET = 3.0
"""A turn keeps its budget if the median conversation is within it, and 95% are within so many times it."""

_LEAST_MASS = 1e-9
"""The probability of all tokens that are not listed, where rounding leaves less."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a server predicts at consecutive tokens of a prompt or an answer.

    ``top_ids`` and ``top_logprobs [tokens, TOP_TOKENS]``: the most likely tokens, the likeliest first.
    ``logprobs [tokens]``: of the tokens that stand there.
    """

    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]
    logprobs: NDArray[np.float64]


@dataclass(frozen=True)
class ComparedTurn:
    """A returning turn of one server against the reference; means over the ``new_tokens`` that it adds.

    Of the ``history_tokens`` before them ``device_tokens`` and ``host_tokens`` were found. ``kl``, in nats,
    is from below, see ``divergences``; ``unlisted``: the probability of all that the reference did not list.
    ``expected``: what the server expects its history to cost at the turn's end, in nats; ``spent``: the same
    with what storing this turn costs. Both are None without an error budget.
    """

    conversation: str
    turn: int
    history_tokens: int
    device_tokens: int
    host_tokens: int
    new_tokens: int
    kl: float
    nll_delta: float
    top1: float
    unlisted: float
    expected: float | None
    spent: float | None

    @property
    def is_restored(self) -> bool:
        return self.host_tokens > self.history_tokens / 2


def divergences(true: Predictions, other: Predictions) -> NDArray[np.float64]:
    """A lower bound of KL(true || other) at each token, in nats.

    Tokens that both servers list are told apart, all others count as one. Joining outcomes never raises a
    divergence, so the whole one is at least as large.
    """
    found = np.empty(len(true.logprobs))
    for row in range(len(found)):
        _, in_true, in_other = np.intersect1d(
            true.top_ids[row], other.top_ids[row], assume_unique=True, return_indices=True
        )
        p = _with_rest(np.exp(true.top_logprobs[row, in_true]))
        q = _with_rest(np.exp(other.top_logprobs[row, in_other]))
        found[row] = np.sum(p * np.log(p / q))
    # Rounding can leave a distribution's divergence from itself just below zero.
    return found.clip(min=0)


def _with_rest(listed: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(listed, max(1 - listed.sum(), _LEAST_MASS))


def ask_and_compare(
    servers: Sequence[Server],
    configuration: Configuration,
    conversations: Sequence[Conversation],
    encode: EncodeMessages,
    tell: Callable[[str], None],
) -> dict[str, list[ComparedTurn]]:
    """Ask the servers every turn; returning turns of all but the reference, by name of the server.

    Between two turns of a conversation all the others run. ``tell`` is given a line for each answer.

    Raises:
        ServerError: a server gave no answer.
    """
    by_name = {server.name: server for server in servers}
    reference = by_name.pop(configuration.reference)
    answers: dict[str, dict[int, str]] = defaultdict(dict)
    before: dict[str, list[int]] = {}
    compared: dict[str, list[ComparedTurn]] = {name: [] for name in by_name}
    for conversation, turn in play_order(conversations):
        key = conversation.conversation_id
        prompt = encode(conversation.messages(turn, answers[key]))
        # Nothing is compared of a first turn.
        start = common_length(before[key], prompt) if turn > 1 else None
        answer = _ask(reference, prompt, start=start, max_new_tokens=configuration.max_tokens)
        reference.settle()
        tell(f"{reference.name}: {key}, turn {turn}")
        answers[key][turn] = answer["text"]
        ids = [*prompt, *(token_id for _, token_id, _ in answer["meta_info"]["output_token_logprobs"])]
        before[key] = ids
        for server in by_name.values():
            said = _ask(server, ids, start=start, max_new_tokens=1)
            server.settle()
            text = f"{server.name}: {key}, turn {turn}"
            if start is not None:
                found = _compared(server, said, predictions(answer, with_output=True), start)
                compared[server.name].append(ComparedTurn(conversation=key, turn=turn, **found))
                text += f": KL {found['kl']:.5f}"
            tell(text)
    return compared


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _ask(server: Server, ids: list[int], *, start: int | None, max_new_tokens: int) -> dict[str, Any]:
    """One greedy answer, and what the server predicts at the tokens after the one at ``start``.

    SGLang takes at most ``start`` tokens from its cache: only what comes after them is predicted anew.
    """
    wanted: dict[str, Any] = {}
    if start is not None:
        wanted = {"logprob_start_len": start, "top_logprobs_num": TOP_TOKENS}
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
    asked = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **wanted}
    said: dict[str, Any] = server.process.post_json("/generate", asked)
    return said


def predictions(said: Mapping[str, Any], *, with_output: bool) -> Predictions:
    """What a server predicted at the tokens of a prompt, and at those of its answer after them."""
    meta = said["meta_info"]
    # Nothing was computed that would predict the first one.
    chosen, top = meta["input_token_logprobs"][1:], meta["input_top_logprobs"][1:]
    if with_output:
        chosen, top = [*chosen, *meta["output_token_logprobs"]], [*top, *meta["output_top_logprobs"]]
    return Predictions(
        top_ids=np.array([[token_id for _, token_id, _ in row] for row in top]),
        top_logprobs=np.array([[logprob for logprob, _, _ in row] for row in top]),
        logprobs=np.array([logprob for logprob, _, _ in chosen]),
    )


def _compared(server: Server, said: Mapping[str, Any], true: Predictions, start: int) -> dict[str, Any]:
    """All of a ``ComparedTurn`` but its name. The turn is stored by now."""
    own = predictions(said, with_output=False)
    cached = said["meta_info"].get("cached_tokens_details") or {}
    budgets = [state["compression"]["budget"] or {} for state in server.krul_states()]
    budget = budgets[0] if budgets else {}
    expected = budget.get("last_spent")
    return {
        "history_tokens": start,
        "device_tokens": cached.get("device", 0),
        "host_tokens": cached.get("host", 0),
        "new_tokens": len(true.logprobs),
        "kl": float(divergences(true, own).mean()),
        "nll_delta": float((true.logprobs - own.logprobs).mean()),
        "top1": float((true.top_ids[:, 0] == own.top_ids[:, 0]).mean()),
        "unlisted": float((1 - np.exp(true.top_logprobs).sum(-1)).clip(min=0).mean()),
        "expected": expected,
        "spent": None if expected is None else expected + budget["last_damage"],
    }


def rows_of(name: str, turns: Sequence[ComparedTurn], budget: float | None) -> list[dict[str, Any]]:
    """A row for each turn of a conversation; quantiles and means are over conversations.

    ``budget``: the server's, in nats per predicted token; None if it keeps none. ``not_restored``: turns of
    which at most half of the history came from the host.
    """
    by_turn: dict[int, list[ComparedTurn]] = defaultdict(list)
    for turn in turns:
        by_turn[turn.turn].append(turn)
    rows = []
    for number, members in sorted(by_turn.items()):
        kl = [turn.kl for turn in members]
        median, p95 = statistics.median(kl), percentile(kl, 0.95)
        history_tokens = sum(turn.history_tokens for turn in members)
        row = {
            "configuration": name,
            "turn": number,
            "conversations": len(members),
            "history_tokens": history_tokens / len(members),
            "new_tokens": statistics.fmean(turn.new_tokens for turn in members),
            "restored": sum(turn.host_tokens for turn in members) / history_tokens,
            "on_device": sum(turn.device_tokens for turn in members) / history_tokens,
            "not_restored": sum(not turn.is_restored for turn in members),
            "kl_median": median,
            "kl_p95": p95,
            "kl_mean": statistics.fmean(kl),
            "nll_delta": statistics.fmean(turn.nll_delta for turn in members),
            "top1": statistics.fmean(turn.top1 for turn in members),
            "unlisted": statistics.fmean(turn.unlisted for turn in members),
            "expected": _median([turn.expected for turn in members]),
            "spent": _median([turn.spent for turn in members]),
        }
        if budget is not None:
            row["keeps_budget"] = median <= budget and p95 <= P95_OVER_BUDGET * budget
        rows.append(row)
    return rows


def whole_conversations(
    name: str, turns: Sequence[ComparedTurn], budget: float | None
) -> list[dict[str, Any]]:
    """A row for conversations of each length, and one for all of them.

    A conversation's divergence is the mean over all tokens that its returning turns added. ``up_to``: the
    power of two that no history is longer than, None for all. ``over``: shares of conversations above so many
    times the budget.
    """
    by_name: dict[str, list[ComparedTurn]] = defaultdict(list)
    for turn in turns:
        by_name[turn.conversation].append(turn)
    by_length: dict[int, list[float]] = defaultdict(list)
    for own in by_name.values():
        longest = max(turn.history_tokens for turn in own)
        kl = sum(turn.kl * turn.new_tokens for turn in own) / sum(turn.new_tokens for turn in own)
        by_length[1 << (longest - 1).bit_length()].append(kl)
    of_all = [kl for members in by_length.values() for kl in members]
    return [
        {
            "configuration": name,
            "up_to": up_to,
            "conversations": len(members),
            "kl_median": statistics.median(members),
            "kl_p95": percentile(members, 0.95),
            "kl_max": max(members),
            "over": {
                str(times): sum(kl > times * budget for kl in members) / len(members)
                for times in (1, 2, 3)
                if budget is not None
            },
        }
        for up_to, members in [*sorted(by_length.items()), (None, of_all)]
    ]


def _median(values: Sequence[float | None]) -> float | None:
    """None if a server does not know one of them."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _restored(row: Row) -> str:
    lost = f", {row['not_restored']} not" if row["not_restored"] else ""
    return f"{row['restored']:.0%}{lost}"


COLUMNS: Columns = {
    "configuration": cell("configuration"),
    "turn": cell("turn"),
    "history": cell("history_tokens", "{:.0f}"),
    "restored": _restored,
    "KL, median": cell("kl_median", "{:.5f}"),
    "95%": cell("kl_p95", "{:.5f}"),
    "mean": cell("kl_mean", "{:.5f}"),
    "expected": cell("expected", "{:.5f}"),
    "NLL change": cell("nll_delta", "{:+.4f}"),
    "same top token": cell("top1", "{:.1%}"),
    "keeps the budget": cell("keeps_budget", lambda keeps: "yes" if keeps else "no"),
}
