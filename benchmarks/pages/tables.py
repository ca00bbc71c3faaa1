"""Tables in Markdown, one from each result file of the benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.pages import RESULTS, source, table
from benchmarks.pages.serving import serving_tables
from krul_sglang.demo.report import ratio_text

DEMO_RESULT = RESULTS / "demo-cpu.json"
DEMO_FIGURE = "docs/figures/demo.png"
QUALITY_RESULTS = (
    RESULTS / "quality-agent-cpu.json",
    RESULTS / "quality-recall-cpu.json",
    RESULTS / "quality-bundled-cpu.json",
)
"""Those that were measured are shown."""
CODEC_RESULT = RESULTS / "codec-cpu.json"
TIERS_RESULT = RESULTS / "tiers-cpu.json"


def demo_table(result: dict[str, Any]) -> str:
    """The demo's figure and its comparison: what a turn costs with krul, without it, and as a device hit."""
    figure = f"![Time to first token by turn: recomputed, with krul, and never evicted]({DEMO_FIGURE})"
    heads = "turn", "prompt", "from krul", "recompute", "krul", "device hit", "times sooner with krul"
    rows = [
        (
            "2 and later" if each["turn"] is None else each["turn"],
            f"{each['prompt_tokens'] / each['num_turns']:.0f} tokens",
            f"{each['restored_tokens'] / each['prompt_tokens']:.0%}",
            *(_ms(each["ttft_s"][server]["median"]) for server in ("recompute", "krul", "device")),
            ratio_text(each["speedup"]),
        )
        for each in result["rounds"]
    ]
    return f"{figure}\n\n{table(heads, rows)}\n\n{_demo_notes(result)}"


def _demo_notes(result: dict[str, Any]) -> str:
    summary, machine, last = result["summary"], result["machine"], result["rounds"][-1]
    configuration, tpot_s, same = result["configuration"], summary["tpot_s"], summary["same_answers"]
    return " ".join(
        (
            f"Median time to the first token over {result['rounds'][0]['num_turns']} conversations, asked",
            "in turn; prompt: mean; times sooner: recompute / krul, with quartiles.",
            f"Answers equal to those of a server that never evicts: {same['krul']} of {summary['answers']}.",
            f"Each further token: {_ms(tpot_s['krul']['median'])} with krul,",
            f"{_ms(tpot_s['recompute']['median'])} without.",
            f"Kept on the host: {last['stored']['num_bytes'] / 2**20:.0f} MiB for",
            f"{last['stored']['num_tokens']} tokens (nothing compressed).",
            f"Machine: {machine['cpu']}, {machine['cores']} cores, no GPU;",
            f"{Path(configuration['model_path']).name} in {configuration['dtype']};",
            f"SGLang {result['versions']['sglang']}. {source(DEMO_RESULT)}",
        )
    )


def quality_tables(results: dict[Path, dict[str, Any]]) -> str:
    """Loss against compression, a table for each model and suite."""
    return "\n\n".join(quality_table(path, result) for path, result in results.items())


def quality_table(path: Path, result: dict[str, Any]) -> str:
    """Every row of one result: bits, ratio, and what it changes against full KV, with 95% intervals."""
    has_recall = "recall" in result["rows"][0]
    recall_heads = ["recall", "change in points", "lost / won"] if has_recall else []
    heads = [
        "stored as",
        "bits",
        "ratio to bf16",
        "KL",
        "95% KL",
        "NLL change",
        "same top token",
        *recall_heads,
    ]
    rows = []
    for row in result["rows"]:
        cells = [
            row["name"],
            f"{row['bits']:.2f}",
            f"{row['ratio']:.2f}x",
            _with_interval(f"{row['kl']:.4f}", row["ci"]["kl"], ".4f"),
            f"{row['kl_p95']:.4f}",
            _with_interval(f"{row['nll_delta']:+.4f}", row["ci"]["nll_delta"], "+.4f"),
            f"{row['top1']:.1%}",
        ]
        if has_recall:
            points = [100 * end for end in row["ci"]["recall_delta"] or ()]
            cells += [
                f"{row['recall']:.1%}",
                _with_interval(f"{100 * row['recall_delta']:+.1f}", points, "+.1f"),
                f"{row['answers_lost']} / {row['answers_won']}",
            ]
        rows.append(cells)
    configuration = result["configuration"]
    lengths = sorted({each["history_tokens"] for each in result["conversations"]})
    questions = f", {result['rows'][0]['questions']} questions" if has_recall else ""
    suite = f"suite {configuration['suite']}, turns {configuration['turns']}"
    notes = (
        f"{Path(configuration['model']).name}, {suite}: {_count(result)} conversations of "
        f"about {' and '.join(map(str, lengths))} tokens{questions}. In brackets: 95% intervals, paired with "
        f"full KV, conversations drawn anew. {source(path)}"
    )
    return f"{table(heads, rows)}\n\n{notes}"


def _with_interval(text: str, ends: Sequence[float] | None, form: str) -> str:
    return f"{text} ({' to '.join(format(end, form) for end in ends)})" if ends else text


def _count(result: dict[str, Any]) -> int:
    return sum(each["count"] for each in result["conversations"])


def codec_table(result: dict[str, Any]) -> str:
    """How fast one core encodes and decodes."""
    heads = "limit in nats", "coder", "ratio to bf16", "encode", "decode"
    rows = [
        (
            *(row["limit"], row["coder"], f"{row['ratio']:.1f}x"),
            *(f"{row[name]:.0f} MB/s" for name in ("encode_mbs", "decode_mbs")),
        )
        for row in result["rows"]
    ]
    notes = (
        f"SmolLM2, {result['rows'][0]['num_tokens']} tokens of text; MB of bf16 KV per second of one thread, "
        f"medians of {result['repeats']}. {result['machine']['cpu']}. {source(CODEC_RESULT)}"
    )
    return f"{table(heads, rows, left=(1,))}\n\n{notes}"


_LEFT_OF_TIERS = ("lookup", "index-lookup", "ssd-metadata", "fragmentation")
"""Rows of the tiers that are lines of text, not of the table of bytes."""


def tiers_table(result: dict[str, Any]) -> str:
    """Bytes of each tier against memcpy and the bare disk, then the targets."""
    rows = [row for row in result["rows"] if "left_out" not in row]
    operations = table(
        ("operation", "block", "blocks", "GB/s", "memcpy GB/s", "bare disk GB/s", "ratio", "p50", "p99"),
        (_tiers_cells(row) for row in rows if row["op"] not in _LEFT_OF_TIERS),
    )
    targets = table(
        ("target (worst case)", "bound", "measured", "met"),
        (
            (each["name"], f"{each['bound']:g}", f"{each['value']:.3g}", "yes" if each["is_met"] else "no")
            for each in result["targets"]
        ),
    )
    return f"{operations}\n\n{targets}\n\n{_tiers_notes(result, rows)}"


def _tiers_cells(row: dict[str, Any]) -> tuple[str, ...]:
    size = row["size_bytes"]
    block = f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"
    disk = f"{row['disk_gbs']:.2f}" if "disk_gbs" in row else "-"
    rates = f"{row['throughput_gbs']:.2f}", f"{row['memcpy_gbs']:.2f}", disk, f"{row['ratio']:.0%}"
    return row["op"], block, str(row["num_blocks"]), *rates, _us(row["p50_us"]), _us(row["p99_us"])


def _tiers_notes(result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    notes = [
        *(
            f"Missed: {target['name']}: {target['value']:.2f}, the aim being {target['bound']:g}."
            for target in result["targets"]
            if not target["is_met"]
        ),
        "Medians; operations in turn with memcpy of the same blocks, one thread, memory touched before.",
        "ratio: to memcpy, or to O_DIRECT of the same bytes where there is a disk.",
        "dram: through a daemon process, round trips included; verify-read compares checksums, as an engine.",
    ]
    for row in rows:
        if row["op"] == "lookup":
            notes.append(
                f"lookup of {row['num_pages']} pages: {_us(row['p50_us'])} (p99 {_us(row['p99_us'])})."
            )
        elif row["op"] == "index-lookup":
            notes.append(
                f"{row['num_pages']} pages among {row['num_segments']} segments, without the socket: "
                f"{_us(row['p50_us'])} (p99 {_us(row['p99_us'])})."
            )
        elif row["op"] == "ssd-metadata":
            notes.append(f"Metadata on disk at 1/{row['ratio_to_bf16']} of bf16: {row['share']:.2%}.")
        elif row["op"] == "fragmentation":
            notes.append(
                f"A full arena under churn has {row['free_share_mean']:.1%} free that the next segment did "
                f"not fit into (p99 {row['free_share_p99']:.1%})."
            )
    notes += [f"{row['op']}: {row['left_out']}." for row in result["rows"] if "left_out" in row]
    notes.append(f"Machine: {result['machine']['cores']} cores. {source(TIERS_RESULT)}")
    return " ".join(notes)


def _us(microseconds: float) -> str:
    return f"{microseconds / 1000:.1f} ms" if microseconds >= 1000 else f"{microseconds:.0f} us"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def tables() -> dict[str, str]:
    """The tables of the kept results, by the names of their places."""
    quality = {path: orjson.loads(path.read_bytes()) for path in QUALITY_RESULTS if path.exists()}
    return {
        "demo": demo_table(orjson.loads(DEMO_RESULT.read_bytes())),
        **serving_tables(),
        "quality": quality_tables(quality),
        "codec": codec_table(orjson.loads(CODEC_RESULT.read_bytes())),
        "tiers": tiers_table(orjson.loads(TIERS_RESULT.read_bytes())),
    }
