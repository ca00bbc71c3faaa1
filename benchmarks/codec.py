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

from krul_backend.codec.coefficients.fixed_width import FixedWidthCoder
from krul_backend.codec.coefficients.frequencies import ROUNDING
from krul_backend.codec.coefficients.interface import Classes, CoefficientCoder, Levels
from krul_backend.codec.coefficients.rans import RansCoder
from krul_backend.codec.coefficients.tables import standard_tables
from krul_sglang.demo.environment import git_revision, machine, versions, without_cwd
from krul_sglang.json_file import write_json

SCALES = ((20.0, 0.02), (10.0, 0.005), (4.0, 0.002))
"""Scales of the first and of the last coefficient, in steps: coarser quantization from row to row."""


def falling_levels(
    num_tokens: int, num_coefficients: int, largest_scale: float, smallest_scale: float, seed: int = 0
) -> tuple[Levels, Classes]:
    """Laplacian levels int16 ``[T, R]`` whose scales fall geometrically, and their classes uint8 ``[R]``."""
    scales = np.geomspace(largest_scale, smallest_scale, num_coefficients)
    coefficients = np.random.default_rng(seed).laplace(size=(num_tokens, num_coefficients)) * scales
    levels = (np.sign(coefficients) * np.floor(np.abs(coefficients) + ROUNDING)).astype(np.int16)
    # The mean of a quantized Laplacian: all probabilities of at least 1, 2, 3 ...
    means = np.exp(-(1 - ROUNDING) / scales) / (1 - np.exp(-1 / scales))
    classes = standard_tables().class_of(means)
    return levels, classes


def row(coder: CoefficientCoder, levels: Levels, classes: Classes, repeats: int) -> dict[str, Any]:
    """Medians of one coder in millions of levels per second, on the thread that calls.

    ``entropy_bits`` is the ideal length by the tables of the classes; both lengths are bits per level.
    """
    encoded = coder.encode(levels, classes)
    out = np.empty_like(levels)
    values = np.empty(levels.shape, np.float32)

    def decode(target: Any) -> None:
        coder.decode(encoded.data, encoded.record_num_bytes, classes, target)

    decode(values)
    decode(out)
    if not np.array_equal(out, levels):
        raise RuntimeError(f"{coder.name} does not decode what it encoded")
    return {
        "coder": coder.name,
        "num_tokens": levels.shape[0],
        "num_coefficients": levels.shape[1],
        "encode_mlevels_s": levels.size / 1e6 / _median_s(lambda: coder.encode(levels, classes), repeats),
        "decode_mlevels_s": levels.size / 1e6 / _median_s(lambda: decode(out), repeats),
        "decode_values_mlevels_s": levels.size / 1e6 / _median_s(lambda: decode(values), repeats),
        "bits_per_level": 8 * len(encoded.data) / levels.size,
        "entropy_bits": float(standard_tables().expected_bits(levels, classes).sum()) / levels.size,
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
    for largest, smallest in SCALES:
        levels, classes = falling_levels(tokens, coefficients, largest, smallest)
        for coder in (RansCoder(), FixedWidthCoder()):
            result = {"largest_scale": largest, "smallest_scale": smallest}
            rows.append(result | row(coder, levels, classes, repeats))
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
