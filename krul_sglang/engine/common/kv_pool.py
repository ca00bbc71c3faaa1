"""Reads and writes SGLang's KV pool on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.device import Device
from krul_sglang.engine.common.unsupported import (
    FOREIGN_ELEMENTS,
    FOREIGN_LAYOUT,
    FOREIGN_POOL,
    FOREIGN_SCALES,
)

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FP8_FORMATS = {
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
"""Formats whose bytes the pool keeps as uint8, and what ``--kv-cache-dtype`` calls them."""

_SCALING_BACKENDS = ("flashinfer", "triton", "fa3")
"""Attention backends that divide by a layer's scales before they write KV, and multiply when they read it."""


class DevicePool:
    """Layer-indexed access to SGLang's ``MHATokenToKVPool``.

    ``k_buffer[l]`` is ``[num_slots, num_kv_heads, k_head_dim]`` and ``v_buffer[l]`` accordingly, both on the
    pool's device. The buffers are used directly: SGLang's own getters wait for loads in flight. ``streams``
    makes streams and events of that device.

    The buffers' bytes are stored and loaded: for an fp8 pool ``shape.dtype`` is uint8, and ``element_type``
    says what the bytes mean.

    Args:
        pool: SGLang's.
        attention: the model's ``RadixAttention`` modules, for the scales of their fp8 keys and values.
        backends: names of the server's attention backends.

    Raises:
        UnsupportedSetupError: for any other pool class, layout or element type, or for scales that these
            backends are not known to use.
    """

    def __init__(self, pool: Any, attention: Iterable[Any] = (), backends: Sequence[str] = ()) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        if type(pool) is not MHATokenToKVPool:
            raise FOREIGN_POOL.error(type(pool).__name__)
        if pool.kv_cache_layout != "nhd":
            raise FOREIGN_LAYOUT.error(repr(pool.kv_cache_layout))
        stored_as = torch.uint8 if pool.dtype in _FP8_FORMATS else pool.dtype
        if pool.dtype not in (*_PLAIN_DTYPES, *_FP8_FORMATS) or pool.store_dtype != stored_as:
            raise FOREIGN_ELEMENTS.error(str(pool.dtype))
        self.num_layers: int = pool.layer_num
        self.num_tokens: int = pool.size
        self.element_type: torch.dtype = pool.dtype
        self._pool = pool
        self._k_buffer: list[torch.Tensor] = pool.k_buffer
        self._v_buffer: list[torch.Tensor] = pool.v_buffer
        # With its index, which SGLang's own name for it lacks.
        self.device = self._k_buffer[0].device
        self.streams = Device(self.device)
        _, num_kv_heads, k_head_dim = self._k_buffer[0].shape
        self.shape = LayerShape(num_kv_heads, k_head_dim, self._v_buffer[0].shape[-1], stored_as)
        self._attention = {module.layer_id: module for module in attention if self.fp8_format is not None}
        self._check_scales(backends)

    @property
    def fp8_format(self) -> str | None:
        """The ``--kv-cache-dtype`` of an fp8 pool; None for any other."""
        return _FP8_FORMATS.get(self.element_type)

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

    def typed_buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``buffers`` viewed in the pool's element type: SGLang keeps fp8 as uint8."""
        k_buffer, v_buffer = self.buffers(layer)
        return k_buffer.view(self.element_type), v_buffer.view(self.element_type)

    def elements(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> LayerKV:
        """The numbers that ``gather``'s rows stand for, in ``dtype``, without their scales."""
        rows = self.gather(layer, slots)
        return LayerKV(*(x.view(self.element_type).to(dtype) for x in (rows.k, rows.v)))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put keys and values ``[T, num_kv_heads, head_dim]`` of any float type into ``slots``.

        The pool itself rounds them, as it does for the engine's own attention backends.
        """
        scales = self._scales(layer)
        if scales == (1.0, 1.0):
            self._pool.set_kv_buffer(None, slots, k, v, layer_id_override=layer)
        else:
            # The pool divides in place.
            self._pool.set_kv_buffer(None, slots, k.clone(), v.clone(), *scales, layer_id_override=layer)

    def _scales(self, layer: int) -> tuple[float, float]:
        """Of keys and values; asked each time, because an update of the weights may change them."""
        module = self._attention.get(layer)
        if module is None or module.k_scale is None:
            return 1.0, 1.0
        return module.k_scale_float, module.v_scale_float

    def _check_scales(self, backends: Sequence[str]) -> None:
        for layer in self._attention:
            scales = self._scales(layer)
            are_used = None not in scales and all(name in _SCALING_BACKENDS for name in backends)
            if scales != (1.0, 1.0) and not are_used:
                raise FOREIGN_SCALES.error(
                    f"{scales[0]} and {scales[1]} in layer {layer}, {' and '.join(backends)}"
                )
