"""Sums up a conversation's attention: distances between layers, and mass on the first and last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Sums over query rows, which add up over chunks and turns. On the CPU, in float64.

    With ``a_l,h`` the attention of one query row in layer ``l`` and head ``h``, a distribution over the
    tokens that the row sees:

    - ``squared_distance [H, L, L]``: sum over rows of ``||a_i,h - a_j,h||_2^2``; symmetric, zero diagonal.
      The Euclidean distance of Krul's Algorithm 1 (line 15), kept as its square because squares add up over
      rows.
    - ``ir_mass [L]``: sum over rows and heads of the attention on the initial and the recent tokens: of the
      ``s`` tokens that a row sees, the first ``ceil(s / 10)`` and the last ``ceil(s / 10)``.
    - ``num_rows``: rows per head.

    Raises:
        ValueError: if the shapes contradict each other.
    """

    squared_distance: torch.Tensor
    ir_mass: torch.Tensor
    num_rows: int

    def __post_init__(self) -> None:
        num_heads, num_layers, _ = self.squared_distance.shape
        if self.squared_distance.shape != (num_heads, num_layers, num_layers):
            raise ValueError(f"squared distances are [H, L, L], got {tuple(self.squared_distance.shape)}")
        if self.ir_mass.shape != (num_layers,):
            raise ValueError(f"{num_layers} layers, but masses of shape {tuple(self.ir_mass.shape)}")

    @classmethod
    def zero(cls, num_layers: int, num_heads: int) -> AttentionStatistics:
        """Statistics of no row, from which sums start."""
        return cls(
            torch.zeros(num_heads, num_layers, num_layers, dtype=torch.float64),
            torch.zeros(num_layers, dtype=torch.float64),
            0,
        )

    @property
    def num_layers(self) -> int:
        return len(self.ir_mass)

    @property
    def num_heads(self) -> int:
        return len(self.squared_distance)

    @property
    def nbytes(self) -> int:
        """Memory of the sums, in bytes."""
        return self.squared_distance.nbytes + self.ir_mass.nbytes

    def __add__(self, other: AttentionStatistics) -> AttentionStatistics:
        """The statistics of both sets of rows. Raises ValueError if layers or heads differ in number."""
        if self.squared_distance.shape != other.squared_distance.shape:
            raise ValueError(
                f"statistics of {self.num_layers} layers and {self.num_heads} heads cannot be added to "
                f"those of {other.num_layers} layers and {other.num_heads} heads"
            )
        return AttentionStatistics(
            self.squared_distance + other.squared_distance,
            self.ir_mass + other.ir_mass,
            self.num_rows + other.num_rows,
        )

    def distances(self) -> torch.Tensor:
        """The distance between the attention of two layers: float64 ``[L, L]``, symmetric, zero diagonal.

        The root of the mean squared distance of a row, then the mean over heads. Between 0 and ``sqrt(2)``.

        Raises:
            ValueError: if there is no row.
        """
        self._check_has_rows()
        return (self.squared_distance / self.num_rows).sqrt().mean(dim=0)

    def initial_recent_mass(self) -> torch.Tensor:
        """Mean attention on initial and recent tokens: float64 ``[L]``, in [0, 1].

        The mean is over **all rows kept** and all heads, each row with the tenths of the tokens that it sees
        itself. Krul's Algorithm 1 (lines 4-8) sums over all positions instead, with the first and last tenth
        of the whole sequence. For the last rows of a conversation, which decide about the next answer, both
        definitions mean the same tokens; an early row sees nearly only, or none of, the paper's tenths.

        Raises:
            ValueError: if there is no row.
        """
        self._check_has_rows()
        return self.ir_mass / (self.num_rows * self.num_heads)

    def _check_has_rows(self) -> None:
        if self.num_rows == 0:
            raise ValueError("no query row was reduced: there is no mean")


def concatenate_heads(parts: Sequence[AttentionStatistics]) -> AttentionStatistics:
    """Statistics of all heads, from tensor-parallel ranks that each have some heads of the same rows.

    Raises:
        ValueError: for no part at all, or parts of different layers or numbers of rows.
    """
    if not parts:
        raise ValueError("there are no heads to concatenate")
    first = parts[0]
    for part in parts:
        if (part.num_layers, part.num_rows) != (first.num_layers, first.num_rows):
            raise ValueError(
                f"heads of {part.num_rows} rows in {part.num_layers} layers do not belong to "
                f"{first.num_rows} rows in {first.num_layers} layers"
            )
    return AttentionStatistics(
        torch.cat([part.squared_distance for part in parts]),
        torch.stack([part.ir_mass for part in parts]).sum(dim=0),
        first.num_rows,
    )
