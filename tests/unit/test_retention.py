from __future__ import annotations

from math import nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.options import CodecOptions
from krul_backend.codec.pairs.shared_pair import retained_counts, retained_tokens
from krul_backend.errors import CodecError


@settings(max_examples=100)
@given(
    num_tokens=st.integers(1, 80),
    num_heads=st.integers(1, 3),
    amount=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    num_first=st.integers(0, 3),
    start_token=st.integers(0, 4),
    seed=st.integers(0, 1000),
)
def test_counts_and_tokens_equal_a_plain_loop(
    num_tokens: int, num_heads: int, amount: float, num_first: int, start_token: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few different numbers, so that there are ties.
    distances = torch.randint(0, 12, (num_tokens, num_heads), generator=generator) / 16
    options = CodecOptions(retained_amount=amount, num_first_tokens=num_first)
    counts = retained_counts(distances, start_token, options)
    tokens = retained_tokens(distances, counts, start_token, options)
    first = [token for token in range(num_tokens) if start_token + token < num_first]
    expected = []
    for head in range(num_heads):
        d = distances[:, head].tolist()
        least = max(d) - (max(d) - min(d)) * amount + 1e-7
        chosen = {token for token in range(num_tokens) if d[token] > least}
        expected.append(sorted(chosen | set(first)))
    assert [part.tolist() for part in tokens.split(counts)] == expected


def test_the_most_different_tokens_are_kept() -> None:
    distances = torch.tensor([0.5, 0.1, 0.48, 0.3]).unsqueeze(1)
    options = CodecOptions(retained_amount=0.1, num_first_tokens=0)
    counts = retained_counts(distances, 0, options)
    assert retained_tokens(distances, counts, 0, options).tolist() == [0, 2]


def test_equal_distances_and_no_amount_retain_nothing() -> None:
    same = torch.full((10, 2), 0.5)
    for options in (CodecOptions(num_first_tokens=0), CodecOptions(num_first_tokens=0, retained_amount=0.0)):
        assert retained_counts(same, 0, options) == (0, 0)
        assert retained_tokens(same, (0, 0), 0, options).tolist() == []


def test_impossible_options_are_refused() -> None:
    wrong = {"group_size": [0], "num_first_tokens": [-1], "slerp_t": [1.1, nan], "retained_amount": [-0.1]}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(CodecError, match=name):
                CodecOptions(**{name: value})  # type: ignore[arg-type]
