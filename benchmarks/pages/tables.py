"""Tables in Markdown, one from each result file of the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.pages import RESULTS, source, table, truncation
from benchmarks.pages.serving import serving_tables
from benchmarks.restore.rows import Row, longest, settings
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
ESTIMATOR_RESULT = RESULTS / "estimator-cpu.json"
RESTORE_RESULT = RESULTS / "restore-cpu.json"
SEGMENTS_RESULT = RESULTS / "restore-segments-cpu.json"
TIERS_RESULT = RESULTS / "tiers-cpu.json"
POLICY_RESULT = RESULTS / "policy-cpu.json"


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


def estimator_table(result: dict[str, Any]) -> str:
    """How near each estimator comes to the exact one, and what it costs."""
    accuracy = table(
        ("estimator", "rank correlation of distances", "same pairs chosen"),
        (
            (row["estimator"], f"{row['spearman']['mean']:.3f}", f"{row['overlap']['mean']:.0%}")
            for row in result["summary"]["accuracy"]
        ),
    )
    cost = table(
        (
            *("tokens", "cost of a prompt: exact", "heterogeneous", "sampled"),
            *("of a decode step: exact", "heterogeneous", "sampled"),
        ),
        (
            (
                prefill["num_tokens"],
                *(f"{prefill['ratios_to_forward'][f'{name}_ratio']:.1%}" for name in _ESTIMATORS),
                *(f"{decode['tpot_ratio'][name]:.3f}x" for name in _ESTIMATORS),
            )
            for prefill, decode in zip(result["cost"]["prefill"], result["cost"]["decode"], strict=True)
        ),
        left=(),
    )
    configuration = result["configuration"]
    notes = (
        "Against every row of the conversation, over",
        f"{configuration['conversations']} held-out conversations of",
        f"{min(configuration['history_tokens'])} to {max(configuration['history_tokens'])} tokens;",
        "sampled-N keeps N rows. Cost: of the reduction against the forward itself, and of a decode step",
        f"with it against one without, medians of {configuration['repeats']} and more (sampled: what the",
        "engine's capture adds, against the same step);",
        f"{result['machine']['cores']} cores and no GPU. {source(ESTIMATOR_RESULT)}",
    )
    return f"{accuracy}\n\n{cost}\n\n{' '.join(notes)}"


_ESTIMATORS = ("exact", "heterogeneous", "sampled")


def restore_table(result: dict[str, Any]) -> str:
    """Time to the first token by method and tier, of the first shape at the longest history of each tier."""
    shape = result["rows"][0]["shape"]
    columns = {
        tier: longest(rows) for (name, tier), rows in settings(result["rows"]).items() if name == shape
    }
    heads = (f"{tier}, {rows[0]['history_tokens']} tokens" for tier, rows in columns.items())
    lines = []
    for cells in zip(*columns.values(), strict=True):
        texts = (_restore_cell(cell, rows[0]) for cell, rows in zip(cells, columns.values(), strict=True))
        lines.append((cells[0]["method"], *texts))
    return f"{table(('restored by', *heads), lines)}\n\n{_restore_notes(result, shape)}"


def _restore_cell(row: Row, recompute: Row) -> str:
    seconds = row["ttft_s"]["median"]
    if row["chosen"] == "recompute":
        return f"{_ms(seconds)}, recomputes"
    return f"{_ms(seconds)} ({recompute['ttft_s']['median'] / seconds:.2f}x), {_mib(row['bytes_stored'])}"


def _restore_notes(result: dict[str, Any], shape: str) -> str:
    configuration, rows = result["configuration"], result["rows"]
    model = next(model for model in result["models"] if model["name"] == shape)
    errors = [row["predicted_s"] / row["ttft_s"]["median"] for row in rows]
    return " ".join(
        (
            f"Medians of {configuration['repeats']} restores, methods in turn; in brackets the ratio to full",
            "recompute, then the bytes that have to be kept for it. A decoder of",
            f"{model['num_layers']} layers, hidden size {model['hidden_size']},",
            f"{model['num_kv_heads']} KV heads, random weights, {configuration['dtype']};",
            f"{configuration['new_tokens']} new tokens; one thread computes, one loads;",
            "bandwidths are limits set by the benchmark.",
            "krul: half of the layers in pairs that share directions; planned: heads of searched lengths;",
            "pyramid, partial-recompute: the paper's linear heads and one ratio for all layers.",
            "Each restore was checked against recomputing, or, where the codec loses something, against its",
            "own decoded tails; quality is measured above.",
            f"Predicted over measured time, all {len(rows)} rows: median {statistics.median(errors):.2f}.",
            f"Machine: {result['machine']['cores']} cores, no GPU, load average",
            f"{result['machine']['load_average_1min']} at the end. {source(RESTORE_RESULT)}",
        )
    )


_LEFT_OF_TIERS = ("lookup", "index-lookup", "ssd-metadata", "fragmentation")
"""Rows of the tiers that are lines of text, not of the table of bytes."""


def segments_table(result: dict[str, Any]) -> str:
    """The host's cost of a returning prefix by the number of segments that it was stored as."""
    heads = "shape", "tokens", "segments", "lookup", "open", "plan", "load", "its CPU time", "all", "ratio"
    rows = []
    whole: dict[tuple[str, int], float] = {}
    for row in result["rows"]:
        seconds = {step: of_step["median"] for step, of_step in row["seconds"].items()}
        first_s = whole.setdefault((row["shape"], row["tokens"]), seconds["total"])
        steps = (seconds[step] for step in ("lookup", "open", "plan", "load", "load_cpu", "total"))
        cells = (f"{1000 * step_s:.2f} ms" for step_s in steps)
        ratio = f"{seconds['total'] / first_s:.2f}"
        rows.append((row["shape"], row["tokens"], row["segments"], *cells, ratio))
    notes = (
        f"Medians of {result['configuration']['repeats']} restores of everything, numbers of segments in",
        "turn; every row that came back was compared. Pages of one token; a store in the same process.",
        f"Ratio: to the fewest segments. Machine: {result['machine']['cores']} cores, no GPU.",
        source(SEGMENTS_RESULT),
    )
    return f"{table(heads, rows)}\n\n{' '.join(notes)}"


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


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def policy_table(result: Mapping[str, Any]) -> str:
    """Hits and saved seconds by DRAM and by users, a column for each policy."""
    rows = result["rows"]
    names = list(dict.fromkeys(row["policy"] for row in rows))
    lines = []
    configuration = result["configuration"]
    for row in rows:
        if row["policy"] == names[0] and row["part"] != "queue":
            same = [each for each in rows if _setting(each) == _setting(row)]
            cells = [f"{each['hit_rate']:.1%}, {each['saved']:.1%}" for each in same]
            users = row.get("users", configuration["users"])
            lines.append((users, f"{row['share']:.0%}", *cells))
    cost = configuration["cost"]
    notes = (
        "Share of prompt tokens found in DRAM, then share of the seconds of computing that this saves.",
        f"{configuration['sessions']} sessions of coding agents, {configuration['requests']} requests;",
        f"a replay has {configuration['turns']} turns, or ten for each user.",
        "DRAM: of all that was ever asked for. Bytes per token differ between conversations by up to",
        f"{configuration['size_spread']:g} either way. Computing a token takes",
        f"{cost['token_s'] * 1e6:g} us, and",
        f"{cost['position_s'] * 1e9:g} ns more for each token before it. {source(POLICY_RESULT)}",
    )
    return f"{table(('users', 'DRAM', *names), lines, left=())}\n\n{' '.join(notes)}"


def queue_table(result: Mapping[str, Any]) -> str:
    """What it is worth to hold what waiting requests will use."""
    rows = [row for row in result["rows"] if row["part"] == "queue"]
    lines = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        cells = [f"{row['hit_rate']:.1%}, {row['saved']:.1%}" for row in rows if row["policy"] == name]
        lines.append((name, *cells))
    configuration = result["configuration"]
    notes = (
        f"{configuration['users']} users, DRAM {configuration['share_of_many']:.0%}, a server that answers",
        f"{configuration['slots']} requests at once, each for as long as it was recorded to take.",
    )
    heads = "policy", "looked up when it starts", "held from its arrival on"
    return f"{table(heads, lines)}\n\n{' '.join(notes)}"


def _setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("part", "users", "share"))


def tables() -> dict[str, str]:
    """The tables of the kept results, by the names of their places."""
    quality = {path: orjson.loads(path.read_bytes()) for path in QUALITY_RESULTS if path.exists()}
    policies = orjson.loads(POLICY_RESULT.read_bytes())
    return {
        "demo": demo_table(orjson.loads(DEMO_RESULT.read_bytes())),
        **serving_tables(),
        "quality": quality_tables(quality),
        "codec": codec_table(orjson.loads(CODEC_RESULT.read_bytes())),
        "estimator": estimator_table(orjson.loads(ESTIMATOR_RESULT.read_bytes())),
        "restore": restore_table(orjson.loads(RESTORE_RESULT.read_bytes())),
        "segments": segments_table(orjson.loads(SEGMENTS_RESULT.read_bytes())),
        "tiers": tiers_table(orjson.loads(TIERS_RESULT.read_bytes())),
        "policy": policy_table(policies),
        "policy-queue": queue_table(policies),
        **truncation.truncation_tables(),
    }
