"""``python -m benchmarks.quality --json FILE``: quality against bytes, for many ways to store a history."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.quality.configuration import Configuration, Suite, Turns
from benchmarks.quality.result import summarize
from benchmarks.quality.run import run
from krul_backend.errors import KrulError
from krul_sglang.json_file import write_result
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)

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
