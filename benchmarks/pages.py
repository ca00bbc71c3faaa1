"""``python -m benchmarks.pages``: brings every generated part of the documentation up to date.

Result files, ``KrulConfig`` and the table of settings enter; tables in the README, ``docs/measured.md``,
``docs/gpu.md``, ``docs/configuration.md`` and ``docs/support.md`` leave, and the figure of the demo. Tests
compare the pages with what would be written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from benchmarks import codec, multiturn, overlap, scale, stalls, support
from benchmarks.launches import __main__ as launches
from benchmarks.load import rows as load
from benchmarks.measured_code import remark
from benchmarks.quality import result as quality
from benchmarks.runner import Result
from benchmarks.serving import tables as serving
from benchmarks.simulate import timeline
from benchmarks.tables import RESULTS, ROOT, mib, model, ms, source, table
from benchmarks.tiers import __main__ as tiers
from demo.report import draw_demo, ratio_text
from krul_sglang.config import CONFIG_FILE_VARIABLE, DAEMON_MARK, ENV_PREFIX, FLAG, KrulConfig

README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured.md"
GPU = ROOT / "docs" / "gpu.md"
CONFIGURATION = ROOT / "docs" / "configuration.md"
ONLY_IN_README = ("load-summary", "overlap-summary")
TABLES_OF_README = ("demo", *ONLY_IN_README)
TABLES_OF_GPU = ("launches", "timeline")
SOURCE = re.compile(r"(Source: \[`([^`]+)`\]\([^)]+\))[^.]*\.")
DEMO_RESULT = RESULTS / "demo-cpu.json"
DEMO_FIGURE = "docs/figures/demo.png"

_CONFIGURATION_HEAD = f"""# Configuration

Written by `python -m benchmarks.pages` from `krul_sglang/config.py`; a test compares the two.

The defaults work. An option can be given in three places, and a later one wins:

1. a TOML file, named by the environment variable `{CONFIG_FILE_VARIABLE}`: `host_memory = "64GiB"`
2. an environment variable `{ENV_PREFIX}<OPTION>`: `{ENV_PREFIX}HOST_MEMORY=64GiB`
3. SGLang's own flag: `{FLAG} '{{"host_memory": "64GiB"}}'`

An unknown option or a bad value stops the server, with one line that says what is accepted.

{DAEMON_MARK} options belong to the daemon that the server starts. With `endpoint` the server joins a daemon
that runs already, and these options are refused: give them to `krul-backend serve` instead
([tiers.md](tiers.md)).
"""


def default_text(option: Field[Any]) -> str:
    """The default as a user would write it in JSON: ``"auto"``, ``"512MiB"``, ``0.25``, ``false``."""
    value = KrulConfig().as_dict()[option.name]
    if isinstance(value, int) and not isinstance(value, bool) and value and value % (1 << 20) == 0:
        value = f"{value >> 20}MiB"
    return orjson.dumps(value).decode()


def configuration_page() -> str:
    """The text of ``docs/configuration.md``: every option of ``KrulConfig``, its default and its meaning."""
    rows = [
        (
            *(f"`{option.name}`", f"`{default_text(option)}`"),
            *(option.metadata["accepted"], option.metadata["description"]),
        )
        for option in fields(KrulConfig)
    ]
    options = table(("option", "default", "accepted", "meaning"), rows, left=range(4))
    return f"{_CONFIGURATION_HEAD}\n{options}\n"


def demo_table(result: Result, path: Path) -> str:
    """The demo's figure and its comparison: what a turn costs with krul, without it, and as a device hit."""
    heads = "turn", "prompt", "from krul", "recompute", "krul", "device hit", "times sooner with krul"
    rows = [
        (
            "2 and later" if each["turn"] is None else each["turn"],
            f"{each['prompt_tokens'] / each['num_turns']:.0f} tokens",
            f"{each['restored_tokens'] / each['prompt_tokens']:.0%}",
            *(ms(each["ttft_s"][server]["median"]) for server in ("recompute", "krul", "device")),
            ratio_text(each["speedup"]),
        )
        for each in result["rounds"]
    ]
    summary, last, found = result["summary"], result["rounds"][-1], result["machine"]
    tpot_s, same = summary["tpot_s"], summary["same_answers"]
    notes = (
        f"Median time to the first token over {result['rounds'][0]['num_turns']} conversations, asked",
        "in turn; prompt: mean; times sooner: recompute / krul, with quartiles.",
        f"Answers equal to those of a server that never evicts: {same['krul']} of {summary['answers']}.",
        f"Each further token: {ms(tpot_s['krul']['median'])} with krul,",
        f"{ms(tpot_s['recompute']['median'])} without.",
        f"Kept on the host: {mib(last['stored']['num_bytes'])} for",
        f"{last['stored']['num_tokens']} tokens (nothing compressed).",
        f"Machine: {found['cpu']}, {found['cores']} cores, no GPU; {model(result)};",
        f"SGLang {result['versions']['sglang']}. {source(path)}",
    )
    figure = f"![Time to first token by turn: recomputed, with krul, and never evicted]({DEMO_FIGURE})"
    return f"{figure}\n\n{table(heads, rows)}\n\n{' '.join(notes)}"


_MULTITURN = partial(serving.rows_table, multiturn.COLUMNS)

TABLES: dict[str, tuple[Callable[[Result, Path], str], *tuple[str, ...]]] = {
    "demo": (demo_table, "demo-cpu.json"),
    "serving": (partial(serving.rows_table, serving.COLUMNS), "serving-cpu.json", "serving-3000-cpu.json"),
    "serving-modes": (
        partial(serving.rows_table, serving.COLUMNS),
        *(f"serving-{mode}-cpu.json" for mode in ("ngram", "latent", "hybrid", "windows")),
    ),
    "serving-lengths": (serving.lengths_table, "serving-lengths-cpu.json"),
    "serving-turns": (serving.turns_table, "serving-turns-cpu.json"),
    "load": (load.load_tables, "load-cpu.json"),
    "load-summary": (load.load_summary, "load-cpu.json"),
    "overlap": (overlap.overlap_tables, "overlap-cpu.json"),
    "overlap-ratios": (overlap.overlap_tables, "overlap-ratios-cpu.json"),
    "overlap-summary": (overlap.overlap_summary, "overlap-cpu.json"),
    "multiturn": (_MULTITURN, "multiturn-cpu.json"),
    "multiturn-hints": (_MULTITURN, "multiturn-hints-cpu.json"),
    "stalls": (stalls.stalls_table, "stalls-cpu.json"),
    "quality": (
        quality.quality_table,
        *(f"quality-{of}-cpu.json" for of in ("agent", "agent-2048", "texts", "recall", "late", "bundled")),
    ),
    "codec": (codec.codec_table, "codec-cpu.json"),
    "launches": (launches.launches_table, "launches.json"),
    "timeline": (timeline.timeline_table, "launches.json"),
    "tiers": (tiers.tiers_table, "tiers-cpu.json"),
    "scale": (scale.scale_table, "scale-cpu.json"),
}
"""What is written at each place of a page, and of which results in ``benchmarks/results``."""


def tables() -> dict[str, str]:
    """The tables of the kept results, by the names of their places."""
    return {
        place: "\n\n".join(
            show(orjson.loads((RESULTS / name).read_bytes()), RESULTS / name) for name in names
        )
        for place, (show, *names) in TABLES.items()
    }


def render(page: str, parts: Mapping[str, str]) -> str:
    """``page`` with each part between its ``<!-- NAME -->`` and ``<!-- /NAME -->``.

    Raises:
        ValueError: the page has no such place.
    """
    for name, part in parts.items():
        place = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", page, re.DOTALL)
        if place is None:
            raise ValueError(f"the page has no place <!-- {name} --> ... <!-- /{name} -->")
        page = f"{page[: place.start()]}{part}\n{page[place.end() :]}"
    return page


def with_remarks(page: str) -> str:
    """``page`` with a remark after each source of a table whose code has changed since."""
    return SOURCE.sub(
        lambda found: f"{found[1]}{remark(orjson.loads((RESULTS / found[2]).read_bytes()))}.", page
    )


def pages() -> dict[Path, str]:
    """Every page with generated parts, as it should be."""
    made = tables()
    of_readme = {name: made[name] for name in TABLES_OF_README}
    of_docs = {
        name: shown.replace("](benchmarks/", "](../benchmarks/")
        for name, shown in made.items()
        if name not in ONLY_IN_README
    }
    of_docs["demo"] = of_docs["demo"].replace("](docs/", "](")
    of_gpu = {name: of_docs.pop(name) for name in TABLES_OF_GPU}
    return {
        README: with_remarks(render(README.read_text(encoding="utf-8"), of_readme)),
        MEASURED: with_remarks(render(MEASURED.read_text(encoding="utf-8"), of_docs)),
        GPU: with_remarks(render(GPU.read_text(encoding="utf-8"), of_gpu)),
        CONFIGURATION: configuration_page(),
        support.PAGE: support.page(),
    }


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    draw_demo(orjson.loads(DEMO_RESULT.read_bytes()), ROOT / DEMO_FIGURE)


if __name__ == "__main__":
    main()
