"""Levels as a transform leaves them: Laplacian, of a scale that falls over the coefficients."""

from __future__ import annotations

import numpy as np

from krul_backend.codec.coefficients.interface import Classes, Levels
from krul_backend.codec.coefficients.tables import standard_tables


def falling_levels(
    num_tokens: int, num_coefficients: int, largest_scale: float, smallest_scale: float, seed: int = 0
) -> tuple[Levels, Classes]:
    """Levels int16 ``[T, R]`` whose scales fall geometrically, and the classes uint8 ``[R]`` of these scales."""
    scales = np.geomspace(largest_scale, smallest_scale, num_coefficients)
    magnitudes = np.random.default_rng(seed).laplace(size=(num_tokens, num_coefficients)) * scales
    levels = (np.sign(magnitudes) * np.floor(np.abs(magnitudes) + 0.4)).astype(np.int16)
    # The mean of a quantized Laplacian: all probabilities of at least 1, 2, 3 ...
    means = np.exp(-0.6 / scales) / (1 - np.exp(-1 / scales))
    return levels, standard_tables().class_of(means)
