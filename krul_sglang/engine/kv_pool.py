"""The device pool that krul reads from and writes to, behind two verbs: gather and scatter."""

from __future__ import annotations

from typing import Any

import torch

from krul_backend.codec.interface import LayerShape
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

    def gather(self, layer: int, slots: torch.Tensor, k_host: torch.Tensor, v_host: torch.Tensor) -> None:
        """Copy the rows ``slots`` (int64 ``[T]``, on the pool's device) of one layer to host tensors.

        ``k_host [T, H, Dk]``, ``v_host [T, H, Dv]``. On a GPU the copy is queued on the current stream.
        """
        for buffer, host in ((self._k_buffer[layer], k_host), (self._v_buffer[layer], v_host)):
            if self.device.type == "cpu":
                torch.index_select(buffer, 0, slots, out=host)
            else:
                host.copy_(buffer.index_select(0, slots), non_blocking=True)

    def scatter(self, layer: int, slots: torch.Tensor, k_host: torch.Tensor, v_host: torch.Tensor) -> None:
        """The inverse of ``gather``: write host rows into the pool's slots of one layer."""
        for buffer, host in ((self._k_buffer[layer], k_host), (self._v_buffer[layer], v_host)):
            buffer.index_copy_(0, slots, host.to(self.device, non_blocking=True))
