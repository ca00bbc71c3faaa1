"""``python -m benchmarks.simulate.timeline``: the time to the first token on an H100, computed from launches.

What a restore asks of a GPU was counted (``benchmarks.launches``); rates are published, and every share of a
peak is an assumption, stated where it stands. Nothing here was measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import orjson

from benchmarks.runner import Result
from benchmarks.simulate.hardware import LLAMA3_8B, LLAMA3_70B
from benchmarks.tables import RESULTS, Columns, cell, source, table_of
from krul_sglang.sizing.on_paper import (
    BASES_RATIO,
    CODED_SHARE,
    COEFFICIENT_S,
    MOST_WAVE_GROUPS,
    PCIE4,
    PCIE5,
    PLANNED,
    WHOLE,
    Steps,
    predict,
)

LAUNCH_S = 5e-6
"""Assumed: the host takes so long to launch a kernel or a copy."""
WAIT_S = 2e-5
"""Assumed: so long after the device is done does the host know it, and the next launch arrive."""
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


def count_steps(rows: Sequence[Mapping[str, Any]], shape: str) -> Steps:
    """From the longest restores of a ``shape`` that were counted."""
    seconds = {}
    for kept, layers_of_step in (("native", 1), ("subspace", _COUNTED_GROUP_LAYERS)):
        counted = [row for row in rows if row["shape"] == shape and row["operation"] == f"restore {kept}"]
        row = max(counted, key=lambda each: each["tokens"])
        busy_s = row["launches"] * LAUNCH_S + row["syncs"] * WAIT_S
        seconds[kept] = busy_s * layers_of_step / row["num_layers"]
    return Steps(layer_s=seconds["native"], group_s=seconds["subspace"])


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
  {1e6 * COEFFICIENT_S:.1f} us in the coder, as on an H200, however many tokens there are; of up to
  {MOST_WAVE_GROUPS} groups side by side, as far as their coefficients have room.
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
