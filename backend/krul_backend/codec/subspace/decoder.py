"""The blocks of one segment: where tails of them begin, and how they are decoded."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import cached_property

import torch

from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.coefficients.scales import RECORD_TOKENS, base_scales, scales_of
from krul_backend.codec.interface import SegmentDecoder
from krul_backend.codec.layout import LayerKV, empty_kv
from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.codec.subspace.coded_tail import CodedTail, GroupTransform, SegmentTokens, decode_tails
from krul_backend.codec.subspace.parameters import SubspaceParameters
from krul_backend.codec.subspace.restore import SubspaceRestorer
from krul_backend.errors import CodecError
from krul_backend.strategy import LayerGroups


class SubspaceDecoder(SegmentDecoder):
    """Decodes the blocks of one segment. ``SubspaceCodec.open`` makes it.

    The block of a group is that of its first layer; the other layers of the group have none of their own.
    ``transforms``: of each group. ``stored_as``: the groups. ``damage``: see ``EncodedSegment``. ``shape``:
    of each layer's KV in the pool. ``bases_digest``: of the bases, see ``ModelBases``.
    """

    restorer = SubspaceRestorer
    uses_cores = True

    def __init__(
        self,
        bases: ModelBases,
        transforms: Sequence[GroupTransform],
        coder: RansCoder,
        parameters: SubspaceParameters,
        segment: SegmentTokens,
    ) -> None:
        super().__init__(bases.num_layers, segment.start_token, segment.num_tokens, RECORD_TOKENS)
        self.stored_as: LayerGroups = bases.layer_groups
        self.damage = parameters.damage
        self.shape = bases.shape
        self.bases_digest = parameters.bases_digest
        self._bases = bases
        self._transforms = transforms
        self._coder = coder
        self._parameters = parameters
        self._segment = segment

    def group_of(self, layer: int) -> int:
        """The group that a layer belongs to."""
        self._check_layer(layer)
        return bisect(self.stored_as.ends, layer)

    def sources(self, layer: int) -> tuple[int, ...]:
        return (self.stored_as.groups[self.group_of(layer)].start,)

    def tail_start(self, layer: int, first_token: int) -> int:
        record, group = first_token // RECORD_TOKENS, self.group_of(layer)
        if record == 0 or not self.whole_num_bytes(layer):
            return 0
        sizes = self._parameters.groups[group].record_num_bytes
        return self._first_tokens_num_bytes(group) + int(sizes[:record].sum())

    def whole_num_bytes(self, layer: int) -> int:
        return self.group_num_bytes[self.group_of(layer)] if self.sources(layer) == (layer,) else 0

    @cached_property
    def group_num_bytes(self) -> tuple[int, ...]:
        """The size of each group's whole block."""
        return tuple(
            self._first_tokens_num_bytes(group) + int(parameters.record_num_bytes.sum())
            for group, parameters in enumerate(self._parameters.groups)
        )

    def decode(self, group: int, block: torch.Tensor, first_token: int) -> list[LayerKV]:
        """Decode tokens ``[first_token, num_tokens)`` of the segment in all layers of a group.

        ``block``: uint8 on the CPU, the group's from the ``tail_start`` of ``first_token`` on. Returns new
        tensors in the pool's dtype on the bases' device, keys with their rotary embedding.

        Raises:
            CodecError: no such token, a block of another size, or a damaged one.
        """
        tail = self.tail(group, block, first_token, self._segment.num_tokens)
        device = tail.transform.basis.mean.device
        layers = tail.transform.basis.layers
        decoded = [empty_kv(self.shape, tail.num_tokens, device) for _ in layers]
        for rows, chunk in decode_tails([tail]):
            for of_layer, part in zip(decoded, chunk, strict=True):
                of_layer.k[rows], of_layer.v[rows] = part.k, part.v
        return decoded

    def tail(self, group: int, block: torch.Tensor, first_token: int, end_token: int) -> CodedTail:
        """Tokens ``[first_token, end_token)`` of a group of layers, to be decoded with those of other
        segments.

        ``block``: as for ``decode``, but on any device.

        Raises:
            CodecError: no such tokens, or a block of another size.
        """
        if not 0 <= first_token < end_token <= self._segment.num_tokens:
            raise CodecError(
                f"tokens {first_token} to {end_token - 1} of a segment of {self._segment.num_tokens} tokens"
            )
        first_layer = self._bases.groups[group].first_layer
        expected = self.group_num_bytes[group] - self.tail_start(first_layer, first_token)
        if block.dtype is not torch.uint8 or block.ndim != 1 or block.numel() != expected:
            raise CodecError(f"a block of {expected} bytes is needed, got {block.dtype} {tuple(block.shape)}")
        parameters, record = self._parameters.groups[group], first_token // RECORD_TOKENS
        transform = self._transforms[group]
        return CodedTail(
            first_token,
            end_token,
            block,
            self._first_tokens_num_bytes(group) if record == 0 else 0,
            parameters.record_num_bytes[record:],
            scales_of(base_scales(transform.magnitudes, self._parameters.step), parameters.offsets),
            self._parameters.step,
            self._coder,
            transform,
            self._segment,
        )

    def decode_all(self, blocks: Sequence[torch.Tensor]) -> list[LayerKV]:
        """Decode all layers of the whole segment, in order. ``blocks``: the whole block of each group.

        Raises:
            CodecError: another number of blocks than of groups, or what ``decode`` refuses.
        """
        if len(blocks) != len(self._bases.groups):
            raise CodecError(f"{len(self._bases.groups)} groups have as many blocks, got {len(blocks)}")
        return [kv for group, block in enumerate(blocks) for kv in self.decode(group, block, 0)]

    def _first_tokens_num_bytes(self, group: int) -> int:
        shape = self._bases.shape
        token_bytes = len(self._bases.groups[group].layers) * (shape.k_token_bytes + shape.v_token_bytes)
        return self._segment.num_first_tokens * token_bytes
