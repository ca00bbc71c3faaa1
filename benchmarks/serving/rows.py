"""What the answers say: one row for each server."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.runner import Result, without_samples
from benchmarks.serving.configuration import of_kind
from benchmarks.serving.servers import Counts
from benchmarks.tiers.timing import percentile
from demo.conversations import Conversation
from demo.player import play_order
from demo.sizing import EncodeMessages
from demo.summary import quantiles
from krul_sglang.cli.timed_answer import TurnResult


def row(
    name: str,
    turns: Mapping[str, Sequence[TurnResult]],
    *,
    reference: str,
    busy_s: float,
    hit_pages: Mapping[str, int],
    theoretical_hit_rate: float,
    bytes_stored: int | None,
) -> dict[str, Any]:
    """One server: times and hits are of returning turns, where nothing else is said.

    ``turns``: of all servers, in the same order. ``tpot_s`` and ``tokens_per_s`` are over all turns.
    """
    own = turns[name]
    returning = [turn for turn in own if turn.turn > 1]
    by_round: dict[int, list[float]] = defaultdict(list)
    for turn in own:
        by_round[turn.turn].append(turn.ttft_s)
    by_tier = hit_rate_by_tier(returning, hit_pages)
    equal = sum(turn.answer == other.answer for turn, other in zip(own, turns[reference], strict=True))
    return {
        "configuration": name,
        "returning_turns": len(returning),
        **of_ttft([turn.ttft_s for turn in returning]),
        **ratios({server: _returning(each) for server, each in turns.items()}, name),
        "ttft_by_round": {number: quantiles(seconds) for number, seconds in sorted(by_round.items())},
        "first_turn_p50_s": statistics.median(by_round[1]),
        "tpot_s": tpot_s(own),
        **cost_of_krul(turns, name),
        "by_prompt_tokens": by_prompt_tokens(turns, name),
        "tokens_per_s": sum(turn.completion_tokens for turn in own) / busy_s,
        "hit_rate": sum(by_tier.values()),
        "hit_rate_by_tier": by_tier,
        "theoretical_hit_rate": theoretical_hit_rate,
        "bytes_stored": bytes_stored,
        "answers_equal": equal / len(own),
    }


def of_tiers(
    turns: Sequence[TurnResult], of_reference: Sequence[TurnResult], counts: Counts | None, *, page_size: int
) -> dict[str, Any]:
    """What a server's tiers hold at the end, and did for its returning turns; empty without krul.

    ``conversations_held``: whole pages of each tier, in conversations of their mean length at the end.
    ``in_dram_when_admitted``: share of the returning turns that were restored, times the share of restored
    tokens that came in loads of which nothing had to be read from a lower tier.
    """
    if counts is None:
        return {}
    last_turns = {turn.conversation: turn for turn in of_reference}
    tokens = statistics.fmean(turn.prompt_tokens + turn.completion_tokens for turn in last_turns.values())
    were_restored = [turn.host_tokens > 0 for turn in turns if turn.turn > 1]
    restored_tokens = sum(turn.host_tokens for turn in turns)
    in_dram = min(1.0, counts.dram_tokens / restored_tokens) if restored_tokens else 0.0
    return {
        "bytes_by_tier": dict(counts.num_bytes),
        "conversations_held": {
            tier: num_pages * page_size / tokens for tier, num_pages in counts.num_pages.items()
        },
        "in_dram_when_admitted": in_dram * statistics.fmean(were_restored),
        "prefetched_bytes": dict(counts.prefetched_bytes),
    }


def of_ttft(seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "mean_ttft_s": statistics.fmean(seconds),
        **{f"p{share}_ttft_s": percentile(seconds, share / 100) for share in (50, 90, 99)},
        "ttft_samples_s": list(seconds),
    }


def ratios(ttft_s: Mapping[str, Sequence[float]], name: str) -> dict[str, Any]:
    """How a server compares with others, turn by turn; a key is left out if its server did not run.

    ``times_sooner_than_recompute`` and ``times_sooner_than_full_load`` are over 1 where this server is
    sooner, ``times_of_device`` where it is later. One that drafts is compared with one that does.
    """
    found: dict[str, Any] = {}
    for base in ("recompute", "full-load"):
        slower = of_kind(base, name)
        if slower in ttft_s and name != slower:
            pairs = zip(ttft_s[slower], ttft_s[name], strict=True)
            field = f"times_sooner_than_{base.replace('-', '_')}"
            found[field] = quantiles([other / own for other, own in pairs])
    device = of_kind("device", name)
    if device in ttft_s and name != device:
        pairs = zip(ttft_s[device], ttft_s[name], strict=True)
        found["times_of_device"] = quantiles([own / other for other, own in pairs])
    return found


def tpot_s(turns: Sequence[TurnResult]) -> float | None:
    """The median turn's seconds per token after the first; None if every answer is a single token."""
    each = [turn.tpot_s for turn in turns if turn.tpot_s is not None]
    return statistics.median(each) if each else None


def cost_of_krul(turns: Mapping[str, Sequence[TurnResult]], name: str) -> dict[str, Any]:
    """First turns and decoding of a server against ``recompute``, turn by turn: over 1 is slower.

    Nothing is found in a first turn, and no token after the first depends on how the prompt was computed:
    this is what krul costs where it cannot help. Empty for ``recompute``, or without it.
    """
    base = of_kind("recompute", name)
    if base not in turns or name == base:
        return {}
    pairs = list(zip(turns[base], turns[name], strict=True))
    first = [own.ttft_s / other.ttft_s for other, own in pairs if own.turn == 1]
    decoding = [own.tpot_s / other.tpot_s for other, own in pairs if own.tpot_s and other.tpot_s]
    found = {"first_turn_times_of_recompute": quantiles(first)}
    return {**found, "tpot_times_of_recompute": quantiles(decoding)} if decoding else found


def by_prompt_tokens(turns: Mapping[str, Sequence[TurnResult]], name: str) -> list[dict[str, Any]]:
    """Returning turns in groups of prompts that are at most twice as long as the shortest of their group.

    ``up_to`` tokens have the prompts of a group; ``restored``: the share of its turns of which something came
    from the host.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for index, turn in enumerate(turns[name]):
        if turn.turn > 1:
            groups[1 << (turn.prompt_tokens - 1).bit_length()].append(index)
    found = []
    for up_to, members in sorted(groups.items()):
        of_group = {server: [each[index] for index in members] for server, each in turns.items()}
        found.append(
            {
                "up_to": up_to,
                "turns": len(members),
                "restored": sum(turn.host_tokens > 0 for turn in of_group[name]) / len(members),
                **ratios({server: [turn.ttft_s for turn in each] for server, each in of_group.items()}, name),
            }
        )
    return found


def hit_rate_by_tier(turns: Sequence[TurnResult], hit_pages: Mapping[str, int]) -> dict[str, float]:
    """Share of the prompts' tokens that each tier had.

    A client sees what came from the device, and what from the host; ``hit_pages`` of krul's own counters say
    in which proportion the latter came from which of its tiers.
    """
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    host = sum(turn.host_tokens for turn in turns) / prompt_tokens
    num_pages = sum(hit_pages.values())
    return {
        "device": sum(turn.device_tokens for turn in turns) / prompt_tokens,
        **{tier: host * pages / num_pages for tier, pages in hit_pages.items() if num_pages},
    }


def theoretical_hit_rate(
    conversations: Sequence[Conversation],
    answered: Mapping[tuple[str, int], TurnResult],
    encode: EncodeMessages,
    *,
    page_size: int,
) -> float:
    """Share of the returning turns' prompt tokens that a cache without bounds has, in whole pages.

    Such a cache holds every earlier prompt and the answer to it; of a prompt one token is always computed.
    ``answered``: the reference's turns by conversation and turn.
    """
    seen: set[int] = set()
    found = total = 0
    for conversation, turn in play_order(conversations):
        name = conversation.conversation_id
        answers = {number: answered[name, number].answer for number in range(1, turn + 1)}
        messages = conversation.messages(turn, answers)
        prompt = encode(messages)
        if turn > 1:
            known = 0
            for number, page in enumerate(_page_keys(prompt[:-1], page_size), start=1):
                if page not in seen:
                    break
                known = number * page_size
            found += known
            total += len(prompt)
        # The KV of the last token of an answer is never computed.
        computed = len(prompt) + answered[name, turn].completion_tokens - 1
        whole = encode([*messages, {"role": "assistant", "content": answers[turn]}])
        seen.update(_page_keys(whole[:computed], page_size))
    return found / total


def _page_keys(token_ids: Sequence[int], page_size: int) -> list[int]:
    """Of each whole page a number that stands for its tokens and all before them."""
    keys: list[int] = []
    for end in range(page_size, len(token_ids) + 1, page_size):
        keys.append(hash((keys[-1] if keys else 0, tuple(token_ids[end - page_size : end]))))
    return keys


def _returning(turns: Sequence[TurnResult]) -> list[float]:
    return [turn.ttft_s for turn in turns if turn.turn > 1]


def summarize(result: Result) -> dict[str, Any]:
    """What is kept of a run's ``result``: no single turns or commands, and quantiles instead of samples."""
    kept = {name: value for name, value in result.items() if name not in ("turns", "krul")}
    kept["servers"] = [
        {name: value for name, value in server.items() if name != "command"}
        for server in result.get("servers", ())
    ]
    summary: dict[str, Any] = without_samples(kept)
    return summary
