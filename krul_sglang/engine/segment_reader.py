"""Reads the KV of a leased prefix, layer by layer, whatever each segment was encoded with."""

from __future__ import annotations

import torch

from krul_backend.codec.restore import restore_layer
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.store.interface import Lease, SegmentSlice
from krul_sglang.engine.kv_pool import DevicePool


class SegmentReader:
    """The first ``num_tokens`` tokens of one leased slice. Layers are read in ascending order.

    A block that a later layer needs again (the shared directions of a pair) stays on the device until then.

    Raises:
        CodecError: the manifest's parameters are none that ``codec`` can decode.
    """

    def __init__(self, source: SegmentSlice, codec: SegmentCodec, num_tokens: int) -> None:
        manifest = source.manifest
        self.num_tokens = num_tokens
        self._decoder = codec.open(
            manifest.codec_params, start_token=manifest.start_token, num_tokens=manifest.num_tokens
        )
        self._first_token = source.first_page * manifest.model.page_size
        self._blocks = source.blocks
        self._last_use = {
            needed: layer for layer in range(len(source.blocks)) for needed in self._decoder.sources(layer)
        }
        self._on_device: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are read for all layers."""
        return sum(len(block) for block in self._blocks)

    def restore(self, layer: int, pool: DevicePool, slots: torch.Tensor) -> None:
        """Write the tokens' KV of one layer into ``slots`` (int64 ``[num_tokens]``) of the pool."""
        restore_layer(
            self._decoder,
            layer,
            self._blocks_of(layer, pool.device),
            self._first_token,
            self._first_token + self.num_tokens,
            *pool.buffers(layer),
            slots,
        )

    def _blocks_of(self, layer: int, device: torch.device) -> dict[int, torch.Tensor]:
        blocks = {}
        for source in self._decoder.sources(layer):
            block = self._on_device.pop(source, None)
            if block is None:
                block = torch.from_numpy(self._blocks[source]).to(device, non_blocking=True)
            if self._last_use[source] > layer:
                self._on_device[source] = block
            blocks[source] = block
        return blocks


def open_readers(lease: Lease, codec: SegmentCodec, num_tokens: int) -> list[SegmentReader]:
    """Readers of the first ``num_tokens`` tokens of a lease, in token order."""
    readers: list[SegmentReader] = []
    for source in lease.slices:
        num_leased = (source.end_page - source.first_page) * source.manifest.model.page_size
        of_slice = min(num_leased, num_tokens - sum(reader.num_tokens for reader in readers))
        if of_slice <= 0:
            break
        readers.append(SegmentReader(source, codec, of_slice))
    return readers
