"""Puts the model's rotary embedding on keys and takes it off again, by a table of its angles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from krul_backend.errors import CodecError


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """The rotary position embedding of one model (Su et al., RoFormer, equation 34).

    ``cos`` and ``sin`` ``[max_positions, rotary_dim / 2]`` fp32 hold one angle per position and channel pair.
    They include the model's scaling of angles (linear, llama3, yarn) and yarn's attention factor.
    ``is_neox``: channel ``c`` pairs with ``c + rotary_dim / 2``; otherwise with its neighbour, ``2c`` with
    ``2c + 1``. Channels from ``rotary_dim`` on are not touched.

    Raises:
        ValueError: the tables are not two equal fp32 matrices.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    is_neox: bool

    def __post_init__(self) -> None:
        if self.cos.ndim != 2 or self.cos.shape != self.sin.shape:
            raise ValueError(f"cos {tuple(self.cos.shape)} and sin {tuple(self.sin.shape)} are not one table")
        if self.cos.dtype is not torch.float32 or self.sin.dtype is not torch.float32:
            raise ValueError(f"a rotary table is fp32, got cos {self.cos.dtype} and sin {self.sin.dtype}")

    @property
    def max_positions(self) -> int:
        return self.cos.shape[0]

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Put the embedding on ``x [T, H, D]`` of any dtype at ``positions [T]`` int64, absolute.

        Returns fp32 ``[T, H, D]`` on the device of ``x``.

        Raises:
            IndexError: a position is not in the table.
        """
        cos, sin = self._angles(x, positions)
        return self._turn(x, cos, sin)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[T, rotary_dim / 2]`` at ``positions [T]``, on the table's device."""
        index = positions.to(self.cos.device)
        return self.cos[index], self.sin[index]

    def unrotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Inverse of ``rotate``: the same shapes, dtypes and errors.

        The 2 x 2 matrix of a channel pair is a rotation times a factor (yarn's), so its inverse is its
        transpose over ``cos^2 + sin^2``.
        """
        turned = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self.turn_in_place(turned, *self.inverse(positions))
        return turned

    def inverse(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[T, rotary_dim / 2]`` of the turns that take the embedding off at ``positions
        [T]``, over yarn's factor; on the table's device."""
        cos, sin = self.angles(positions)
        squared_factor = cos.square() + sin.square()
        return cos / squared_factor, -sin / squared_factor

    def turn_in_place(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Turn ``x [T, any, D]`` fp32 itself, of any number of dimensions, by angles as of ``inverse``."""
        shape = (len(x), *(1,) * (x.ndim - 2), -1)
        self._turn_in_place(x, *(angle.to(x.device).view(shape) for angle in (cos, sin)))

    def move(self, x: torch.Tensor, positions: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Turn ``x``, which was rotated at ``positions``, as if it had been rotated at the positions ``to``.

        The same shapes, dtypes and errors as those of ``rotate``. Rotations add up: one by the difference of
        both angles is enough, and yarn's factor stays as it is.
        """
        cos, sin = self._angles(x, positions)
        to_cos, to_sin = self._angles(x, to)
        squared_factor = cos.square() + sin.square()
        return self._turn(
            x, (to_cos * cos + to_sin * sin) / squared_factor, (to_sin * cos - to_cos * sin) / squared_factor
        )

    def pull_back(self, gradients: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Gradients with respect to ``x`` from those with respect to ``rotate(x, positions)``.

        The same shapes, dtypes and errors as those of ``rotate``, which is linear: this is its transpose.
        """
        cos, sin = self._angles(gradients, positions)
        return self._turn(gradients, cos, -sin)

    def _angles(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine ``[T, 1, rotary_dim / 2]`` on the device of ``x``, with as many dimensions."""
        shape = (len(positions), *(1,) * (x.ndim - 2), -1)
        cos, sin = (angle.view(shape).to(x.device) for angle in self.angles(positions))
        return cos, sin

    def _turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        self._turn_in_place(turned, cos, sin)
        return turned

    def _turn_in_place(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        first, second = self._channel_pairs(x)
        from_first = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(from_first)

    def _channel_pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views ``[T, H, rotary_dim / 2]`` of the two channels of each pair."""
        if self.is_neox:
            half = self.rotary_dim // 2
            return x[..., :half], x[..., half : self.rotary_dim]
        return x[..., 0 : self.rotary_dim : 2], x[..., 1 : self.rotary_dim : 2]


def check_positions(start_token: int, num_tokens: int, rotary: RotaryTable | None) -> None:
    """Raises CodecError unless there are tokens, and ``rotary`` has a row for each of their positions."""
    if start_token < 0 or num_tokens < 1:
        raise CodecError(f"{num_tokens} tokens from position {start_token} are no segment")
    if rotary is not None and start_token + num_tokens > rotary.max_positions:
        raise CodecError(
            f"a segment ends at position {start_token + num_tokens}, the model's rotary embedding at "
            f"{rotary.max_positions}"
        )
