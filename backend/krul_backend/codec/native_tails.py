"""Writes the natively stored tails of several segments into the KV pool at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from krul_backend.codec.unit import NativeLayer
from krul_backend.device import Device

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NativeTail:
    """Tokens ``[first_token, end_token)`` of a segment's layer, which ``unit`` stored.

    Its bytes are the end of the block from the group of ``first_token`` on: ``[num_bytes]``.
    """

    unit: NativeLayer
    first_token: int
    end_token: int

    @property
    def num_bytes(self) -> int:
        layout = self.unit.layouts[0]
        return layout.num_bytes - layout.group_start(self.first_token // layout.group_size)

    def row_starts(self) -> tuple[Rows, Rows]:
        """The first byte of each token's keys and of its values, counted from the first byte of the tail."""
        layout, shape = self.unit.layouts[0], self.unit.place.shape
        tokens = np.arange(self.first_token, self.end_token)
        group, row = np.divmod(tokens, layout.group_size)
        first_byte = layout.group_start(self.first_token // layout.group_size)
        record = group * layout.group_record.num_bytes - first_byte
        # Only the record of the last group may be shorter, and start its sections elsewhere.
        is_last = group == layout.num_tokens // layout.group_size
        full, last = layout.group_record.byte_offsets(), layout.last_record.byte_offsets()
        k = record + np.where(is_last, last["k"], full["k"]) + row * shape.k_token_bytes
        v = record + np.where(is_last, last["v"], full["v"]) + row * shape.v_token_bytes
        return k, v


class NativeTails:
    """Says where the rows of several tails lie when the tails lie one behind the other in one buffer.

    All are stored by one model: ``unit.place.shape`` is the same. The same object serves every layer whose
    tails are equal. ``num_bytes`` is the size of the buffer.
    """

    def __init__(self, tails: Sequence[NativeTail], device: Device) -> None:
        shape = self._shape = tails[0].unit.place.shape
        starts: list[tuple[Rows, Rows]] = []
        self.num_bytes = 0
        for tail in tails:
            k, v = tail.row_starts()
            starts.append((k + self.num_bytes, v + self.num_bytes))
            self.num_bytes += tail.num_bytes
        k_starts, v_starts = (np.concatenate(of_tails) for of_tails in zip(*starts, strict=True))
        # Rows are gathered in pieces of the largest size at whose multiples all of them start: whole rows,
        # unless keys and values differ in size, or rows are no multiple of the alignment.
        self._piece_bytes = math.gcd(
            shape.k_token_bytes,
            shape.v_token_bytes,
            self.num_bytes,
            int(np.gcd.reduce(k_starts)),
            int(np.gcd.reduce(v_starts)),
        )
        self._k_pieces = self._pieces(k_starts, shape.k_token_bytes, device)
        self._v_pieces = self._pieces(v_starts, shape.v_token_bytes, device)

    def restore(
        self, joined: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write all rows to their slots of one layer, keys and values with one gather and one scatter each.

        ``joined``: uint8 ``[num_bytes]``, the tails back to back. ``k_buffer [num_slots, H, Dk]`` and
        ``v_buffer [num_slots, H, Dv]`` in the pool's dtype are written at ``slots`` (int64, as many as there
        are tokens in all tails, on the same device). On a GPU the work is queued on the current stream.
        """
        # As the widest numbers that fit, of which a CPU copies one at a time.
        wide = torch.int64 if self._piece_bytes % 8 == 0 else self._shape.dtype
        pieces = joined.view(-1, self._piece_bytes).view(wide)
        for buffer, wanted in ((k_buffer, self._k_pieces), (v_buffer, self._v_pieces)):
            targets = buffer.view(len(buffer), -1).view(wide)
            # [T * pieces per row, numbers of a piece] -> [T, numbers of a row]
            rows = pieces.index_select(0, wanted).view(-1, targets.shape[1])
            targets.index_copy_(0, slots, rows)

    def _pieces(self, starts: Rows, row_bytes: int, device: Device) -> torch.Tensor:
        """The pieces that rows at ``starts`` consist of: int64 ``[T * pieces per row]``."""
        per_row = np.arange(row_bytes // self._piece_bytes)
        pieces = (starts[:, None] // self._piece_bytes + per_row).ravel()
        host = device.host_empty(pieces.shape, torch.int64)
        return device.upload(host.copy_(torch.from_numpy(pieces)))
