"""Which rows of a prompt to keep."""

from __future__ import annotations

import torch


def sample_positions(start: int, end: int, count: int) -> torch.Tensor:
    """``count`` positions of the prompt chunk ``[start, end)``, evenly spaced, with the last one.

    int64 ``[min(count, end - start)]`` on the CPU, ascending, distinct. On the bundled reference model
    squared distances of rows vary much from one row to the next and hardly with the place in the
    conversation, so no placement beats even spacing; half of the rows at the end is clearly worse.

    Raises:
        ValueError: if the chunk is empty or ``count`` not positive.
    """
    num_tokens = end - start
    if num_tokens <= 0 or count <= 0:
        raise ValueError(f"cannot place {count} rows in the chunk [{start}, {end})")
    count = min(count, num_tokens)
    return start + (torch.arange(1, count + 1) * num_tokens) // count - 1
