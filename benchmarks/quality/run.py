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
from benchmarks.variants import make_variant
from krul_backend.codec.segment_codec import SegmentCodec
from krul_sglang.demo.environment import git_revision, machine, versions, without_cwd

logger = logging.getLogger(__name__)


def run(configuration: Configuration) -> dict[str, Any]:
    """Plays every conversation with every row.

    Raises:
        KrulError: a configuration, a variant or data that cannot be used.
    """
    started = time.monotonic()
    torch.set_num_threads(configuration.threads)
    tokenizer: Any = AutoTokenizer.from_pretrained(configuration.model)
    model = _model(configuration)
    rotary = model.rotary_table(model.model.config.max_position_embeddings)
    codec = SegmentCodec(model.shape, model.num_layers, rotary)
    methods = configuration.selected(all_methods(codec, configuration.gamma))
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


def _model(configuration: Configuration) -> HistoryModel:
    dtype = getattr(torch, configuration.dtype)
    model = load_model(configuration.model, dtype, configuration.device)
    if configuration.variant is not None:
        model = make_variant(model, configuration.variant)
    return HistoryModel(model)
