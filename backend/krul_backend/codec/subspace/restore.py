"""Restores groups of layers: tails in the same bases together, on a GPU by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from krul_backend.codec.interface import (
    KVBuffers,
    Restorer,
    TailGroup,
    TailReader,
    check_buffers,
    check_slots,
    in_batches,
)
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.subspace.coded_tail import CodedTail, decode_tails
from krul_backend.device import Device
from krul_backend.errors import CodecError

if TYPE_CHECKING:
    from krul_backend.codec.subspace.decoder import SubspaceDecoder

_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class GroupTarget:
    """A coded tail, and its slots in the pool.

    ``first_tokens``: of each layer of the group, not before that of the tail. ``slots``: int64, those of all
    tokens of the tail, all different.
    """

    tail: CodedTail
    first_tokens: Sequence[int]
    slots: torch.Tensor


class GroupRestore:
    """Tails of one group of layers, those of several segments of a model, on their way to the pool.

    ``begin_group`` makes it, and ``write`` ends it; on a GPU both on the same stream. On the host tails are
    decoded when they are written. ``damaged``: of each record, on a GPU; see ``check_written``.
    """

    damaged: torch.Tensor | None = None

    def __init__(self, targets: Sequence[GroupTarget]) -> None:
        """Raises CodecError if slots and tokens of a tail differ in number."""
        for target in targets:
            check_slots(target.tail.num_tokens, target.slots)
        self.targets = targets

    def write(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write all tails, once. ``buffers``: keys and values of each layer of the group, as for
        ``restore_layer``.

        Raises:
            CodecError: buffers are not of the codec's shape and dtype, or a block is damaged. Damage that a
                GPU finds is raised by ``check_written``.
        """
        for k_buffer, v_buffer in buffers:
            check_buffers(self.targets[0].tail.transform.shape, k_buffer, v_buffer)
        self._write(buffers)

    def _write(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        slots = torch.cat([target.slots for target in self.targets])
        for rows, chunk in decode_tails([target.tail for target in self.targets]):
            for layer, (kv, (k_buffer, v_buffer)) in enumerate(zip(chunk, buffers, strict=True)):
                for part in _wanted(self.targets, layer, rows):
                    of_chunk = slice(part.start - rows.start, part.stop - rows.start)
                    k_buffer.index_copy_(0, slots[part], kv.k[of_chunk].to(k_buffer.dtype))
                    v_buffer.index_copy_(0, slots[part], kv.v[of_chunk].to(v_buffer.dtype))


def check_written(begun: Sequence[GroupRestore]) -> None:
    """Wait until all these are written, if that is only queued, and see whether it worked: the calling thread
    waits once. On the host, damage is an error when they are written.

    Raises:
        CodecError: a block is damaged. What was written is undefined.
    """
    of_groups = [group.damaged for group in begun if group.damaged is not None]
    damaged = torch.cat(of_groups).nonzero() if of_groups else torch.empty(0)
    if len(damaged):
        raise CodecError(f"{len(damaged)} of the records of {len(begun)} groups are damaged")


def begin_group(targets: Sequence[GroupTarget], device: Device) -> GroupRestore:
    """Begin to decode tails of one group, of the same bases, for a pool on ``device``.

    Where ``can_fuse_groups`` holds, their blocks are copied to the device and decoded there, on the current
    stream, and this returns at once: the blocks must not change until that has run.

    Raises:
        CodecError: see ``GroupRestore``.
    """
    tail = targets[0].tail
    if can_fuse_groups(tail.transform.shape, device):
        from krul_backend.codec.subspace.triton_group_restore import TritonGroupRestore

        return TritonGroupRestore(targets, device)
    return GroupRestore(targets)


def _wanted(targets: Sequence[GroupTarget], layer: int, rows: slice) -> list[slice]:
    """The runs of ``rows`` that are written in a layer of the group. Rows are tokens of one tail after the
    other."""
    runs: list[slice] = []
    first_row = 0
    for target in targets:
        coded = target.tail
        start = first_row + target.first_tokens[layer] - coded.first_token
        first_row += coded.num_tokens
        start, end = max(start, rows.start), min(first_row, rows.stop)
        if start >= end:
            continue
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(slice(start, end))
    return runs


def can_fuse_groups(shape: LayerShape, device: Device) -> bool:
    """Return whether kernels decode tails for pools of this shape on ``device``.

    They do not on a CPU, or if elements of the pool are not bf16, fp16 or fp32.
    """
    return device.runs_triton and shape.dtype in _KERNEL_DTYPES


class SubspaceRestorer(Restorer["SubspaceDecoder"]):
    """Decodes the tails of a group of layers, those of all segments in the same bases.

    The first layer of a group that has a tail brings the tails of the whole group.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self._begun: list[GroupRestore] = []
        self._read: set[tuple[TailReader[SubspaceDecoder], int]] = set()

    def groups(self, layer: int, readers: Sequence[TailReader[SubspaceDecoder]]) -> list[TailGroup]:
        alike: dict[str, list[TailReader[SubspaceDecoder]]] = {}
        for reader in readers:
            if reader.has_tail(layer):
                alike.setdefault(reader.decoder.bases_digest, []).append(reader)
        return [
            _CodedGroups(self, together, layer)
            for of_bases in alike.values()
            for together in in_batches(of_bases, _num_pool_bytes)
        ]

    @property
    def has_decoded(self) -> bool:
        return bool(self._begun)

    def check(self) -> None:
        check_written(self._begun)

    def begin(self, layer: int, readers: Sequence[TailReader[SubspaceDecoder]]) -> GroupRestore | None:
        """Begin to restore the group of a layer; None if an earlier layer has brought it."""
        targets = [self._target(reader, layer) for reader in readers if self._is_new(reader, layer)]
        if not targets:
            return None
        self._begun.append(begin_group(targets, self.device))
        return self._begun[-1]

    def _is_new(self, reader: TailReader[SubspaceDecoder], layer: int) -> bool:
        key = reader, reader.decoder.group_of(layer)
        is_new = key not in self._read
        self._read.add(key)
        return is_new

    def _target(self, reader: TailReader[SubspaceDecoder], layer: int) -> GroupTarget:
        """The tail of a layer's group, of a checked block, and where it goes.

        Raises:
            CodecError: blocks that the codec cannot have written.
        """
        decoder = reader.decoder
        group = decoder.group_of(layer)
        layers = decoder.stored_as.groups[group]
        # Heads never grow: what is decoded begins with the tail of the last layer.
        last = layers[-1]
        (source,) = decoder.sources(layer)
        block = torch.from_numpy(reader.end_of_block(source, reader.num_tail_bytes(source, last)))
        tail = decoder.tail(group, block, reader.first_row(last), reader.end_row)
        first_rows = [reader.first_row(each) for each in layers]
        return GroupTarget(tail, first_rows, reader.slots[reader.num_head_rows(last) :])


def _num_pool_bytes(reader: TailReader[SubspaceDecoder]) -> int:
    """The bytes of a segment's tokens in a layer of the pool."""
    shape = reader.decoder.shape
    return reader.num_tokens * (shape.k_token_bytes + shape.v_token_bytes)


class _CodedGroups(TailGroup):
    """Tails in the same bases, which are decoded together. Later layers of a group have nothing to do."""

    is_decoded = decodes_early = True

    def __init__(
        self, restorer: SubspaceRestorer, readers: Sequence[TailReader[SubspaceDecoder]], layer: int
    ) -> None:
        self.blocks = [reader.block(source) for reader in readers for source in reader.decoder.sources(layer)]
        self._restorer = restorer
        self._readers = readers
        self._layer = layer
        self._begun: GroupRestore | None = None

    def fetch(self, device: Device) -> None:
        # Asked again, nothing is new.
        self._begun = self._restorer.begin(self._layer, self._readers) or self._begun

    def restore(self, pool: KVBuffers) -> None:
        if self._begun is not None:
            decoder = self._readers[0].decoder
            layers = decoder.stored_as.groups[decoder.group_of(self._layer)]
            self._begun.write([pool.buffers(layer) for layer in layers])
