"""``python -m benchmarks.codec --json FILE``: speed and size of the coders of quantized coefficients."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from krul_backend.codec.coefficients.coders import CoefficientCoder, FixedWidthCoder, RansCoder
from krul_backend.codec.coefficients.compiled import Levels, Scales, Shifts
from krul_backend.codec.coefficients.frequencies import ROUNDING
from krul_backend.codec.coefficients.scales import base_scales
from krul_backend.codec.coefficients.tables import standard_tables
from krul_sglang.demo.environment import git_revision, machine, versions, without_cwd
from krul_sglang.json_file import write_json

MAGNITUDES = ((20.0, 0.02), (10.0, 0.005), (4.0, 0.002))
"""Mean magnitudes of the first and of the last coefficient, in steps: coarser from row to row."""


def falling_levels(
    num_tokens: int, num_coefficients: int, largest: float, smallest: float, seed: int = 0
) -> tuple[Levels, Scales, Shifts]:
    """Levels int16 ``[T, R]`` of Laplacians whose mean magnitudes fall geometrically, in steps.

    With them their scales uint8 ``[R]``, none of them 0, and shifts of -3 to 3 that the tokens were quantized
    with.
    """
    magnitudes = np.geomspace(largest, smallest, num_coefficients).astype(np.float32)
    generator = np.random.default_rng(seed)
    shifts = generator.integers(-3, 4, num_tokens).astype(np.int8)
    coefficients = generator.laplace(size=(num_tokens, num_coefficients)) * magnitudes
    coefficients /= np.exp2(shifts[:, None] / 2)
    levels = (np.sign(coefficients) * np.floor(np.abs(coefficients) + ROUNDING)).astype(np.int16)
    return levels, base_scales(magnitudes, 1.0), shifts


def row(
    coder: CoefficientCoder, levels: Levels, scales: Scales, shifts: Shifts, repeats: int
) -> dict[str, Any]:
    """Medians of one coder in millions of levels per second, on the thread that calls.

    ``entropy_bits`` is the ideal length by the tables of the scales; both lengths are bits per level,
    and the shifts are not in this one.
    """
    encoded = coder.encode(levels, scales, shifts)
    out = np.empty_like(levels)
    values = np.empty(levels.shape, np.float32)

    def decode(target: Any) -> None:
        coder.decode(encoded.data, encoded.record_num_bytes, scales, target)

    decode(values)
    decode(out)
    if not np.array_equal(out, levels):
        raise RuntimeError(f"{coder.name} does not decode what it encoded")
    return {
        "coder": coder.name,
        "num_tokens": levels.shape[0],
        "num_coefficients": levels.shape[1],
        "encode_mlevels_s": levels.size
        / 1e6
        / _median_s(lambda: coder.encode(levels, scales, shifts), repeats),
        "decode_mlevels_s": levels.size / 1e6 / _median_s(lambda: decode(out), repeats),
        "decode_values_mlevels_s": levels.size / 1e6 / _median_s(lambda: decode(values), repeats),
        "bits_per_level": 8 * len(encoded.data) / levels.size,
        "entropy_bits": float(standard_tables().expected_bits(levels, scales, shifts).sum()) / levels.size,
    }


def _median_s(run: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats + 1):
        # The thread's own seconds: what else runs on the machine does not count.
        started = time.thread_time()
        run()
        samples.append(time.thread_time() - started)
    return statistics.median(samples[1:])


def _short(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def main(
    json: Annotated[Path, typer.Option(help="File for the result.")],
    tokens: Annotated[int, typer.Option(help="Tokens of a block.", min=1)] = 1024,
    coefficients: Annotated[int, typer.Option(help="Coefficients of a token.", min=1)] = 800,
    repeats: Annotated[int, typer.Option(help="Timed runs of each row.", min=5)] = 15,
) -> None:
    rows = []
    for largest, smallest in MAGNITUDES:
        levels, scales, shifts = falling_levels(tokens, coefficients, largest, smallest)
        for coder in (RansCoder(), FixedWidthCoder()):
            result = {"largest_magnitude": largest, "smallest_magnitude": smallest}
            rows.append(result | row(coder, levels, scales, shifts, repeats))
            typer.echo("  ".join(f"{key} {_short(value)}" for key, value in rows[-1].items()))
    write_json(
        {
            "git_revision": git_revision(),
            "versions": versions(("numpy", "numba")),
            "machine": machine(),
            "command": without_cwd(shlex.join(sys.orig_argv)),
            "repeats": repeats,
            "rows": rows,
        },
        json,
    )


if __name__ == "__main__":
    typer.run(main)
