"""Sampled positions are spread evenly and have the last one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from krul_backend.attention.rows import sample_positions


@given(start=st.integers(0, 1000), num_tokens=st.integers(1, 300), count=st.integers(1, 400))
def test_sample_positions_are_even_and_have_the_last(start: int, num_tokens: int, count: int) -> None:
    positions = sample_positions(start, start + num_tokens, count)
    assert positions.dtype is torch.int64
    assert len(positions) == min(count, num_tokens)
    assert int(positions[-1]) == start + num_tokens - 1
    gaps = torch.diff(positions, prepend=torch.tensor([start - 1]))
    assert int(gaps.min()) >= 1
    assert int(gaps.max() - gaps.min()) <= 1


@pytest.mark.parametrize(("start", "end", "count"), [(5, 5, 1), (5, 4, 1), (0, 5, 0)])
def test_sample_positions_of_nothing(start: int, end: int, count: int) -> None:
    with pytest.raises(ValueError, match="cannot place"):
        sample_positions(start, end, count)
