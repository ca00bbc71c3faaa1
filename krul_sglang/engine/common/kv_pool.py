"""Reads and writes the engine's KV pool on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.device import Device

FP8_FORMATS = {
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
"""Formats whose bytes the pool keeps as uint8, and what ``--kv-cache-dtype`` calls them."""


class DevicePool:
    """Layer-indexed access to the engine's pool of keys and values.

    The buffers are used directly: the engine's own getters wait for loads in flight. Their bytes are stored
    and loaded: for an fp8 pool ``shape.dtype`` is uint8, and ``element_type`` says what the bytes mean.
    ``streams`` makes streams and events of the pool's device.

    Latent KV (MLA) is one row ``[latent | rotary]`` per token, which attention takes as one key, and its
    latent part as the value. Here its rotary part is the key, and the latent part the value, so that each is
    stored once; ``is_latent`` says so. All tensor-parallel ranks have the same.

    If attention chooses tokens by an index (DSA), each page of tokens has a row of it besides. Here that row
    is cut into as many parts as the page has tokens, which are the keys; the latent rows are the values. A
    part means nothing alone: rows ``are_pages``, and only whole pages are copied, as they are.

    Args:
        k_buffer: of each layer ``[num_slots, num_kv_heads, k_head_dim]``, on the pool's device.
        v_buffer: accordingly.
        attended: of each layer the keys and values that attention reads, if these are others.
        num_tokens: that the pool has room for.
        element_type: what an element of the buffers stands for.
        are_pages: see above.
        write: puts keys and values ``[T, num_kv_heads, head_dim]`` of a layer into slots, rounded as the
            engine's attention rounds them.
        scales: of a layer's keys and values; asked each time, because an update of the weights may change
            them.
        layer_ids: the engine's numbers of these layers, if others have no KV.
    """

    def __init__(
        self,
        k_buffer: list[torch.Tensor],
        v_buffer: list[torch.Tensor],
        *,
        num_tokens: int,
        element_type: torch.dtype,
        write: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None],
        scales: Callable[[int], tuple[float, float]],
        attended: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        are_pages: bool = False,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        self.are_pages = are_pages
        self.num_layers = len(k_buffer)
        self.layer_ids = range(self.num_layers) if layer_ids is None else layer_ids
        self.num_tokens = num_tokens
        self.element_type = element_type
        self.write = write
        self._scales = scales
        self._k_buffer, self._v_buffer = k_buffer, v_buffer
        self.is_latent = attended is not None
        self._attended = attended or list(zip(k_buffer, v_buffer, strict=True))
        self.device = k_buffer[0].device
        self.streams = Device(self.device)
        _, num_kv_heads, k_head_dim = k_buffer[0].shape
        self.shape = LayerShape(num_kv_heads, k_head_dim, v_buffer[0].shape[-1], k_buffer[0].dtype)

    @property
    def fp8_format(self) -> str | None:
        """The ``--kv-cache-dtype`` of an fp8 pool; None for any other."""
        return FP8_FORMATS.get(self.element_type)

    @property
    def format(self) -> str:
        """Names what the pool's bytes mean: the element type, and a digest of scales other than 1."""
        name = str(self.element_type).removeprefix("torch.")
        scales = [self._scales(layer) for layer in range(self.num_layers)]
        if all(of_layer == (1.0, 1.0) for of_layer in scales):
            return name
        return f"{name}/{hashlib.sha256(repr(scales).encode()).hexdigest()[:16]}"

    def gather(self, layer: int, slots: torch.Tensor) -> LayerKV:
        """The rows ``slots`` (int64 ``[T]``, on the pool's device) of one layer, copied, on that device."""
        return LayerKV(
            self._k_buffer[layer].index_select(0, slots), self._v_buffer[layer].index_select(0, slots)
        )

    def gather_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The keys alone: ``[T, num_kv_heads, k_head_dim]``."""
        return self._k_buffer[layer].index_select(0, slots)

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, ``[num_slots, num_kv_heads, head_dim]`` each; writable."""
        return self._k_buffer[layer], self._v_buffer[layer]

    def attended(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads of one layer, in the pool's element type: SGLang keeps fp8 as uint8."""
        keys, values = self._attended[layer]
        return keys.view(self.element_type), values.view(self.element_type)

    def elements(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> LayerKV:
        """The numbers that ``gather``'s rows stand for, in ``dtype``, without their scales."""
        rows = self.gather(layer, slots)
        return LayerKV(*(x.view(self.element_type).to(dtype) for x in (rows.k, rows.v)))
