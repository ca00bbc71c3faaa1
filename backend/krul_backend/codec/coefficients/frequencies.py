"""Computes how often each symbol of a scale class is expected, in integers that are the same on every host.

A level is a transform coefficient ``c`` quantized with a dead zone: ``|level| = floor(|c| / step + 0.4)``. A
scale class is a distribution of levels, given by the mean of their magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache

NUM_CLASSES = 64
"""Class 0 is for coefficients that are always zero; classes 1 to 63 have a table each."""

PROBABILITY_BITS = 12
TOTAL_FREQUENCY = 1 << PROBABILITY_BITS

SMALLEST_MEAN_LOG2 = -8
LARGEST_MEAN_LOG2 = 8

ROUNDING = 0.4
"""Added to magnitudes in steps before they are rounded down: below 0.5, so that zero has a wider range."""

LARGEST_SYMBOL = 126
"""No alphabet goes beyond it: a symbol and the escape fit in one byte."""

FINE_MEAN = 8
"""Above this mean a level is coded as a symbol and its lowest bits, which are nearly uniform."""

COARSE_MEAN = 2
"""The same for the few coefficients of a record whose lowest bits cost nothing: there are more of them."""

_ROUNDING = Decimal(str(ROUNDING))
_CONTEXT = Context(prec=30, rounding=ROUND_HALF_EVEN)
_BISECTION_STEPS = 60


@dataclass(frozen=True)
class Shape:
    """A symmetric distribution of coefficients: a mixture of Laplacians.

    ``components`` are pairs of a weight and a scale, both relative to those of the others.
    """

    name: str
    components: tuple[tuple[int, int], ...]


LAPLACE = Shape("laplace", ((1, 1),))
HEAVY_TAILED = Shape("heavy-tailed", ((3, 1), (1, 3)))

SHAPE = LAPLACE
"""The shape of the tables that blocks are coded with. Another one is another version of the coder."""


@dataclass(frozen=True)
class ClassFrequencies:
    """The alphabet of one scale class.

    ``mean`` is that of the magnitude of levels; ``rate`` is the quantizer's step over the scale of the
    shape's first component. A level is ``symbol * 2^low_bits + low``. Symbols ``-largest - 1`` (below: the
    escape) to ``largest``: ``frequencies`` are those of the escape, then of ``-largest`` to ``largest``. They
    sum to 4096, and none is 0.
    """

    mean: float
    rate: float
    low_bits: int
    largest: int
    frequencies: tuple[int, ...]


@cache
def class_frequencies(shape: Shape, largest_mean: int = FINE_MEAN) -> tuple[ClassFrequencies, ...]:
    """The alphabets of classes 1 to 63, with means on a geometric grid from ``2^-8`` to ``2^8``.

    Symbols have a mean magnitude of at most ``largest_mean``: what is above goes to the lowest bits.
    """
    with localcontext(_CONTEXT):
        octaves = LARGEST_MEAN_LOG2 - SMALLEST_MEAN_LOG2
        log_two = Decimal(2).ln()
        exponents = (Decimal(octaves * index) / (NUM_CLASSES - 2) for index in range(NUM_CLASSES - 1))
        means = [(log_two * (SMALLEST_MEAN_LOG2 + exponent)).exp() for exponent in exponents]
        return tuple(_alphabet(shape, mean, largest_mean) for mean in means)


def _alphabet(shape: Shape, mean: Decimal, largest_mean: int) -> ClassFrequencies:
    low_bits = 0
    while mean > largest_mean << low_bits:
        low_bits += 1
    width = 1 << low_bits
    rate = _rate_of(shape, mean)
    # at_least[h]: the probability of a level of at least h * width, for h >= 1.
    at_least = [Decimal(0)]
    while len(at_least) <= LARGEST_SYMBOL + 1:
        at_least.append(_at_least(shape, rate, len(at_least) * width))
    # Symbol h >= 1 covers the levels from h * width, symbol -h those from -h * width to -(h - 1) * width - 1.
    positive = {h: at_least[h] - at_least[h + 1] for h in range(1, LARGEST_SYMBOL + 1)}
    largest = 1
    # A pair of symbols costs all others 2 slots, 0.0007 bits per level, and saves 16 bits where it occurs.
    while largest < LARGEST_SYMBOL and positive[largest + 1] * TOTAL_FREQUENCY * 11 >= 1:
        largest += 1
    probabilities = [2 * at_least[largest + 1]]
    for symbol in range(-largest, largest + 1):
        probabilities.append(_between(shape, rate, symbol * width, (symbol + 1) * width - 1))
    return ClassFrequencies(float(mean), float(rate), low_bits, largest, _rounded(probabilities))


def _at_least(shape: Shape, rate: Decimal, level: int) -> Decimal:
    """The probability of a level of at least ``level``, which is positive."""
    total = sum(weight for weight, _ in shape.components)
    start = (level - _ROUNDING) * rate
    return sum((weight * (-start / scale).exp() for weight, scale in shape.components), Decimal(0)) / (
        2 * total
    )


def _between(shape: Shape, rate: Decimal, first: int, last: int) -> Decimal:
    """The probability of the levels ``first`` to ``last``, which are of one sign or begin at zero."""
    if first > 0:
        return _at_least(shape, rate, first) - _at_least(shape, rate, last + 1)
    if last < 0:
        return _at_least(shape, rate, -last) - _at_least(shape, rate, 1 - first)
    return 1 - _at_least(shape, rate, 1) - _at_least(shape, rate, last + 1)


def _mean_of(shape: Shape, rate: Decimal) -> Decimal:
    """The mean magnitude of levels: the sum of the probabilities of at least 1, 2, 3 ..."""
    total = sum(weight for weight, _ in shape.components)
    mean = Decimal(0)
    for weight, scale in shape.components:
        mean += weight * (-(1 - _ROUNDING) * rate / scale).exp() / (1 - (-rate / scale).exp())
    return mean / total


@cache
def _rate_of(shape: Shape, mean: Decimal) -> Decimal:
    """The quantizer's step over the scale of the first component, for levels of this mean magnitude."""
    low, high = Decimal(-12), Decimal(6)
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        if _mean_of(shape, middle.exp()) > mean:
            low = middle
        else:
            high = middle
    return high.exp()


def _rounded(probabilities: list[Decimal]) -> tuple[int, ...]:
    """Positive integers that sum to 4096 and code these probabilities in the fewest bits."""
    weights = [int(probability * 2**80) for probability in probabilities]
    frequencies = [max(1, weight * TOTAL_FREQUENCY >> 80) for weight in weights]
    # One slot more saves about weight / (frequency + 1/2), one fewer costs weight / (frequency - 1/2).
    while sum(frequencies) < TOTAL_FREQUENCY:
        gains = [
            weight // (2 * frequency + 1) for weight, frequency in zip(weights, frequencies, strict=True)
        ]
        frequencies[gains.index(max(gains))] += 1
    while sum(frequencies) > TOTAL_FREQUENCY:
        costs = [
            weight // (2 * frequency - 1) if frequency > 1 else 2**90
            for weight, frequency in zip(weights, frequencies, strict=True)
        ]
        frequencies[costs.index(min(costs))] -= 1
    return tuple(frequencies)
