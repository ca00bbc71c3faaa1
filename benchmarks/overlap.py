"""``python -m benchmarks.overlap --json FILE``: heads that are computed while tails load, on real servers.

Each method has a server of its own, which is asked the same turns: prompts of several lengths, each of which
returns after it has left the device, and two that return together. They come back from host memory through a
link that is slowed down (``dram:MBS``), or from an SSD that is (``ssd:MBS``). ``dram:x0.5`` is a link on
which loading a prompt takes half as long as computing it here; ``simulate.hardware.load_ratio`` says which
machine has which ratio. After each answer a server ends what it stores, so that nothing but the restore is
measured.
"""

from __future__ import annotations

import argparse
import logging
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import planners, runner
from benchmarks.runner import Result, failures_kept, names, numbers
from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.conversations import generated_conversation
from benchmarks.serving.servers import Server, kv_token_bytes, make_server
from benchmarks.tables import Columns, Row, cell, machine, model, ms, source, table_of
from demo.conversations import Conversation
from demo.player import Player
from demo.sizing import PoolSizes, load_token_encoder, plan_pools
from demo.summary import quantiles
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.adapter.attach import COSTS_FILE
from krul_sglang.cli.timed_answer import TurnResult
from krul_sglang.cli.trace import fetch_restores
from krul_sglang.models.find import find_model
from krul_sglang.traced_restore import TracedRestore

logger = logging.getLogger(__name__)

_LOSSY = {"fast_copies": "never"}
METHODS: dict[str, dict[str, Any]] = {
    "recompute": {"planner": "full-recompute"},
    "full-load": {"planner": "full-load"},
    "minicache-full-load": {"planner": "full-load", "strategy": "minicache", **_LOSSY},
    "partial-recompute": {"planner": "uniform"},
    "pyramid": {"planner": "pyramid"},
    "native-planned": {},
    "krul-planned": {"strategy": "krul", **_LOSSY},
    "subspace-planned": {"strategy": "subspace", **_LOSSY},
}
"""krul's options by the name of the method; ``partial-recompute`` has one ratio for all layers, ``pyramid``
linear heads, and what is planned has heads of searched lengths."""

_SSD_BYTES = "8GiB"
_ANY_MBS = 1000.0
"""Of the link of a server that loads nothing."""


@dataclass(frozen=True)
class Setting:
    """Where prefixes come back from, and at how many 1e6 bytes per second.

    ``ratio``: how many times as long loading takes as computing, if that was asked for; then ``mbs`` is 0
    until computing has been measured.
    """

    tier: str
    mbs: float
    ratio: float | None = None

    @classmethod
    def parse(cls, text: str) -> Setting:
        tier, _, rate = text.partition(":")
        if tier not in (DRAM_TIER, "ssd"):
            raise ServingBenchmarkError(f"--settings: no tier {tier!r}; accepted are dram and ssd")
        is_ratio = rate.startswith("x")
        try:
            number = float(rate.removeprefix("x"))
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf:
            raise ServingBenchmarkError(f"--settings: {text!r} has no MB per second, and no ratio (x0.5)")
        return cls(tier, 0.0, number) if is_ratio else cls(tier, number)

    def at(self, computed_mbs: float) -> Setting:
        """With its rate, on a machine that computes so many 1e6 bytes of KV per second."""
        return self if self.ratio is None else replace(self, mbs=round(computed_mbs / self.ratio, 1))


@dataclass(frozen=True)
class Returned:
    """A returning turn, or several that were asked together, and how its restore went.

    ``restore`` is None if nothing was restored. ``num_read`` bytes were read of the tier, ``num_planned`` are
    what the plan loads.
    """

    tokens: int
    turns: tuple[TurnResult, ...]
    restore: TracedRestore | None
    num_read: int
    num_planned: int

    @property
    def ttft_s(self) -> float:
        """Of the last one of them."""
        return max(turn.ttft_s for turn in self.turns)


def run(
    base: Configuration, settings: Sequence[Setting], methods: Sequence[str], pair_tokens: int
) -> dict[str, Any]:
    """Measure every method in each setting, and make rows.

    If a server fails, the result has the settings before, and the ``failure``.

    Raises:
        KrulError: the options fit nothing, or a server fails in the first setting.
    """
    planners.register()
    encode, context_length = load_token_encoder(base.model_path)
    lengths = base.history_tokens
    one = replace(base, history_tokens=(*lengths, pair_tokens, pair_tokens))
    conversations = [
        generated_conversation(number, one, lambda messages: len(encode(messages)))
        for number in range(len(one.history_tokens))
    ]
    groups = [(conversation,) for conversation in conversations[:-2]] + [tuple(conversations[-2:])]
    pools = plan_pools(
        conversations,
        lambda messages: len(encode(messages)),
        max_tokens=base.max_tokens,
        page_size=base.page_size,
        device_tokens=base.device_tokens,
        context_length=context_length,
    )
    result: dict[str, Any] = {
        "configuration": {**base.to_json(), "settings": []},
        "rows": [],
        "restore": None,
    }

    def measure(setting: Setting, names: Sequence[str]) -> dict[str, list[Returned]]:
        returned: dict[str, list[Returned]] = {}
        with tempfile.TemporaryDirectory(prefix="krul-overlap-") as name:
            for method in names:
                logger.info("%s at %g MB/s: %s", setting.tier, setting.mbs, method)
                server = _make(method, setting, base, pools, Path(name))
                returned[method] = list(_play(server, setting, groups, [*lengths, pair_tokens], base))
        return returned

    with failures_kept(result):
        computed: dict[str, list[Returned]] = {}
        if any(setting.ratio is not None for setting in settings):
            # It reads nothing of any tier, so that one measurement serves all ratios.
            computed = measure(Setting(DRAM_TIER, _ANY_MBS), ["recompute"])
        for asked in settings:
            if asked.ratio is None:
                setting, returned = asked, measure(asked, methods)
            else:
                setting = asked.at(_computed_mbs(computed["recompute"], kv_token_bytes(base)))
                rest = [method for method in methods if method not in computed]
                returned = {**computed, **measure(setting, rest)}
            result["configuration"]["settings"].append(asdict(setting))
            result["rows"] += _rows(setting, returned)
            if asked == settings[-1]:
                chart = _longest(returned.get("native-planned", ()))
                result["restore"] = None if chart is None else _as_dict(chart)
    return result


def _computed_mbs(returned: Sequence[Returned], token_bytes: int) -> float:
    """1e6 bytes of KV that are computed per second, of one user's prompts: the median over their lengths."""
    alone = [each for each in returned if len(each.turns) == 1]
    return statistics.median(1e-6 * token_bytes * each.tokens / each.ttft_s for each in alone)


def _make(method: str, setting: Setting, base: Configuration, pools: PoolSizes, folder: Path) -> Server:
    """A server of one method. Those after the first plan with the costs that it has measured."""
    options = {**METHODS[method], **base.krul_options}
    if setting.tier == DRAM_TIER:
        own = replace(base, krul_options={"link_mbs": setting.mbs, **options}, host_memory=None)
    else:
        own = replace(base, krul_options=options, ssd=_SSD_BYTES, ssd_read_mbs=setting.mbs)
    place = folder / method
    place.mkdir()
    server = make_server("native", own, pools, place)
    measured = sorted(folder.glob(f"*/native/{COSTS_FILE}"))
    target = place / "native" / COSTS_FILE
    if measured and not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(measured[0], target)
    return replace(server, name=method)


def _play(
    server: Server,
    setting: Setting,
    groups: Sequence[tuple[Conversation, ...]],
    tokens: Sequence[int],
    configuration: Configuration,
) -> Iterator[Returned]:
    """Ask all turns, the first of all conversations first; those of a group are asked together."""
    answers: dict[tuple[str, int], str] = {}
    with ExitStack() as stack:
        if server.daemon is not None:
            stack.enter_context(server.daemon)
        stack.enter_context(server.process)
        url, most = server.process.url, max(map(len, groups))
        players = [stack.enter_context(Player(url, max_tokens=configuration.max_tokens)) for _ in range(most)]
        threads = stack.enter_context(ThreadPoolExecutor(most))
        players[0].warm_up()
        server.settle()
        for turn in range(1, configuration.rounds + 1):
            for group, num_tokens in zip(groups, tokens, strict=True):
                before = _amounts(server, setting)
                asked = [
                    threads.submit(player.ask, conversation, turn, answers)
                    for player, conversation in zip(players, group, strict=False)
                ]
                results = tuple(each.result() for each in asked)
                answers.update({(result.conversation, turn): result.answer for result in results})
                num_loads, num_read, num_planned = map(int.__sub__, _amounts(server, setting), before)
                server.settle()
                if turn > 1:
                    restore = fetch_restores(url)[-1] if num_loads else None
                    yield Returned(num_tokens, results, restore, num_read, num_planned)


def _amounts(server: Server, setting: Setting) -> tuple[int, int, int]:
    """Loads so far, bytes that were read of the tier, and bytes that plans have loaded."""
    (state,) = server.krul_states()
    planned = state["load"]["num_bytes"]
    tiers = {tier["name"]: tier["read_bytes"] for tier in state["tiers"]}
    return state["load"]["requests"], tiers.get(setting.tier, planned), planned


def _rows(setting: Setting, returned: Mapping[str, Sequence[Returned]]) -> list[dict[str, Any]]:
    """A row for each method and length, one user first, then two."""
    kinds = dict.fromkeys((each.tokens, len(each.turns)) for turns in returned.values() for each in turns)

    def of(method: str, kind: tuple[int, int]) -> list[Returned]:
        return [each for each in returned.get(method, ()) if (each.tokens, len(each.turns)) == kind]

    rows = []
    for kind in sorted(kinds, key=lambda kind: (kind[1], kind[0])):
        whole = {
            method: statistics.median(each.ttft_s for each in of(method, kind))
            for method in ("recompute", "full-load")
            if of(method, kind)
        }
        for method in returned:
            rows.append(_row(method, setting, kind, of(method, kind), whole))
    return rows


def _row(
    method: str,
    setting: Setting,
    kind: tuple[int, int],
    returned: Sequence[Returned],
    whole: Mapping[str, float],
) -> dict[str, Any]:
    restored = [(each, each.restore) for each in returned if each.restore is not None]
    ttft_s = quantiles([each.ttft_s for each in returned])

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    ideal_s = None
    if len(whole) == 2:
        # Both streams busy to the end, if computing and loading take no more together than alone.
        ideal_s = 1 / sum(1 / seconds for seconds in whole.values())
    return {
        "method": method,
        **asdict(setting),
        "tokens": kind[0],
        "users": kind[1],
        "ttft_s": {name: ttft_s[name] for name in ("q25", "median", "q75", "max")},
        "times_sooner_than": {name: seconds / ttft_s["median"] for name, seconds in whole.items()},
        "bytes_read": median([each.num_read for each, _ in restored]),
        "bytes_planned": median([each.num_planned for each, _ in restored]),
        "head_tokens": median([restore.head_tokens(0) for _, restore in restored]),
        "predicted_s": median([restore.planned_s for _, restore in restored]),
        "measured_s": median([restore.end_s for _, restore in restored]),
        "ideal_s": ideal_s,
        "compute_busy": median([restore.compute_busy for _, restore in restored]),
        "link_busy": median([restore.load_busy for _, restore in restored]),
    }


def _longest(returned: Sequence[Returned]) -> TracedRestore | None:
    """The restore of one user with most tokens, for the chart."""
    alone = [each.restore for each in returned if len(each.turns) == 1 and each.restore is not None]
    return max(alone, key=lambda restore: restore.prefix_tokens, default=None)


def _as_dict(restore: TracedRestore) -> dict[str, Any]:
    """What ``TracedRestore.parse`` reads, without what names the request."""
    value: dict[str, Any] = msgspec.to_builtins(restore)
    streams = {"load": "loads", "head": "heads", "wait": "waits", "own": "own"}
    value["streams"] = {stream: value.pop(name) for stream, name in streams.items()}
    for request in value["requests"]:
        request["rid"] = ""
    return {name: each for name, each in value.items() if name not in ("index", "rank")}


def _sooner_than(method: str) -> Callable[[Row], str]:
    return cell("times_sooner_than", lambda times: cell(method, "{:.2f}")(times))


COLUMNS: Columns = {
    "method": cell("method"),
    "tokens": cell("tokens"),
    "users": cell("users"),
    "TTFT": cell("ttft_s", lambda ttft_s: ms(ttft_s["median"])),
    "largest": cell("ttft_s", lambda ttft_s: ms(ttft_s["max"])),
    "sooner than recompute": _sooner_than("recompute"),
    "than full load": _sooner_than("full-load"),
    "ideal": cell("ideal_s", ms),
    "predicted": cell("predicted_s", ms),
    "measured": cell("measured_s", ms),
    "heads": cell("head_tokens", "{:.0f}"),
    "read": cell("bytes_read", "{:.1f} MB", 1e-6),
    "planned": cell("bytes_planned", "{:.1f} MB", 1e-6),
    "compute busy": cell("compute_busy", "{:.0%}"),
    "link busy": cell("link_busy", "{:.0%}"),
}


def overlap_tables(result: Result, path: Path | None) -> str:
    """A table for each setting."""
    tables = []
    for setting in result["configuration"]["settings"]:
        rows = [row for row in result["rows"] if all(row[name] == value for name, value in setting.items())]
        place = {DRAM_TIER: "from host memory through a link of", "ssd": "from an SSD that reads"}
        ratio = setting.get("ratio")
        against = "" if ratio is None else f", loading takes {ratio:g} times as long as computing"
        heading = f"**{model(result)}, {place[setting['tier']]} {setting['mbs']:g} MB/s{against}:**"
        tables.append(f"{heading}\n\n{table_of(COLUMNS, rows)}")
    notes = (
        "Medians; largest: of all turns. ideal: both streams busy to the end, from the medians of recompute",
        "and full-load. predicted and measured: to the end of the forward. heads: tokens of the first layer.",
        "Two users ask together, and the later of their answers counts. After each answer a server ends what",
        f"it stores. {machine(result, path)}",
    )
    return "\n\n".join((*tables, " ".join(notes)))


IN_README = {
    "recompute": "everything computed",
    "full-load": "everything loaded",
    "native-planned": "heads computed while tails load",
}
"""The methods that the README compares, in words."""


def overlap_summary(result: Result, path: Path | None) -> str:
    """What a user understands: three ways to bring the longest prompts back, in each setting."""
    configuration = result["configuration"]
    tokens = max(configuration["history_tokens"])
    places = {DRAM_TIER: "a link", "ssd": "a disk"}
    columns: Columns = {
        f"{tokens} tokens through": lambda row: f"{places[row['tier']]}, {IN_README[row['method']]}",
        **{head: COLUMNS[head] for head in ("TTFT", "sooner than recompute", "read")},
    }
    rows = [
        row
        for row in result["rows"]
        if row["method"] in IN_README and (row["tokens"], row["users"]) == (tokens, 1)
    ]
    mbs = ", ".join(f"{setting['mbs']:g}" for setting in configuration["settings"][:1])
    return f"{table_of(columns, rows)}\n\n{mbs} MB/s, {result['machine']['cores']} cores. {source(path)}"


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)

    def measure() -> Result:
        if unknown := set(given.methods) - METHODS.keys():
            accepted = ", ".join(METHODS)
            raise ServingBenchmarkError(f"--methods: no {', '.join(unknown)}; accepted are {accepted}")
        base = Configuration(
            model_path=find_model(given.model, logger.info, option="--model"),
            history_tokens=tuple(given.tokens),
            rounds=given.turns,
            dtype=given.dtype,
            host_memory=given.host_memory,
            max_tokens=4,
        )
        settings = [Setting.parse(text) for text in given.settings]
        return run(base, settings, given.methods, given.pair_tokens)

    return runner.run(given, measure, overlap_tables)


def _parser() -> argparse.ArgumentParser:
    parser = runner.make_parser("overlap", __doc__, model="smollm2", dtype="float32")
    add = parser.add_argument
    add(
        "--settings",
        type=names,
        default=["dram:40", "ssd:40"],
        help="tier:MBS or tier:xRATIO, several (dram:40,ssd:40)",
    )
    add("--methods", type=names, default=[*METHODS], help=", ".join(METHODS))
    add("--tokens", type=numbers, default=[512, 1024, 2048], help="lengths of prompts (512,1024,2048)")
    add("--pair-tokens", type=int, default=1024, help="length of the prompts of two users (1024)")
    add("--turns", type=int, default=4, help="turns of each prompt, of which the first computes it (4)")
    add("--host-memory", default="160MiB", help="host memory over an SSD, for one prompt (160MiB)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
