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

_DEFAULTS = Configuration()


def main(
    json: Annotated[Path, typer.Option(help="File for the summary of the result.")],
    raw: Annotated[Path | None, typer.Option(help="File for the result with every sample.")] = None,
    model: Annotated[Path, typer.Option(help="Folder of a Hugging Face model.")] = _DEFAULTS.model,
    suite: Annotated[Suite, typer.Option(help="What is asked after the history.")] = _DEFAULTS.suite,
    turns: Annotated[
        Turns, typer.Option(help="once: history on exact KV; each: every turn on restored history.")
    ] = _DEFAULTS.turns,
    items: Annotated[int, typer.Option(help="Conversations per group and length.", min=1)] = _DEFAULTS.items,
    methods: Annotated[
        list[str] | None, typer.Option(help="Only rows whose name matches this shell pattern; repeatable.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Control made of the model: depth-doubled or rotated:ANGLE.")
    ] = _DEFAULTS.variant,
    data: Annotated[
        Path | None, typer.Option(help="Folder of LongBench's <task>.jsonl files.")
    ] = _DEFAULTS.data,
    max_tokens: Annotated[
        int, typer.Option(help="LongBench prompts are cut to this in the middle.", min=256)
    ] = _DEFAULTS.max_tokens,
    gamma: Annotated[
        float, typer.Option(help="I-R threshold of Algorithm 1; 0 leaves no layer out.")
    ] = _DEFAULTS.gamma,
    rows_per_turn: Annotated[
        int, typer.Option(help="Tokens of each turn at which attention is sampled.", min=1)
    ] = _DEFAULTS.rows_per_turn,
    recall_layers: Annotated[
        str | None,
        typer.Option(help="Layers that carry the recall, as 9,10,11; default: those of the bundled model."),
    ] = None,
    probes: Annotated[
        int, typer.Option(help="Forwards that teach the budget rows what damage costs.", min=0)
    ] = _DEFAULTS.probes,
    limit: Annotated[
        list[float] | None, typer.Option(help="One more budget row, in nats; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="The model computes in it.")] = _DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="Torch device.")] = _DEFAULTS.device,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = _DEFAULTS.threads,
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        configuration = Configuration(
            model=model,
            suite=suite,
            turns=turns,
            items=items,
            methods=tuple(methods or _DEFAULTS.methods),
            variant=variant,
            data=data,
            max_tokens=max_tokens,
            gamma=gamma,
            rows_per_turn=rows_per_turn,
            recall_layers=None
            if recall_layers is None
            else tuple(int(layer) for layer in recall_layers.split(",") if layer),
            probes=probes,
            limits=tuple(limit or ()),
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
