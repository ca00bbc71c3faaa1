"""Small pieces of evidence for the tests of strategies."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.pairs.selectors import Evidence


def make_statistics(distances: list[list[float]], mass: list[float]) -> AttentionStatistics:
    """Statistics of one row and one head with exactly these distances and I-R masses."""
    return AttentionStatistics(
        squared_distance=torch.tensor(distances, dtype=torch.float64).square()[None],
        ir_mass=torch.tensor(mass, dtype=torch.float64),
        num_rows=1,
    )


@st.composite
def attention_evidence(draw: st.DrawFn, max_layers: int = 9) -> Evidence:
    """Symmetric distances with many ties, and I-R masses around a half."""
    num_layers = draw(st.integers(1, max_layers))
    distances = [[0.0] * num_layers for _ in range(num_layers)]
    for i in range(num_layers):
        for j in range(i):
            distances[i][j] = distances[j][i] = draw(st.integers(0, 20)) / 8
    mass = draw(st.lists(st.sampled_from([0.2, 0.5, 0.8]), min_size=num_layers, max_size=num_layers))
    return Evidence(num_layers, make_statistics(distances, mass))
