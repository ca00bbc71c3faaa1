"""Reads the tails of one leased segment: which bytes of its blocks a layer needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from krul_backend.codec.interface import SegmentDecoder
from krul_backend.codec.registry import ModelCodecs
from krul_backend.errors import CodecError, TierReadError
from krul_backend.tiers.common.interface import Block, Lease, SegmentSlice, SegmentTail
from krul_sglang.engine.restore.block_checks import LayerBlock


class SegmentReader:
    """Reads tokens ``[first_token, end_token)`` of a conversation from one leased segment.

    The planner asks it about the segment. If the plan loads, ``begin`` says from where on each layer is read,
    and the ``slots`` of all these tokens (int64 ``[num_tokens]``). Then ``TailGroups`` reads each layer in
    ascending order. Positions are absolute::

        [first_token, head_ends[l])   not read in layer l
        [head_ends[l], end_token)     read, decoded and written to their slots

    ``source`` is what was leased, ``num_tokens`` how many of its tokens are wanted, from the first one on.
    ``shift``: how many tokens later they are in this conversation than in the one that they were stored for;
    keys are restored as they were stored. ``fetched`` has the blocks, if it is not ``source``: see
    ``take_blocks_of``. ``num_bytes`` were read so far.
    """

    def __init__(
        self,
        source: SegmentSlice,
        decoder: SegmentDecoder,
        num_tokens: int,
        shift: int = 0,
        fetched: SegmentSlice | None = None,
    ) -> None:
        header = source.header
        self.shift = shift
        self.source = source
        self.decoder = decoder
        self.num_tokens = num_tokens
        self.num_bytes = 0
        # Rows are tokens of the segment, counted from its first one.
        self._row = source.first_page * header.page_size
        self.end_row = self._row + num_tokens
        self._first_rows: list[int] = []
        self.slots = torch.arange(0)
        self._fetched = source if fetched is None else fetched

    @property
    def first_token(self) -> int:
        return self.source.header.start_token + self.shift + self._row

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    def seen_as(self, source: SegmentSlice) -> SegmentReader:
        """A reader of the same tokens of the same segment, of which other parts are said to be here."""
        return SegmentReader(source, self.decoder, self.num_tokens, self.shift)

    def begin(self, head_ends: Sequence[int], slots: torch.Tensor) -> None:
        """Say what is read, and where it goes."""
        self.slots = slots
        start_token = self.source.header.start_token + self.shift
        # The end if a layer has no tail.
        self._first_rows = [min(max(end - start_token, self._row), self.end_row) for end in head_ends]

    def take_blocks_of(self, fetched: SegmentSlice) -> None:
        """Read the blocks that the store fetches for ``source`` from a lower tier.

        Raises:
            TierReadError: they are encoded in another way than what was leased, and than the decoder and the
                plan are for: somebody stored these tokens again meanwhile.
        """
        leased, came = self.source.header, fetched.header
        if (
            (came.start_token, came.num_tokens) != (leased.start_token, leased.num_tokens)
            or came.codec != leased.codec
            or came.codec_params != leased.codec_params
        ):
            raise TierReadError(f"tokens from {leased.start_token} on were stored again since the lease")
        self._fetched = fetched

    def again(self, head_ends: Sequence[int]) -> SegmentReader | None:
        """A reader that begins anew with the same blocks, if all that is to be read of them is in DRAM."""
        status = self._fetched.status
        layers = {source for layer, _ in enumerate(head_ends) for source in self.decoder.sources(layer)}
        if not self._fetched.blocks or (
            status is not None and not all(status.has_landed(layer) for layer in layers)
        ):
            return None
        reader = SegmentReader(self.source, self.decoder, self.num_tokens, self.shift, self._fetched)
        reader.begin(head_ends, self.slots)
        return reader

    def has_tail(self, layer: int) -> bool:
        """Whether anything of this layer is loaded."""
        return self.first_row(layer) < self.end_row

    def first_row(self, layer: int) -> int:
        """Where the tail of a layer begins, counted from the segment's first token; the end without one."""
        return self._first_rows[layer]

    def num_head_rows(self, layer: int) -> int:
        """How many of the ``num_tokens`` the head of this layer covers: those before its tail."""
        return self.first_row(layer) - self._row

    def block(self, source: int) -> LayerBlock:
        """The part of a layer's block that is read: for the layer that needs it last, or for itself."""
        return LayerBlock(self._fetched, source, self.num_tail_bytes(source, self.decoder.last_use[source]))

    def tail(self) -> SegmentTail:
        """What of the segment is read, whole records."""
        header = self.source.header
        first_tokens = [
            header.start_token + row if row < self.end_row else header.end_token for row in self._first_rows
        ]
        kept = tuple(map(max, self.decoder.kept_from(first_tokens), self.source.loadable_from))
        return SegmentTail(kept, self.decoder.kept_num_bytes(kept))

    def num_tail_bytes(self, source: int, layer: int) -> int:
        """The size of a block from the record on in which the tail of ``layer`` begins; 0 without a tail."""
        first = self.decoder.tail_start(source, self._first_rows[layer])
        return self.decoder.layer_num_bytes[source] - first if self.has_tail(layer) else 0

    def end_of_block(self, source: int, num_bytes: int) -> Block:
        """The last bytes of a layer's block. They count as read.

        Raises:
            CodecError: so much of it is not stored.
        """
        # What was left out when it was stored, or not fetched, is the beginning of a block.
        block = self._fetched.blocks[source]
        if block.nbytes < num_bytes:
            raise CodecError(
                f"layer {source} has a block of {block.nbytes} bytes, {num_bytes} are needed of it"
            )
        self.num_bytes += num_bytes
        return block[block.nbytes - num_bytes :]


def open_segments(lease: Lease, codec: ModelCodecs, num_tokens: int, shift: int = 0) -> list[SegmentReader]:
    """Readers of the first ``num_tokens`` tokens of a lease, in token order. ``shift``: as for the readers.

    Raises:
        CodecError: a segment's parameters are none that ``codec`` can decode.
    """
    opened: list[SegmentReader] = []
    for source in lease.slices:
        header = source.header
        num_leased = (source.end_page - source.first_page) * header.page_size
        of_slice = min(num_leased, num_tokens - sum(part.num_tokens for part in opened))
        if of_slice <= 0:
            break
        decoder = codec.open(
            header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
        )
        opened.append(SegmentReader(source, decoder, of_slice, shift))
    return opened
