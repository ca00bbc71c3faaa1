"""``python -m benchmarks.simulate.timeline``: the time to the first token on an H100, computed from launches.

What a restore asks of a GPU was counted (``benchmarks.launches``); rates are published, and every share of a
peak is an assumption, stated where it stands. Nothing here was measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import orjson

from benchmarks.runner import Result
from benchmarks.simulate.hardware import (
    H100,
    HBM_SHARE,
    LLAMA3_8B,
    LLAMA3_70B,
    PCIE4,
    PCIE5,
    Gpu,
    Link,
    Model,
    restore_costs,
)
from benchmarks.tables import RESULTS, Columns, cell, source, table_of
from krul_backend.planner.interface import DecodeCost, RestoreProblem, StoredRun, TierCost
from krul_backend.planner.planners import LocalSearchPlanner, make_planner
from krul_sglang.learning.bases import LearningPlan

LAUNCH_S = 5e-6
"""Assumed: the host takes so long to launch a kernel or a copy."""
WAIT_S = 2e-5
"""Assumed: so long after the device is done does the host know it, and the next launch arrive."""
BASES_RATIO = 12.0
"""Assumed: KV in bases is so much smaller. Small models were measured at 10 to 19 with the default budget."""
CODED_SHARE = 0.25
"""Assumed: coefficients of a group, as a share of its channels."""
COEFFICIENT_S = 1e-6
"""Assumed: four dependent reads of memory for each coefficient; tokens are decoded side by side."""
PRODUCT_SHARE = 0.2
"""Assumed: share of the peak that the products of coefficients and bases reach."""
PAGE_SIZE = 16
NEW_TOKENS = 128
HISTORY_TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768)
LINKS = (PCIE4, PCIE5)
MODELS = {
    "Llama-3-8B": replace(LLAMA3_8B, name="Llama-3-8B"),
    "Llama-3-70B, TP 8": replace(LLAMA3_70B, name="Llama-3-70B, TP 8", num_gpus=8),
}
"""By the name of the shape that was counted."""
_COUNTED_GROUP_LAYERS = 2
"""Layers of a group in ``benchmarks.launches``; counts of a group do not depend on its layers."""
WHOLE, PLANNED = "full-load", LocalSearchPlanner.name


@dataclass(frozen=True)
class Steps:
    """What the host spends on one copied block: a layer as it is (``layer_s``), or a group (``group_s``)."""

    layer_s: float
    group_s: float


def count_steps(rows: Sequence[Mapping[str, Any]], shape: str) -> Steps:
    """From the longest restores of a ``shape`` that were counted."""
    seconds = {}
    for kept, layers_of_step in (("native", 1), ("subspace", _COUNTED_GROUP_LAYERS)):
        counted = [row for row in rows if row["shape"] == shape and row["operation"] == f"restore {kept}"]
        row = max(counted, key=lambda each: each["tokens"])
        busy_s = row["launches"] * LAUNCH_S + row["syncs"] * WAIT_S
        seconds[kept] = busy_s * layers_of_step / row["num_layers"]
    return Steps(layer_s=seconds["native"], group_s=seconds["subspace"])


def predict(
    model: Model, link: Link, steps: Steps, history_tokens: int, new_tokens: int, gpu: Gpu = H100
) -> dict[str, float]:
    """Seconds to the first token of a returning prompt: computed, and restored in each way that is kept.

    The history is one segment. Launches, copies and decoding of a block are added, as if the host did nothing
    ahead; communication between GPUs is left out.
    """
    costs = restore_costs(gpu, link, model)
    byte_s = costs.tiers[link.name].byte_s
    bases, coder_s = _in_bases(model, gpu, link, history_tokens)
    ends_s = {}
    for kept, run, latency_s in (
        ("native", _as_it_is(model, gpu, link, history_tokens), steps.layer_s),
        ("bases", bases, steps.group_s + coder_s),
    ):
        problem = RestoreProblem(
            num_layers=model.num_layers,
            page_size=PAGE_SIZE,
            device_tokens=0,
            total_tokens=history_tokens,
            new_tokens=new_tokens,
            runs=(run,),
            costs=replace(costs, tiers={link.name: TierCost(link.latency_s + latency_s, byte_s)}),
        )
        ends_s["recompute"] = problem.recompute_s
        ends_s |= {f"{kept}, {name}": make_planner(name).plan(problem).end_s for name in (WHOLE, PLANNED)}
    return ends_s


def _as_it_is(model: Model, gpu: Gpu, link: Link, history_tokens: int) -> StoredRun:
    """The history as the pool has it: read on the device, and written to its slots."""
    sizes = (float(model.layer_token_bytes),) * model.num_layers
    decode_s = (2 * _write_s(model, gpu),) * model.num_layers
    return _run(link, history_tokens, sizes, decode_s, tuple(range(model.num_layers)))


def _write_s(model: Model, gpu: Gpu) -> float:
    """Seconds to write a token's KV of one layer."""
    return model.layer_token_bytes / (HBM_SHARE * gpu.hbm_bytes_s * model.num_gpus)


def _in_bases(model: Model, gpu: Gpu, link: Link, history_tokens: int) -> tuple[StoredRun, float]:
    """The history in bases, and the seconds for which a group's coder runs, whatever the number of tokens.

    A group's block comes with its first layer, and is decoded for all of them.
    """
    channels = 2 * model.num_kv_heads * model.head_dim // model.num_gpus
    ends = [0, *LearningPlan().group_ends(model.num_layers, channels)]
    sizes, decode_s, last_use = [0.0] * model.num_layers, [0.0] * model.num_layers, [0] * model.num_layers
    coder_s = 0.0
    for first, end in pairwise(ends):
        coefficients = CODED_SHARE * channels * (end - first)
        product_s = 2 * coefficients * channels / (PRODUCT_SHARE * gpu.peak_flops)
        sizes[first] = (end - first) * model.layer_token_bytes / BASES_RATIO
        coder_s = max(coder_s, coefficients * COEFFICIENT_S)
        for layer in range(first, end):
            decode_s[layer] = product_s / (end - first) + _write_s(model, gpu)
            last_use[layer] = end - 1 if layer == first else layer
    return _run(link, history_tokens, tuple(sizes), tuple(decode_s), tuple(last_use)), coder_s


def _run(
    link: Link,
    history_tokens: int,
    sizes: tuple[float, ...],
    decode_s: tuple[float, ...],
    last_use: tuple[int, ...],
) -> StoredRun:
    costs = tuple(DecodeCost(0.0, token_s) for token_s in decode_s)
    return StoredRun(link.name, 0, history_tokens, sizes, costs, last_use, (0,) * len(sizes))


def timeline(result: Result) -> Iterator[dict[str, Any]]:
    """Rows for an H100, from a result of ``benchmarks.launches``."""
    for (shape, model), link, history in product(MODELS.items(), LINKS, HISTORY_TOKENS):
        steps = count_steps(result["rows"], shape)
        yield {
            "model": model.name,
            "link": link.name,
            "tokens": history,
            **predict(model, link, steps, history, NEW_TOKENS),
        }


_COLUMNS: Columns = {
    "model": cell("model"),
    "link": cell("link"),
    "history": cell("tokens"),
    **{
        head: cell(name, "{:.0f} ms", 1e3)
        for head, name in (
            ("recompute", "recompute"),
            ("native, loaded", f"native, {WHOLE}"),
            ("native, planned", f"native, {PLANNED}"),
            ("bases, loaded", f"bases, {WHOLE}"),
            ("bases, planned", f"bases, {PLANNED}"),
        )
    },
}

_NOTES = f"""**Computed, never measured**: H100s by their data sheet, {NEW_TOKENS} new tokens, one segment of
KV in pinned host memory, an idle server.

- What a restore launches and waits for was counted; a launch is taken for {1e6 * LAUNCH_S:.0f} us and a
  wait for {1e6 * WAIT_S:.0f} us, added to the copy of the layer or group.
- Links reach 80% of their rate, products of a prefill half of the peak, attention 40%, device memory 70%.
- Bases: {BASES_RATIO:.0f} times fewer bytes, coefficients for {CODED_SHARE:.0%} of the channels, each
  {1e6 * COEFFICIENT_S:.0f} us in the coder, group after group, however many tokens there are: so they end
  later than native KV where the history is short.
- Communication between GPUs is left out, so what TP 8 recomputes takes longer than this."""


def timeline_table(result: Result, path: Path | None) -> str:
    """The predicted times to the first token, and by what they are computed."""
    return f"{table_of(_COLUMNS, timeline(result), left=(0, 1))}\n\n{_NOTES}\n\n{source(path)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.timeline", description=__doc__)
    path = RESULTS / "launches.json"
    parser.add_argument("--launches", type=Path, default=path, help="a result of benchmarks.launches")
    given = parser.parse_args()
    print(timeline_table(orjson.loads(given.launches.read_bytes()), given.launches))
    return 0


if __name__ == "__main__":
    sys.exit(main())
