"""The command line of the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from krul_backend.errors import ConfigError
from krul_backend.one_line_errors import EXIT_FAILED, OneLineErrors
from krul_sglang.cli.arguments import Options, check_drawable, check_writable, parse_options, tell
from krul_sglang.models.find import BUNDLED, REFERENCE_MODEL, SMOLLM2, ModelError, find_model

BUNDLED_CONVERSATIONS = Path(__file__).with_name("conversations.json")
CHATS = REFERENCE_MODEL.with_name("chats.json")

app = typer.Typer(name="demo", cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def demo(
    model_path: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint directory or hub name; 'bundled' is a model of 6 million parameters with "
            "conversations of its own, done in less time.",
            show_default="SmolLM2-135M-Instruct",
        ),
    ] = None,
    conversations: Annotated[
        Path | None,
        typer.Option(
            help="ShareGPT or OpenAI style JSON or JSONL; a user turn may carry 'expected', a string that a "
            "right answer contains.",
            show_default="chats, or those of the bundled model",
        ),
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="Cut each conversation to its first N turns.", min=1)
    ] = None,
    num_conversations: Annotated[
        int | None, typer.Option(help="Take the first N conversations.", min=1)
    ] = None,
    device_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in the small device pool.",
            show_default="1.25 x the longest conversation, plus a margin",
            min=1,
        ),
    ] = None,
    host_memory: Annotated[
        str, typer.Option(help="Host memory for krul, such as 512MiB or 8GiB.")
    ] = "512MiB",
    option: Options = None,
    page_size: Annotated[int, typer.Option(help="Tokens per page of the KV cache.", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 24,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="SGLang's --dtype.", show_default="float32 without a GPU, the model's own with one"
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write a summary of the result to FILE.")
    ] = None,
    raw_file: Annotated[
        Path | None, typer.Option("--raw", metavar="FILE", help="Write every turn that was measured to FILE.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw the times to FILE.png; needs matplotlib.")
    ] = None,
    server_arg: Annotated[
        list[str] | None,
        typer.Option(help="Pass one more argument to all three servers, as --server-arg=--tp=2. Repeatable."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the servers' logs.")] = False,
) -> None:
    """Play conversations against SGLang without and with krul, and compare answers and time to first token.

    Three servers run at once and share the machine's memory: 'device' has a device pool that holds
    everything, 'recompute' a small one, and 'krul' the same small one and krul. Each turn is asked of all
    three, one after the other. Turn 1 of every conversation comes first, then turn 2 of every conversation,
    and so on, so that between two turns of a conversation the others push it out of a small pool.

    Exit status: 0 if krul restored at least one turn and every answer is that of 'device', else 1. Where
    KV is compressed, or numbers have 16 bits, answers may differ: recall must be that of 'recompute' then,
    up to 2 points less, for conversations that expect something.
    """
    options = parse_options(option or [])

    from krul_sglang.config import KrulConfig

    KrulConfig.from_mapping({"host_memory": host_memory}, "--host-memory")
    KrulConfig.from_mapping(options, "--option")
    check_writable("--json", json_file)
    check_writable("--raw", raw_file)
    check_drawable("--figure", figure)
    if conversations is None:
        conversations = BUNDLED_CONVERSATIONS if model_path == BUNDLED else CHATS

    from demo.conversations import load_conversations
    from demo.sizing import load_token_encoder, plan_pools

    try:
        model = find_model(SMOLLM2 if model_path is None else model_path, tell, option="--model-path")
    except ModelError as error:
        without = f"; --model-path {BUNDLED} needs no network" if REFERENCE_MODEL.exists() else ""
        raise ConfigError(f"{error}{without}") from error
    loaded = load_conversations(conversations)
    chosen = loaded.select(num_conversations=num_conversations, turns=turns)
    encode, context_length = load_token_encoder(model)
    pools = plan_pools(
        chosen,
        lambda messages: len(encode(messages)),
        max_tokens=max_tokens,
        page_size=page_size,
        device_tokens=device_tokens,
        context_length=context_length,
    )

    from rich.console import Console

    from demo.report import draw_demo, make_reporter, print_result
    from demo.run import DemoConfig, default_dtype, run_demo
    from demo.summary import write_result
    from krul_backend.strategy import SUBSPACE

    config = DemoConfig(
        model_path=model,
        conversations_path=str(conversations),
        max_tokens=max_tokens,
        page_size=page_size,
        host_memory=host_memory.strip(),
        krul_options=options,
        dtype=default_dtype() if dtype is None else dtype,
        server_args=tuple(server_arg or ()),
    )
    num_turns = sum(len(conversation.turns) for conversation in chosen)
    console = Console()
    notes = [
        f"{len(chosen)} conversations, {num_turns} turns, up to {pools.total_tokens} tokens "
        f"(the longest: {pools.longest_tokens}); device pool: {pools.device_tokens} tokens "
        f"(server 'device': {pools.reference_tokens}); dtype {config.dtype}"
    ]
    if num_conversations is not None and len(chosen) < num_conversations:
        notes.append(f"{conversations} has only {len(chosen)} usable conversations: all are taken")
    if loaded.num_skipped:
        notes.append(f"{loaded.num_skipped} entries without a user turn were left out")
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if options.get("strategy") == SUBSPACE:
        from krul_sglang.learning.command import ensure_bases
        from krul_sglang.models.checkpoint import Checkpoint

        cache_dir = KrulConfig.load(options).cache_dir
        ensure_bases(Checkpoint(model), Path(cache_dir).expanduser(), tell)
    with make_reporter(console, num_turns) as reporter:
        result = run_demo(config, pools, chosen, reporter, verbose=verbose)
    print_result(console, result)
    kept = result.to_json()
    write_result({**kept, "turns": result.turns_to_json()}, kept, json=json_file, raw=raw_file)
    if figure is not None:
        draw_demo(kept, figure)
    raise typer.Exit(0 if result.summary.passed else EXIT_FAILED)
