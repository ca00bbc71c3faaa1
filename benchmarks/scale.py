"""``python -m benchmarks.scale --json FILE``: what the SSD tier writes and uses of its cap."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.runner import Result
from benchmarks.tables import Columns, cell, source, table_of
from benchmarks.tiers.configuration import KIB, MIB, TiersBenchmarkError
from benchmarks.tiers.segments import make_manifest, make_model, page_keys, token_ids
from krul_backend.tiers.common.interface import block_checksums
from krul_backend.tiers.ssd.ssd_tier import SsdTier

_NUM_LAYERS = 32
_PAGE_BYTES = 128 * KIB
"""Of a page of 16 tokens: an eighth of what bf16 takes in a model of 8B."""
_MAX_PAGES = 64
_TIMES_THE_CAP = 4
_TIMEOUT_S = 60.0


def space_rows(folder: Path, capacity_bytes: int, seed: int) -> list[dict[str, Any]]:
    """Segments of random lengths, four times what the cap holds, some of them used again and again.

    Bytes written are those of ``/proc/self/io``, with all that file systems are handed; what is stored are
    blocks alone, without headers and padding.
    """
    rng = random.Random(seed)
    noise = np.random.default_rng(seed).integers(0, 256, _MAX_PAGES * _PAGE_BYTES, dtype=np.uint8)
    model = make_model(_NUM_LAYERS)
    tier = SsdTier(folder / "ssd", capacity_bytes)
    tier.wait_until_open(_TIMEOUT_S)
    written_before, stored_bytes, full_bytes = _written_bytes(), 0, 0
    stored: list[tuple[int, int]] = []
    while stored_bytes < _TIMES_THE_CAP * capacity_bytes:
        number, num_pages = len(stored), round(_MAX_PAGES ** rng.random())
        block_bytes = num_pages * _PAGE_BYTES // _NUM_LAYERS
        blocks = [noise[layer * block_bytes : (layer + 1) * block_bytes] for layer in range(_NUM_LAYERS)]
        manifest = make_manifest(model, number, 0, num_pages, (block_bytes,) * _NUM_LAYERS)
        is_taken = tier.put(manifest, blocks, block_checksums(blocks), lambda: None)
        if not (is_taken and tier.flush(_TIMEOUT_S)):
            raise TiersBenchmarkError("the SSD tier did not take a segment")
        stored.append((number, num_pages))
        stored_bytes += manifest.num_bytes
        if not tier.stats().evicted_segments:
            full_bytes = tier.stats().used_bytes
        # A tenth of all conversations come back, most of them soon.
        again, num_again = stored[-1 - min(int(rng.expovariate(1 / 50)) * 10, number)]
        for run in tier.match(model, page_keys(again, 0, num_again), token_ids(0, num_again), 0):
            tier.release(run)
    skipped = tier.stats().skipped_segments
    tier.close()
    if skipped:
        raise TiersBenchmarkError(f"segments were not written: {skipped}")
    written_bytes = _written_bytes() - written_before
    return [
        _at_most("bytes written per byte stored", written_bytes / stored_bytes, 1.02),
        _at_least("share of the cap in use when eviction begins", full_bytes / capacity_bytes, 0.97),
    ]


def _written_bytes() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["write_bytes"])


def _at_most(name: str, value: float, bound: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": bound, "met": value <= bound}


def _at_least(name: str, value: float, bound: float) -> dict[str, Any]:
    return {"name": name, "value": value, "bound": bound, "met": value >= bound}


def run(folder: Path | None, capacity_bytes: int, seed: int) -> dict[str, Any]:
    """All rows. Raises TiersBenchmarkError if the tier refuses a segment."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        rows = space_rows(Path(name), capacity_bytes, seed)
        kind = subprocess.run(["stat", "-f", "-c", "%T", name], capture_output=True, text=True, check=True)
    configuration = {"capacity_bytes": capacity_bytes, "seed": seed, "file_system": kind.stdout.strip()}
    return {"configuration": configuration, "rows": rows}


_ROWS: Columns = {
    "what": cell("name"),
    "value": cell("value", "{:.4g}"),
    "bound": cell("bound", "{:g}"),
    "met": cell("met", lambda met: "yes" if met else "no"),
}


def scale_table(result: Result, path: Path | None) -> str:
    """A line for each row."""
    of = f"File system: {result['configuration']['file_system']}."
    return f"{table_of(_ROWS, result['rows'])}\n\n{of} {source(path)}"


def main() -> int:
    given = _parser().parse_args()
    return runner.run(given, lambda: run(given.folder, given.capacity_bytes, given.seed), scale_table)


def _parser() -> argparse.ArgumentParser:
    parser = runner.make_parser("scale", "What the SSD tier writes and uses of its cap.", seed=0)
    parser.add_argument("--capacity-bytes", type=int, default=512 * MIB, help="the cap of the tier")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: of temporary files)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
