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
from benchmarks.quality.damage import LearnedDamage
from benchmarks.quality.methods import SLERP, Compression, all_methods
from benchmarks.quality.model import HistoryModel, load_model
from benchmarks.quality.protocol import PAGE_SIZE, Outcome, Protocol
from benchmarks.quality.result import attention_summary, row
from benchmarks.quality.sharing import make_codec
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
    methods = configuration.selected(
        all_methods(
            model.shape.k_token_bytes + model.shape.v_token_bytes,
            configuration.gamma,
            configuration.split_layers(),
            [sharing.value for sharing in configuration.sharings()],
            configuration.limits,
        )
    )
    used = {SLERP} | {method.sharing for method in methods if isinstance(method, Compression)}
    codecs: dict[str, SegmentCodec] = {
        sharing.value: make_codec(model, sharing, configuration.probe_conversations(tokenizer))
        for sharing in configuration.sharings()
        if sharing.value in used
    }
    damage = LearnedDamage(
        model, codecs, configuration.sharings()[-1].value, PAGE_SIZE, configuration.rows_per_turn
    )
    if any(isinstance(method, Compression) and method.needs_damage for method in methods):
        damage.learn(configuration.probe_conversations(tokenizer), configuration.probes)
        logger.info("%d probes", damage.num_probes)
    protocol = Protocol(model, codecs, configuration.rows_per_turn, damage.measure)
    conversations = list(configuration.conversations(tokenizer))
    outcomes: dict[str, list[Outcome]] = {method.name: [] for method in methods}
    statistics = []
    for number, conversation in enumerate(conversations, start=1):
        if configuration.turns is Turns.ONCE:
            played = protocol.at_once(conversation, methods)
        else:
            compressions = [method for method in methods if isinstance(method, Compression)]
            played = protocol.turn_by_turn(conversation, compressions)
        statistics.append(played.statistics)
        for name, outcome in played.outcomes.items():
            outcomes[name].append(outcome)
        logger.info("%d of %d conversations", number, len(conversations))
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
        "probes": damage.num_probes,
        "attention": attention_summary(statistics),
        "rows": [
            row(method, conversations, outcomes[method.name], protocol.full_bytes) for method in methods
        ],
    }


def _model(configuration: Configuration) -> HistoryModel:
    dtype = getattr(torch, configuration.dtype)
    model = load_model(configuration.model, dtype, configuration.device)
    if configuration.variant is not None:
        model = make_variant(model, configuration.variant)
    return HistoryModel(model)
