"""Which layers may be shared: those that look at the beginning and the end of the conversation (I-R)."""

from __future__ import annotations

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.errors import StrategyError
from krul_backend.strategy.strategy import Pair


def check_gamma(gamma: float) -> None:
    """Raises StrategyError unless the threshold is in [0, 1]."""
    if not 0 <= gamma <= 1:
        raise StrategyError(f"the I-R threshold gamma is {gamma}: a number from 0 to 1 is needed")


def initial_recent_layers(statistics: AttentionStatistics, gamma: float) -> list[int]:
    """Layers whose mean attention on the first and last 10% of tokens is at least ``gamma``, ascending.

    Krul, section 4.2 and Algorithm 1, lines 1 to 9: a layer is left out if that mean is below gamma. The
    paper averages over all heads and all positions of the conversation. Here the mean runs over all heads
    and over the query rows that were kept, and the 10% are those of the tokens that the row sees. The
    number depends much on which rows these are, so a threshold is only good for one way of keeping rows.
    Without any row no layer is known to be I-R.
    """
    if statistics.num_rows == 0:
        return []
    mass = statistics.initial_recent_mass().tolist()
    return [layer for layer, share in enumerate(mass) if share >= gamma]


def pair_distances(statistics: AttentionStatistics, layers: list[int]) -> list[tuple[float, Pair]]:
    """``(distance, (i, j))`` of all pairs ``i < j`` of the given layers, in ascending order.

    Equal distances are ordered by ``i``, then by ``j``, so that every rank takes the same pairs. Empty if no
    query row was kept.
    """
    if statistics.num_rows == 0:
        return []
    distances = statistics.distances().tolist()
    return sorted((distances[i][j], (i, j)) for i in layers for j in layers if i < j)
