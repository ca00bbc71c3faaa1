"""``python -m benchmarks.quality --json FILE``: quality against bytes, for many ways to store a history."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from benchmarks.quality.configuration import Configuration, Suite, Turns
from benchmarks.quality.methods import Method, all_methods, subspace_methods
from benchmarks.quality.model import HistoryModel, load_model
from benchmarks.quality.protocol import PAGE_SIZE, Played, Protocol
from benchmarks.quality.result import row, summarize
from benchmarks.variants import make_variant
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.errors import KrulError
from krul_sglang.demo.environment import about_run
from krul_sglang.json_file import write_result
from krul_sglang.learning.bases import LearningPlan, learn_bases
from krul_sglang.learning.reader import TextReader, rotary_table
from krul_sglang.models.find import find_model

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
    codec = ModelCodecs(model.shape, model.num_layers, rotary)
    bases = _bases(configuration, tokenizer, model)
    methods = configuration.selected(
        [*all_methods(codec, configuration.gamma), *subspace_methods(SubspaceCodec(bases, rotary))]
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
        **about_run(("torch", "sglang")),
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


_DEFAULTS = Configuration()


def main(
    json: Annotated[Path, typer.Option(help="File for the summary of the result.")],
    raw: Annotated[Path | None, typer.Option(help="File for the result with every sample.")] = None,
    model: Annotated[
        str, typer.Option(help="bundled, smollm2 or the folder of a Hugging Face model.")
    ] = "bundled",
    suite: Annotated[Suite, typer.Option(help="What is asked after the history.")] = _DEFAULTS.suite,
    turns: Annotated[
        Turns, typer.Option(help="once: history on exact KV; each: every turn on restored history.")
    ] = _DEFAULTS.turns,
    items: Annotated[
        int | None, typer.Option(help="Conversations per group and length; default: the suite's.", min=1)
    ] = _DEFAULTS.items,
    methods: Annotated[
        list[str] | None, typer.Option(help="Only rows whose name matches this shell pattern; repeatable.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Control made of the model: depth-doubled or rotated:ANGLE.")
    ] = _DEFAULTS.variant,
    data: Annotated[
        Path | None, typer.Option(help="Folder of LongBench's <task>.jsonl files, or of agents' sessions.")
    ] = _DEFAULTS.data,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of an agent's history; repeatable.", min=256)
    ] = None,
    learn_from: Annotated[
        list[str] | None, typer.Option(help="Only learn from this folder of the data; repeatable.")
    ] = None,
    bases: Annotated[
        Path | None, typer.Option(help="File of `krul-sglang learn`; default: learned from unscored text.")
    ] = _DEFAULTS.bases,
    max_tokens: Annotated[
        int, typer.Option(help="LongBench prompts are cut to this in the middle.", min=256)
    ] = _DEFAULTS.max_tokens,
    gamma: Annotated[
        float, typer.Option(help="I-R threshold of Algorithm 1; 0 leaves no layer out.")
    ] = _DEFAULTS.gamma,
    rows_per_turn: Annotated[
        int, typer.Option(help="Tokens of each turn at which attention is sampled.", min=1)
    ] = _DEFAULTS.rows_per_turn,
    dtype: Annotated[str, typer.Option(help="The model computes in it.")] = _DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="Torch device.")] = _DEFAULTS.device,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = _DEFAULTS.threads,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        configuration = Configuration(
            model=Path(find_model(model, logger.info, option="--model")),
            suite=suite,
            turns=turns,
            items=items,
            methods=tuple(methods or _DEFAULTS.methods),
            variant=variant,
            data=data,
            lengths=tuple(length or _DEFAULTS.lengths),
            learn_from=tuple(learn_from or ()),
            bases=bases,
            max_tokens=max_tokens,
            gamma=gamma,
            rows_per_turn=rows_per_turn,
            dtype=dtype,
            device=device,
            threads=threads,
        )
        result = run(configuration)
        write_result(result, summarize(result), json=json, raw=raw)
    except KrulError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
