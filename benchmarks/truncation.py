"""``python -m benchmarks.truncation --json FILE``: what truncated prompts lose, and gain, by KV that moves.

A client drops the oldest turns of a conversation. Its prompt is answered on KV that is computed of it alone
(*recompute*), on that of the turns it kept, turned to their new positions (*moved*), and on the same keys as
they were (*not turned*). Servers then answer truncated prompts with and without ``truncation_reuse``.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import typer
from rich.console import Console
from rich.logging import RichHandler
from transformers import AutoTokenizer

from benchmarks.quality.agent import agent_conversations
from benchmarks.quality.chat_recall import ChatRecall, chat_recall_conversations
from benchmarks.quality.conversation import Answer, Conversation
from benchmarks.quality.model import HistoryModel, concatenate, load_model, token_slice
from benchmarks.quality.result import interval
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.rotary import RotaryTable
from krul_sglang.demo.environment import about_run
from krul_sglang.demo.run import default_dtype
from krul_sglang.demo.server import ServerProcess, wait_for_saves
from krul_sglang.json_file import quantiles, write_result
from krul_sglang.learning.reader import rotary_table
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)

RECOMPUTED = (0, 32, 64, 128, 256)
"""So many of the first kept tokens are computed again. A server computes 128, and those before the first page
of the run that it finds: about 32 more."""

KEPT_SHARE = 0.5
"""Of the history, in whole turns; less if the turn at that place is long."""

PAGE_SIZE = 16
_HOST_MEMORY = "5GiB"
_SERVER_ARGS = ("--page-size", str(PAGE_SIZE), "--enable-cache-report")


@dataclass(frozen=True)
class Method:
    """How a truncated prompt gets its KV. ``recomputed``: see ``RECOMPUTED``; None computes all."""

    name: str
    recomputed: int | None = None
    turns_keys: bool = True


METHODS = (
    Method("recompute"),
    *(Method("moved", recomputed) for recomputed in RECOMPUTED),
    Method("not turned", 32, turns_keys=False),
)


@dataclass(frozen=True, eq=False)
class Truncated:
    """A conversation that keeps its first ``kept_first`` tokens, and those from token ``kept_from`` on.

    ``whole`` is all of it; ``conversation`` what is left, with what is asked after it.
    """

    whole: tuple[int, ...]
    conversation: Conversation
    kept_first: int
    kept_from: int

    def kv(self, method: Method, whole: Sequence[LayerKV], own: Sequence[LayerKV], table: RotaryTable) -> Any:
        """The KV on which ``method`` answers. ``whole`` is that of the whole conversation, ``own`` that of
        what is left of it, computed alone."""
        if method.recomputed is None:
            return own
        first = min(self.kept_first + method.recomputed, len(self.conversation.history))
        moved_from = self.kept_from + first - self.kept_first
        at, to = (
            torch.arange(moved_from, len(self.whole)),
            torch.arange(first, len(self.conversation.history)),
        )
        moved = token_slice(whole, moved_from, len(self.whole))
        if method.turns_keys:
            moved = tuple(LayerKV(table.move(kv.k, at, to).to(kv.k.dtype), kv.v) for kv in moved)
        return [concatenate(parts) for parts in zip(token_slice(own, 0, first), moved, strict=True)]


def truncated_chats(tokenizer: Any, num_items: int) -> Iterator[Truncated]:
    """Chats that tell facts; asked for are those that were told in the turns that are kept."""
    for chat in chat_recall_conversations(tokenizer, num_items):
        first, start = _system_tokens(chat), _kept_from(chat, 0)
        kept = chat.history[start:]
        questions = tuple(each for each in chat.questions if _tells(kept, (*each.prompt[1:], *each.answer)))
        shorter = replace(chat, history=(*chat.history[:first], *kept), questions=questions, turn_ends=())
        yield Truncated(chat.history, shorter, first, start)


def joined_chats(tokenizer: Any, num_items: int) -> Iterator[Truncated]:
    """Pairs of chats as one, of which the second is kept: twice as long as those of ``truncated_chats``."""
    chats = list(chat_recall_conversations(tokenizer, 2 * num_items))
    for dropped, kept in zip(chats[::2], chats[1::2], strict=True):
        first = _system_tokens(kept)
        yield Truncated((*dropped.history, *kept.history[first:]), kept, first, len(dropped.history))


def _system_tokens(chat: ChatRecall) -> int:
    """Tokens of the system message: it ends where the user's first message begins, as each turn does."""
    turn_begin = chat.history[chat.turn_ends[0]]
    return [place for place, token in enumerate(chat.history) if token == turn_begin][1]


def truncated_sessions(tokenizer: Any, data: Path, num_items: int, length: int) -> Iterator[Truncated]:
    """Sessions of agents that keep their first turn, the task, and the latest ones."""
    for session in agent_conversations(tokenizer, data, num_items, (length,)):
        if len(session.turn_ends) < 3:
            continue
        first = session.turn_ends[0]
        start = _kept_from(session, first)
        shorter = replace(session, history=(*session.history[:first], *session.history[start:]), turn_ends=())
        yield Truncated(session.history, shorter, first, start)


def _kept_from(conversation: Conversation, first: int) -> int:
    """The turn that begins nearest to the place from which on ``KEPT_SHARE`` of the history is kept."""
    wanted = (1 - KEPT_SHARE) * len(conversation.history)
    return min((end for end in conversation.turn_ends[:-1] if end > first), key=lambda end: abs(end - wanted))


def _tells(tokens: Sequence[int], fact: Sequence[int]) -> bool:
    return any(tuple(tokens[place : place + len(fact)]) == tuple(fact) for place in range(len(tokens)))


def quality_rows(
    suite: str, model: HistoryModel, table: RotaryTable, items: Iterator[Truncated]
) -> list[dict[str, Any]]:
    """A row for each method: means over all conversations, and differences from recompute with their 95%
    intervals."""
    outcomes: dict[Method, list[dict[str, float]]] = {method: [] for method in METHODS}
    sources: list[str] = []
    lengths: list[tuple[int, int]] = []
    num_questions = 0
    for number, item in enumerate(items):
        whole = model.run(item.whole, (), num_logits=1).kv
        own = model.run(item.conversation.history, (), num_logits=1).kv
        sources.append(item.conversation.source or str(number))
        lengths.append((len(item.whole), len(item.conversation.history)))
        if isinstance(item.conversation, ChatRecall):
            num_questions += len(item.conversation.questions)
        true: Answer | None = None
        for method in METHODS:
            answer = item.conversation.answer(model, item.kv(method, whole, own, table))
            true = answer if true is None else true
            measured = item.conversation.measure(answer, true)
            outcomes[method].append({name: float(values.mean()) for name, values in measured.items()})
        logger.info("%s: conversation %d", suite, number + 1)
    return [
        {
            "suite": suite,
            "method": method.name,
            "recomputed_tokens": method.recomputed,
            "conversations": len(sources),
            "questions": num_questions or None,
            "whole_tokens": statistics.mean(whole for whole, _ in lengths),
            "kept_tokens": statistics.mean(kept for _, kept in lengths),
            **_means(outcomes[method], outcomes[METHODS[0]], sources),
        }
        for method in METHODS
    ]


def _means(
    values: Sequence[dict[str, float]], true: Sequence[dict[str, float]], sources: Sequence[str]
) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in ("recall", "nll", "kl", "top1"):
        if name not in values[0]:
            continue
        columns[name] = statistics.mean(each[name] for each in values)
        if name in ("recall", "nll"):
            deltas = [each[name] - before[name] for each, before in zip(values, true, strict=True)]
            columns[f"{name}_delta"] = statistics.mean(deltas)
            columns[f"{name}_delta_ci"] = interval(deltas, sources)
    return columns


def serve(model_path: str, tokenizer: Any, num_conversations: int) -> list[dict[str, Any]]:
    """Rows of servers: the time to the first token of truncated prompts, each server asked in turns."""
    chats = list(joined_chats(tokenizer, num_conversations))
    longest = max(len(chat.whole) for chat in chats)
    pool = (longest + 256) // PAGE_SIZE * PAGE_SIZE
    shared = (*_SERVER_ARGS, "--dtype", default_dtype(), "--max-total-tokens", str(pool))
    options = {"host_memory": _HOST_MEMORY, "strategy": "none", "truncation_reuse": True}
    krul = ("--radix-cache-backend", "krul", "--unified-cache-external-linker-config")
    commands = {
        "recompute": shared,
        "native": (*shared, *krul, orjson.dumps(options).decode()),
        "compressed": (*shared, *krul, orjson.dumps({**options, "strategy": "subspace"}).decode()),
    }
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for name, args in commands.items():
            logger.info("%s: starts", name)
            servers[name] = stack.enter_context(ServerProcess(model_path, args=args, ready_timeout_s=600))
        answers: dict[str, list[tuple[float, int]]] = {name: [] for name in servers}
        for chat in chats:
            for server in servers.values():
                _ask(server, chat.whole)
                wait_for_saves(server, timeout_s=120)
        for number, chat in enumerate(chats):
            assert isinstance(chat.conversation, ChatRecall)
            prompt = (*chat.conversation.history, *chat.conversation.opening)
            names = list(servers)
            for place in range(len(names)):
                name = names[(number + place) % len(names)]
                answers[name].append(_ask(servers[name], prompt))
                wait_for_saves(servers[name], timeout_s=120)
                logger.info(
                    "%s: %.0f ms, %d tokens moved", name, 1e3 * answers[name][-1][0], answers[name][-1][1]
                )
    return [
        {
            "server": name,
            "ttft_s": quantiles([ttft_s for ttft_s, _ in of_server]),
            "share_of_recompute": quantiles(
                [
                    ttft_s / whole_s
                    for (ttft_s, _), (whole_s, _) in zip(of_server, answers["recompute"], strict=True)
                ]
            ),
            "moved_tokens": statistics.mean(moved for _, moved in of_server),
            "prompt_tokens": statistics.mean(len(chat.conversation.history) for chat in chats),
        }
        for name, of_server in answers.items()
    ]


def _ask(server: ServerProcess, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds until the first token, which is the only one, and how many tokens of the prompt were moved."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    result = server.post_json("/generate", {"input_ids": [*prompt], "sampling_params": sampling})
    ttft_s = time.perf_counter() - began
    return ttft_s, (result["meta_info"].get("cached_tokens_details") or {}).get("moved", 0)


def main(
    json: Annotated[Path, typer.Option(help="File for the summary of the result.")],
    raw: Annotated[Path | None, typer.Option(help="File for the result with every number.")] = None,
    model: Annotated[str, typer.Option(help="A model's folder, or smollm2.")] = "smollm2",
    data: Annotated[Path | None, typer.Option(help="Folder of agents' sessions; without it none.")] = None,
    histories: Annotated[int, typer.Option(min=2, help="Chats that tell 60 facts each.")] = 30,
    sessions: Annotated[int, typer.Option(min=2, help="Agents' sessions of each kind.")] = 10,
    served: Annotated[
        int, typer.Option(min=0, help="Chats that servers answer, in place of what the model alone does.")
    ] = 0,
) -> None:
    """Measure what truncated prompts lose by KV that moves or, with --served, how much sooner they are
    answered."""
    console = Console(stderr=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console)])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    started = time.monotonic()
    path = find_model(model, logger.info, option="--model")
    tokenizer = AutoTokenizer.from_pretrained(path)
    result: dict[str, Any] = {
        **about_run(("torch", "sglang", "transformers")),
        "model": model,
    }
    if served:
        result["servers"] = serve(path, tokenizer, served)
    else:
        hugging_face = load_model(Path(path), torch.float32, "cpu")
        history_model, table = HistoryModel(hugging_face), rotary_table(hugging_face, 8192)
        with torch.no_grad():
            quality = quality_rows("recall", history_model, table, truncated_chats(tokenizer, histories))
            if data is not None:
                items = truncated_sessions(tokenizer, data, sessions, 2048)
                quality += quality_rows("agent", history_model, table, items)
        result["rows"] = quality
    result["duration_s"] = round(time.monotonic() - started, 1)
    write_result(result, result, json=json, raw=raw)
    logger.info("%s", _shown(result))


def _shown(result: dict[str, Any]) -> str:
    """The rows as text, one a line."""
    rows = result["rows"] if "rows" in result else result["servers"]
    return "\n".join(orjson.dumps(row).decode() for row in rows)


if __name__ == "__main__":
    typer.run(main)
