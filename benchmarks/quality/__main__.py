"""``python -m benchmarks.quality --json FILE``: quality against bytes, for many ways to store a history."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import runner
from benchmarks.quality.agent import Part
from benchmarks.quality.configuration import Configuration, Suite, Turns
from benchmarks.quality.conversation import BenchmarkError
from benchmarks.quality.methods import Method, all_methods, subspace_methods
from benchmarks.quality.model import HistoryModel, load_model
from benchmarks.quality.protocol import PAGE_SIZE, Played, Protocol
from benchmarks.quality.published import published_methods
from benchmarks.quality.result import quality_table, row, summarize
from benchmarks.runner import Result
from benchmarks.variants import make_variant
from demo.environment import git_revision
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_sglang.learning.bases import LearningPlan, learn_bases
from krul_sglang.learning.model_kv import rotary_table
from krul_sglang.learning.reader import TextReader
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)

_LEARNING_PIECES = 24


def run(configuration: Configuration) -> dict[str, Any]:
    """Plays every conversation with every row.

    Raises:
        KrulError: a configuration, a variant or data that cannot be used.
    """
    torch.set_num_threads(configuration.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(configuration.model)
    model = _model(configuration)
    rotary = rotary_table(model.model, model.model.config.max_position_embeddings)
    codec = ModelCodecs(model.shape, model.num_layers, rotary)
    reader = TextReader(model.model)
    pieces = cache(partial(_pieces, configuration, tokenizer))
    bases = (
        learn_bases(reader, pieces())[0]
        if configuration.bases is None
        else ModelBases.load(configuration.bases)
    )
    methods = configuration.selected(
        [
            *all_methods(codec, configuration.gamma),
            *subspace_methods(SubspaceCodec(bases, rotary), codec),
            *published_methods(
                model.num_layers,
                rotary,
                lambda: [history.layers for history in reader.read_histories(pieces())],
                configuration.wants,
            ),
        ]
    )
    protocol = Protocol(model, configuration.rows_per_turn)
    conversations = list(configuration.conversations(tokenizer))
    played: list[Played] = []
    for number, conversation in enumerate(conversations, start=1):
        if configuration.turns is Turns.ONCE:
            played.append(protocol.at_once(conversation, methods))
        else:
            storing = [method for method in methods if isinstance(method, Method)]
            played.append(protocol.turn_by_turn(conversation, storing))
        logger.info("%d of %d conversations", number, len(conversations))
    uncompressed = [each.uncompressed for each in played]
    return {
        "configuration": configuration.to_json(),
        "model": {
            "num_layers": model.num_layers,
            "pool_bytes_per_token": protocol.full_bytes(1),
            "page_size": PAGE_SIZE,
            "ranks": [group.rank for group in bases.groups],
            "damage_factor": bases.damage_factor,
        },
        "conversations": [
            {
                "group": each.group,
                "history_tokens": each.history_tokens,
                "num_tokens": len(each.history),
                "turns": len(each.turn_ends),
            }
            for each in conversations
        ],
        "rows": [
            row(
                method,
                conversations,
                [each.outcomes[method.name] for each in played],
                uncompressed,
                protocol.full_bytes(1),
            )
            for method in methods
        ],
    }


def check_final(json: Path | None) -> None:
    """What is reported is not looked at while a design is chosen: only a committed design may open it, and
    its result is kept.

    Raises:
        BenchmarkError: there is no file for the result, or the checkout has changes that are not committed.
    """
    revision = git_revision()
    if json is None or revision is None or revision.endswith("-dirty"):
        raise BenchmarkError(
            "--part report is for final results: it needs --json FILE and a checkout without changes"
        )


def _pieces(configuration: Configuration, tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids to learn from: of the suite's text that is not scored."""
    text_tokens = LearningPlan().text_tokens
    pieces: list[tuple[int, ...]] = []
    for conversation in configuration.learning_conversations(tokenizer):
        ids = conversation.history
        pieces += [
            ids[start : start + text_tokens] for start in range(0, len(ids) - text_tokens + 1, text_tokens)
        ]
    num_used = min(len(pieces), _LEARNING_PIECES)
    return [pieces[index * len(pieces) // num_used] for index in range(num_used)]


def _model(configuration: Configuration) -> HistoryModel:
    dtype = getattr(torch, configuration.dtype)
    model = load_model(configuration.model, dtype, configuration.device)
    if configuration.variant is not None:
        model = make_variant(model, configuration.variant)
    return HistoryModel(model)


_DEFAULTS = Configuration()


def main() -> int:
    given = _parser().parse_args()

    def measure() -> Result:
        options = {option.name: getattr(given, option.name) for option in fields(Configuration)}
        for name in ("methods", "lengths", "learn_from"):
            options[name] = tuple(options[name] or getattr(_DEFAULTS, name))
        if given.part is Part.REPORT:
            check_final(given.json)
        options["model"] = Path(find_model(given.model, logger.info, option="--model"))
        return run(Configuration(**options))

    return runner.run(given, measure, quality_table, summarize)


def _parser() -> argparse.ArgumentParser:
    """A parser whose destinations are the fields of ``Configuration``."""
    parser = runner.make_parser("quality", __doc__, model="bundled", dtype=_DEFAULTS.dtype)

    def add(option: str, text: str, *, to: str | None = None, **how: Any) -> None:
        name = option.removeprefix("--").replace("-", "_") if to is None else to
        default = None if how.get("action") == "append" else getattr(_DEFAULTS, name)
        parser.add_argument(option, dest=name, default=default, help=text, **how)

    add("--suite", "what is asked after the history", type=Suite, choices=list(Suite))
    turns = "once: history on exact KV; each: every turn on restored history"
    add("--turns", turns, type=Turns, choices=list(Turns))
    add("--items", "conversations per group and length; default: the suite's", type=int)
    add("--methods", "only rows whose name matches this shell pattern; repeatable", action="append")
    add("--variant", "control made of the model: depth-doubled or rotated:ANGLE")
    add("--data", "folder of agents' sessions", type=Path)
    length = "tokens of an agent's history; repeatable"
    add("--length", length, to="lengths", type=int, action="append")
    part = "sessions of --data that are scored: choose (design by these), or report (final results)"
    add("--part", part, type=Part, choices=[Part.CHOOSE, Part.REPORT])
    add("--learn-from", "only learn from this folder of the data; repeatable", action="append")
    add("--bases", "file of `krul-sglang learn`; default: learned from unscored text", type=Path)
    add("--gamma", "I-R threshold of Algorithm 1; 0 leaves no layer out", type=float)
    add("--rows-per-turn", "tokens of each turn at which attention is sampled", type=int)
    add("--device", "torch device")
    add("--threads", "threads of torch", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
