"""Reads and writes the engine's KV pool on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from krul_backend.codec.layout import FP8_TYPES, LayerKV, LayerShape, number_type, take_rows
from krul_backend.device import Device


class DevicePool:
    """Layer-indexed access to the engine's pool of keys and values.

    The buffers are used directly: the engine's own getters wait for loads in flight. ``shape.dtype`` is the
    type of their elements, also of fp8, which stand for numbers that are multiplied by scales.
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
        kind = str(self.shape.dtype).removeprefix("torch.float8_")
        return f"fp8_{kind[:4]}" if self.shape.dtype in FP8_TYPES else None

    @property
    def is_scaled(self) -> bool:
        """Tell whether a layer has scales other than 1, which multiply its elements."""
        return any(self._scales(layer) != (1.0, 1.0) for layer in range(self.num_layers))

    @property
    def format(self) -> str:
        """Names what the pool's bytes mean: the element type, and a digest of scales other than 1."""
        name = str(self.shape.dtype).removeprefix("torch.")
        if not self.is_scaled:
            return name
        scales = [self._scales(layer) for layer in range(self.num_layers)]
        return f"{name}/{hashlib.sha256(repr(scales).encode()).hexdigest()[:16]}"

    def gather(self, layer: int, slots: torch.Tensor) -> LayerKV:
        """The rows ``slots`` (int64 ``[T]``, on the pool's device) of one layer, copied, on that device."""
        return LayerKV(*(take_rows(buffer, slots) for buffer in self.buffers(layer)))

    def gather_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The keys alone, as numbers: ``[T, num_kv_heads, k_head_dim]``."""
        return take_rows(self._k_buffer[layer], slots).to(number_type(self.shape.dtype))

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, ``[num_slots, num_kv_heads, head_dim]`` each; writable."""
        return self._k_buffer[layer], self._v_buffer[layer]

    def attended(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that attention reads of one layer."""
        return self._attended[layer]

    def elements(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> LayerKV:
        """The numbers that ``gather``'s rows stand for, in ``dtype``, without their scales."""
        rows = self.gather(layer, slots)
        return LayerKV(rows.k.to(dtype), rows.v.to(dtype))
