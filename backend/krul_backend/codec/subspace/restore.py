"""Restores groups of layers: tails in the same bases together, on a GPU by kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from krul_backend.codec.coefficients.scales import RECORD_TOKENS
from krul_backend.codec.interface import (
    KVBuffers,
    Restorer,
    TailGroup,
    TailReader,
    check_buffers,
    check_slots,
    in_batches,
)
from krul_backend.codec.layout import LayerShape, put_rows
from krul_backend.codec.subspace.coded_tail import CodedTail, decode_tails
from krul_backend.device import Device
from krul_backend.errors import CodecError

if TYPE_CHECKING:
    from krul_backend.codec.subspace.decoder import SubspaceDecoder

MOST_WAVE_BYTES = 64 << 20
"""Blocks and coefficients of groups that a GPU decodes at once. Each of a record's coefficients waits for the
one before, so a group takes about as long whether it is alone or with others."""

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

    ``begin_groups`` makes it, and ``write`` ends it; on a GPU both on the same stream. On the host tails are
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
            CodecError: buffers are not of the codec's shape, and of its dtype or fp8, or a block is damaged.
                Damage that a GPU finds is raised by ``check_written``.
        """
        for k_buffer, v_buffer in buffers:
            check_buffers(self.targets[0].tail.transform.shape, k_buffer, v_buffer)
        self._write(buffers)

    def _write(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        slots = torch.cat([target.slots for target in self.targets])
        for rows, chunk in decode_tails([target.tail for target in self.targets]):
            for layer, (kv, (k_buffer, v_buffer)) in enumerate(zip(chunk, buffers, strict=True)):
                for part in wanted_rows(self.targets, layer, rows):
                    of_chunk = slice(part.start - rows.start, part.stop - rows.start)
                    put_rows(k_buffer, slots[part], kv.k[of_chunk])
                    put_rows(v_buffer, slots[part], kv.v[of_chunk])


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


def begin_groups(groups: Sequence[Sequence[GroupTarget]], device: Device) -> list[GroupRestore]:
    """Begin to decode tails of some groups, those of each in the same bases, for a pool on ``device``.

    Where ``can_fuse_groups`` holds, their blocks are copied to the device and decoded there, those of all
    groups in one launch on the current stream, and this returns at once: the blocks must not change until
    that has run.

    Raises:
        CodecError: see ``GroupRestore``.
    """
    if can_fuse_groups(groups[0][0].tail.transform.shape, device):
        from krul_backend.codec.subspace.triton_group_restore import begin_wave

        return [*begin_wave(groups, device)]
    return [GroupRestore(targets) for targets in groups]


def in_waves(groups: Iterable[Sequence[GroupTarget]]) -> Iterator[list[Sequence[GroupTarget]]]:
    """Runs of ``groups`` to begin together: the blocks and the coefficients of a run take at most
    ``MOST_WAVE_BYTES``, or it is a single one."""
    wave: list[Sequence[GroupTarget]] = []
    num_bytes = 0
    for targets in groups:
        of_group = sum(map(_decoded_num_bytes, targets))
        if wave and num_bytes + of_group > MOST_WAVE_BYTES:
            yield wave
            wave, num_bytes = [], 0
        wave.append(targets)
        num_bytes += of_group
    if wave:
        yield wave


def _decoded_num_bytes(target: GroupTarget) -> int:
    tail = target.tail
    num_tokens = tail.end_token - tail.first_record * RECORD_TOKENS
    return tail.block.numel() + 4 * num_tokens * int(np.count_nonzero(tail.scales))


def wanted_rows(targets: Sequence[GroupTarget], layer: int, rows: slice) -> list[slice]:
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
        self._made: dict[_CodedGroups, list[GroupTarget]] = {}
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

    def begin(self, groups: Sequence[_CodedGroups]) -> None:
        """Begin to restore the first of these groups, and with it as many of the others as make a wave.
        Nothing if earlier layers have brought the first one."""
        if not can_fuse_groups(groups[0].readers[0].decoder.shape, self.device):
            # Each is decoded when it is written.
            groups = groups[:1]
        fresh: list[_CodedGroups] = []
        wave = next(in_waves(self._fresh_targets(groups, fresh)), [])
        for group, begun in zip(fresh, begin_groups(wave, self.device) if wave else (), strict=False):
            self._read.update(group.keys)
            self._made.pop(group)
            group.begun = begun
            self._begun.append(begun)

    def _fresh_targets(
        self, groups: Sequence[_CodedGroups], fresh: list[_CodedGroups]
    ) -> Iterator[list[GroupTarget]]:
        """The tails that no earlier layer has brought, of those of ``groups`` that have any; these are added
        to ``fresh``. None if the first one has none."""
        read = set(self._read)
        for group in groups:
            new = [reader for reader, number in group.keys if (reader, number) not in read]
            if not new and not fresh:
                return
            if new:
                read.update(group.keys)
                fresh.append(group)
                if group not in self._made:
                    # The first one of the next wave is made with this one.
                    self._made[group] = [self._target(reader, group.layer) for reader in new]
                yield self._made[group]

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
        self.readers = readers
        self.layer = layer
        self.begun: GroupRestore | None = None
        self._restorer = restorer

    @property
    def keys(self) -> list[tuple[TailReader[SubspaceDecoder], int]]:
        """Names each tail by its reader and its group of layers; a tail is decoded once."""
        return [(reader, reader.decoder.group_of(self.layer)) for reader in self.readers]

    def fetch(self, device: Device, later: Sequence[TailGroup] = ()) -> None:
        # Asked again, nothing is new.
        coded = [each for each in later if isinstance(each, _CodedGroups)]
        self._restorer.begin([self, *(each for each in coded if each._restorer is self._restorer)])

    def restore(self, pool: KVBuffers) -> None:
        if self.begun is not None:
            decoder = self.readers[0].decoder
            layers = decoder.stored_as.groups[decoder.group_of(self.layer)]
            self.begun.write([pool.buffers(layer) for layer in layers])
