"""``python -m benchmarks.codec --json FILE``: speed and size of the subspace codec and its coders."""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer

from benchmarks import runner
from benchmarks.quality.model import capture_attention, load_model
from benchmarks.runner import Result
from benchmarks.tables import Columns, cell, plain_table, source, table_of
from krul_backend.attention.rows import attention_drawn, sample_positions
from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.coefficients.scales import (
    ESCAPE,
    NUM_SCALES,
    PROBABILITY_BITS,
    ROUNDING,
    SYMBOLS,
    Levels,
    Scales,
    Shifts,
    alphabets,
    base_scales,
)
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.encoders import GroupEncoders
from krul_backend.codec.subspace.sample import SegmentSample
from krul_sglang.config import KrulConfig
from krul_sglang.learning.command import cut_pieces, own_texts
from krul_sglang.learning.model_kv import pooled
from krul_sglang.learning.reader import TextReader
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)

LIMITS = (0.003, 0.01, 0.03)
"""Of the damage, in nats per predicted token."""

MAGNITUDES = ((20.0, 0.02), (10.0, 0.005), (4.0, 0.002))
"""Mean magnitudes of the first and of the last coefficient, in steps: coarser from row to row."""


def falling_levels(
    num_tokens: int, num_coefficients: int, largest: float, smallest: float
) -> tuple[Levels, Scales, Shifts]:
    """Levels int16 ``[T, R]`` of Laplacians whose mean magnitudes fall geometrically, in steps.

    With them their scales uint8 ``[R]``, none of them 0, and shifts of -3 to 3 that the tokens were quantized
    with.
    """
    magnitudes = np.geomspace(largest, smallest, num_coefficients).astype(np.float32)
    generator = np.random.default_rng(0)
    shifts = generator.integers(-3, 4, num_tokens).astype(np.int8)
    coefficients = generator.laplace(size=(num_tokens, num_coefficients)) * magnitudes
    coefficients /= np.exp2(shifts[:, None] / 2)
    levels = (np.sign(coefficients) * np.floor(np.abs(coefficients) + ROUNDING)).astype(np.int16)
    return levels, base_scales(magnitudes, 1.0), shifts


def row(coder: RansCoder, levels: Levels, scales: Scales, shifts: Shifts, repeats: int) -> dict[str, Any]:
    """Medians of one coder in millions of levels per second, on the thread that calls.

    ``entropy_bits`` is the ideal length by the tables of the scales; both lengths are bits per level,
    and the shifts are not in this one.
    """
    encoded = coder.encode(levels, scales, shifts)
    out = np.empty_like(levels)
    values = np.empty(levels.shape, np.float32)

    def decode(target: Any) -> None:
        coder.decode(encoded.data, encoded.record_num_bytes, scales, target)

    millions = levels.size / 1e6
    decode(values)
    decode(out)
    if not np.array_equal(out, levels):
        raise RuntimeError("the coder does not decode what it encoded")
    return {
        "coder": "rans",
        "num_tokens": levels.shape[0],
        "num_coefficients": levels.shape[1],
        "encode_mlevels_s": millions / _median_s(lambda: coder.encode(levels, scales, shifts), repeats),
        "decode_mlevels_s": millions / _median_s(lambda: decode(out), repeats),
        "decode_values_mlevels_s": millions / _median_s(lambda: decode(values), repeats),
        "bits_per_level": 8 * len(encoded.data) / levels.size,
        "entropy_bits": float(expected_bits(levels, scales, shifts).sum()) / levels.size,
    }


@cache
def level_bits() -> NDArray[np.float32]:
    """The ideal length of each level in bits, by the tables of the scales: float32 ``[48, 256]``, at ``scale,
    level + 128``.

    Both ends are escaped in each scale, as all levels beyond are. In scale 0 all but level 0 are infinite.
    """
    bits = np.full((NUM_SCALES, SYMBOLS), np.inf, np.float32)
    bits[0, -ESCAPE] = 0
    for scale, alphabet in enumerate(alphabets(), start=1):
        lengths = PROBABILITY_BITS - np.log2(alphabet.frequencies)
        bits[scale] = lengths[0] + 16
        first = -ESCAPE - alphabet.largest
        bits[scale, first : first + len(lengths) - 1] = lengths[1:]
    return bits


def expected_bits(levels: Levels, scales: Scales, shifts: Shifts) -> NDArray[np.float64]:
    """The ideal code length in bits of each coefficient ``[R]``, over ``levels`` int16 ``[T, R]``.

    ``scales`` uint8 ``[R]``; ``shifts`` int8 ``[T]``, which are not part of the lengths.
    """
    moved = np.clip(scales.astype(np.int16) - 2 * shifts.astype(np.int16)[:, None], 1, NUM_SCALES - 1)
    lengths = level_bits()[np.where(scales == 0, 0, moved), np.clip(levels, -128, 127) - ESCAPE]
    totals: NDArray[np.float64] = lengths.sum(axis=0, dtype=np.float64)
    return totals


def codec_rows(
    bases: ModelBases, reader: TextReader, ids: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Medians of the whole codec on the KV of one text: MB of KV in the pool's type, per second of the
    thread."""
    (history,) = reader.read_histories([ids])
    num_tokens, shape = len(ids), bases.shape
    pool_bytes = num_tokens * bases.num_layers * (shape.k_token_bytes + shape.v_token_bytes)
    codec = SubspaceCodec(bases, reader.rotary)
    rows = []
    for limit in LIMITS:
        encode = partial(
            codec.encode,
            history.layers.__getitem__,
            start_token=0,
            num_tokens=num_tokens,
            attention=history.attention,
            max_damage=limit,
        )
        encoded = encode()
        decoder = codec.open(encoded.params, start_token=0, num_tokens=num_tokens)
        decode = partial(decoder.decode_all, encoded.blocks)
        rows.append(
            {
                "coder": "rans",
                "limit": limit,
                "num_tokens": num_tokens,
                "ratio": pool_bytes / encoded.num_bytes,
                "encode_mbs": pool_bytes / 1e6 / _median_s(encode, repeats),
                "decode_mbs": pool_bytes / 1e6 / _median_s(decode, repeats),
            }
        )
    return rows


def phase_rows(
    bases: ModelBases, model: Any, rotary: RotaryTable | None, ids: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Where the time of sampling and encoding a turn goes: medians in milliseconds of the thread.

    ``coefficients_ms``: the product of the turn's tokens with the basis, ``coder_ms``: the coder.
    ``rest_share``: all else of ``encode_ms`` over these two. Of that, ``vectors_ms`` are making vectors of
    the pool's KV, ``outside_ms`` the product that says what lies outside of the basis, and ``step_ms`` the
    search for the step. ``attention_ms`` is what comes before: the attention that the turn's tokens draw from
    64 of its queries. ``rest_share_with_attention`` counts it, too.
    """
    codec, rows = SubspaceCodec(bases, rotary), []
    for num_tokens, limit in product((100, len(ids)), LIMITS):
        captured = capture_attention(model, ids[:num_tokens])
        layers = [pooled(kv) for kv in captured.layers]
        keys = [kv.k for kv in layers]
        queries = captured.rows(sample_positions(0, num_tokens, KrulConfig().query_rows))
        samples: list[dict[str, float]] = []
        for _ in range(repeats + 1):
            with ExitStack() as patches:
                seconds = {
                    phase: patches.enter_context(_timed(owner, name))
                    for phase, owner, name in (
                        ("coefficients", GroupEncoders, "put_coefficients"),
                        ("coder", RansCoder, "encode"),
                        ("vectors", GroupEncoders, "vectors"),
                        ("outside", GroupEncoders, "lost_outside"),
                        ("step", SegmentSample, "choose_step"),
                    )
                }
                began = time.thread_time()
                attention = attention_drawn(queries, keys.__getitem__, 0, num_tokens)
                place: dict[str, Any] = {"start_token": 0, "num_tokens": num_tokens, "attention": attention}
                started = time.thread_time()
                sample = codec.sample(layers.__getitem__, **place)
                codec.encode(layers.__getitem__, **place, max_damage=limit, sample=sample)
                whole = time.thread_time() - started
            of_phase = {f"{phase}_ms": sum(parts) for phase, parts in seconds.items()}
            samples.append({"encode_ms": whole, **of_phase, "attention_ms": started - began})
        median = {name: 1e3 * statistics.median(each[name] for each in samples[1:]) for name in samples[0]}
        both = median["coefficients_ms"] + median["coder_ms"]
        rest = median["encode_ms"] - both
        shares = {
            "rest_share": rest / both,
            "rest_share_with_attention": (rest + median["attention_ms"]) / both,
        }
        rows.append({"num_tokens": num_tokens, "limit": limit, **median, **shares})
    return rows


@contextmanager
def _timed(owner: Any, name: str) -> Iterator[list[float]]:
    """Within this context, the list gets the thread's own seconds of each call of ``owner``'s function."""
    function, seconds = getattr(owner, name), list[float]()

    def timed(*args: Any, **options: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*args, **options)
        finally:
            seconds.append(time.thread_time() - started)

    with patch.object(owner, name, timed):
        yield seconds


def _median_s(run: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats + 1):
        # The thread's own seconds: what else runs on the machine does not count.
        started = time.thread_time()
        run()
        samples.append(time.thread_time() - started)
    return statistics.median(samples[1:])


_COLUMNS: Columns = {
    "limit in nats": cell("limit"),
    "coder": cell("coder"),
    "ratio to bf16": cell("ratio", "{:.1f}x"),
    "encode": cell("encode_mbs", "{:.0f} MB/s"),
    "decode": cell("decode_mbs", "{:.0f} MB/s"),
}


def codec_table(result: Result, path: Path | None) -> str:
    """How fast one core encodes and decodes."""
    notes = (
        f"SmolLM2, {result['rows'][0]['num_tokens']} tokens of text; MB of bf16 KV per second of one thread, "
        f"medians of {result['repeats']}. {result['machine']['cpu']}. {source(path)}"
    )
    return f"{table_of(_COLUMNS, result['rows'], left=(1,))}\n\n{notes}"


def run(given: argparse.Namespace) -> dict[str, Any]:
    """The codec on the KV of a text, where its time goes, and the coders alone."""
    # What is written and read per core.
    torch.set_num_threads(1)
    path = find_model(given.model, logger.info, option="--model")
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model = load_model(Path(path), torch.float32, "cpu")
    reader = TextReader(model)
    (ids,) = cut_pieces(tokenizer, own_texts(), given.tokens, most=1)
    bases = ModelBases.load(given.bases)
    coders = []
    for largest, smallest in MAGNITUDES:
        drawn = falling_levels(given.tokens, given.coefficients, largest, smallest)
        magnitudes = {"largest_magnitude": largest, "smallest_magnitude": smallest}
        coders.append(magnitudes | row(RansCoder(), *drawn, given.repeats))
    return {
        "repeats": given.repeats,
        "rows": codec_rows(bases, reader, ids, given.repeats),
        "phases": phase_rows(bases, model, reader.rotary, ids, given.repeats),
        "coders": coders,
    }


def show(result: Result, path: Path | None) -> str:
    """All tables of a result."""
    return "\n\n".join(
        (codec_table(result, path), *(plain_table(result[name]) for name in ("phases", "coders")))
    )


def main() -> int:
    parser = runner.make_parser("codec", __doc__, model="smollm2")
    add = parser.add_argument
    add("--bases", type=Path, required=True, help="file of `krul-sglang learn`")
    add("--tokens", type=int, default=1024, help="tokens of a block (1024)")
    add("--coefficients", type=int, default=800, help="coefficients of a token (800)")
    add("--repeats", type=int, default=15, help="timed runs of each row (15)")
    given = parser.parse_args()
    return runner.run(given, partial(run, given), show)


if __name__ == "__main__":
    sys.exit(main())
