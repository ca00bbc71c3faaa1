"""Runs one configuration and returns the result file's content."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.quality.configuration import Configuration, Turns
from benchmarks.quality.methods import Method, all_methods
from benchmarks.quality.model import HistoryModel, load_model
from benchmarks.quality.protocol import PAGE_SIZE, Played, Protocol
from benchmarks.quality.result import row
from benchmarks.quality.subspace import subspace_methods
from benchmarks.variants import make_variant
from krul_backend.codec.coefficients.coders import FixedWidthCoder, RansCoder
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_sglang.demo.environment import git_revision, machine, versions, without_cwd
from krul_sglang.learning.bases import LearningPlan, learn_bases
from krul_sglang.learning.reader import TextReader, rotary_table

logger = logging.getLogger(__name__)

_LEARNING_PIECES = 24


def run(configuration: Configuration) -> dict[str, Any]:
    """Plays every conversation with every row.

    Raises:
        KrulError: a configuration, a variant or data that cannot be used.
    """
    started = time.monotonic()
    torch.set_num_threads(configuration.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(configuration.model)
    model = _model(configuration)
    rotary = rotary_table(model.model, model.model.config.max_position_embeddings)
    codec = SegmentCodec(model.shape, model.num_layers, rotary)
    bases = _bases(configuration, tokenizer, model)
    coders = (RansCoder(), FixedWidthCoder())
    methods = configuration.selected(
        [*all_methods(codec, configuration.gamma), *subspace_methods(SubspaceCodec(bases, rotary, coders))]
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
        "git_revision": git_revision(),
        "versions": versions(),
        "machine": machine(),
        "command": without_cwd(shlex.join(sys.orig_argv)),
        "configuration": configuration.to_json(),
        "model": {
            "num_layers": model.num_layers,
            "pool_bytes_per_token": protocol.full_bytes(1),
            "page_size": PAGE_SIZE,
            "ranks": [group.rank for group in bases.groups],
            "damage_factor": bases.damage_factor,
        },
        "duration_s": round(time.monotonic() - started, 1),
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


def _bases(configuration: Configuration, tokenizer: Any, model: HistoryModel) -> ModelBases:
    """Those of a file, or learned from text of the suite that is not scored."""
    if configuration.bases is not None:
        return ModelBases.load(configuration.bases)
    plan = LearningPlan()
    pieces: list[tuple[int, ...]] = []
    for conversation in configuration.learning_conversations(tokenizer):
        ids = conversation.history
        pieces += [
            ids[start : start + plan.text_tokens]
            for start in range(0, len(ids) - plan.text_tokens + 1, plan.text_tokens)
        ]
    num_used = min(len(pieces), _LEARNING_PIECES)
    used = [pieces[index * len(pieces) // num_used] for index in range(num_used)]
    (bases,) = learn_bases(TextReader(model.model), used, plan)
    return bases


def _model(configuration: Configuration) -> HistoryModel:
    dtype = getattr(torch, configuration.dtype)
    model = load_model(configuration.model, dtype, configuration.device)
    if configuration.variant is not None:
        model = make_variant(model, configuration.variant)
    return HistoryModel(model)
