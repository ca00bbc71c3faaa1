"""The device pool that krul reads from and writes to."""

from __future__ import annotations

from typing import Any

import torch

from krul_backend.codec.interface import LayerKV, LayerShape
from krul_sglang.engine.unsupported import UnsupportedSetupError

_SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class DevicePool:
    """Layer-indexed access to SGLang's ``MHATokenToKVPool``.

    ``k_buffer[l]`` is ``[num_slots, num_kv_heads, k_head_dim]`` and ``v_buffer[l]`` accordingly, both on the
    pool's device. The buffers are used directly: SGLang's own getters wait for loads in flight.

    Raises:
        UnsupportedSetupError: for any other pool class, layout or element type.
    """

    def __init__(self, pool: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        if type(pool) is not MHATokenToKVPool:
            raise UnsupportedSetupError(
                f"--radix-cache-backend krul: KV pool {type(pool).__name__} is not supported yet, "
                "only MHATokenToKVPool (MHA and GQA models)"
            )
        if pool.kv_cache_layout != "nhd":
            raise UnsupportedSetupError(
                f"--radix-cache-backend krul: KV pool layout {pool.kv_cache_layout!r} is not supported yet"
            )
        if pool.dtype not in _SUPPORTED_DTYPES or pool.store_dtype != pool.dtype:
            raise UnsupportedSetupError(
                f"--radix-cache-backend krul: --kv-cache-dtype {pool.dtype} is not supported yet"
            )
        self.num_layers: int = pool.layer_num
        self.num_tokens: int = pool.size
        self.device = torch.device(pool.device)
        self._k_buffer: list[torch.Tensor] = pool.k_buffer
        self._v_buffer: list[torch.Tensor] = pool.v_buffer
        _, num_kv_heads, k_head_dim = self._k_buffer[0].shape
        self.shape = LayerShape(num_kv_heads, k_head_dim, self._v_buffer[0].shape[-1], pool.dtype)

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
