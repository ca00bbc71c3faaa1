"""Computes attention of recomputed tokens over themselves and the KV before them in the pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from krul_backend.device import Device, Event
from krul_backend.errors import KrulError
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.span_attention import GatheredAttention, Span, SpanAttention

logger = logging.getLogger(__name__)

_NUM_PLANS = 2
"""Plans in flight: while the device works on one, the next one is made."""

_WORKSPACE_BYTES = 1 << 20
"""FlashInfer keeps partial results there, of which there are none where keys are not split over blocks."""

_INDEX_PADDING = 256
"""Slots by which indices are padded: kernels may read so many beyond the last. SGLang pads as many."""

_MAX_TRIAL_ERROR = 0.05


class NoHeadsError(KrulError):
    """Heads of this model cannot be recomputed, or not to what a prefill computes."""


class HeadAttention(AttentionBackend):  # type: ignore[misc]
    """Writes the KV of several requests' spans to the pool, and lets ``kernel`` attend to it.

    It waits for no load, and reads of the pool only slots of spans. It works on the pool's buffers directly,
    because the pool's own getters wait for the loads that run meanwhile. ``token_to_kv_pool`` is SGLang's
    pool: models that write KV themselves, together with the rotary embedding, take it from their backend.
    """

    prefill_attention_backend_str = "krul"
    """By this name models with latent KV choose how they call attention: see ``register_latent``."""

    def __init__(self, pool: DevicePool, kernel: SpanAttention, token_to_kv_pool: Any) -> None:
        register_latent(self.prefill_attention_backend_str)
        self.token_to_kv_pool = token_to_kv_pool
        self._pool = pool
        self._kernel = kernel
        self._own_slots = torch.empty(0, dtype=torch.int64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to plan: see ``use``."""

    def use(self, spans: Sequence[Span], own_slots: torch.Tensor) -> None:
        """The next forwards are of these spans, whose rows take ``own_slots`` (int64 ``[rows]``)."""
        self._own_slots = own_slots
        self._kernel.plan(spans)

    def clear(self) -> None:
        """Forget the spans."""
        self.use((), self._own_slots.new_empty(0))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``save_kv_cache`` is false where the model has written the KV of these rows itself.

        Raises:
            NoHeadsError: the model asks for another kind of attention.
        """
        asked = sorted(name for name, value in kwargs.items() if value is not None)
        if asked:
            raise NoHeadsError(f"its attention asks for {', '.join(asked)}")
        if save_kv_cache:
            assert k is not None
            assert v is not None
            self._pool.write(
                layer.layer_id,
                self._own_slots,
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
        k_buffer, v_buffer = self._pool.attended(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._kernel.attend(queries, k_buffer, v_buffer, layer).flatten(1)


def register_latent(backend: str) -> None:
    """Have models with latent KV hand it to this attention backend as it lies in the pool: as one key and
    value that all query heads share. Safe to call again."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(backend, lambda attention, batch: AttnForwardMethod.MLA)


def span_attention(
    buffers: tuple[torch.Tensor, torch.Tensor], layer: Any, dtype: torch.dtype
) -> SpanAttention:
    """Choose how to attend to a pool: FlashInfer where it is installed and agrees with torch, else torch.

    ``buffers`` are one layer's of the pool, ``layer`` is an attention module of the model, ``dtype`` that of
    its queries. FlashInfer compiles kernels for the device, so it is tried first.
    """
    plain = GatheredAttention()
    device = Device.of(buffers[0])
    if device.shares_cores or dtype not in (torch.float16, torch.bfloat16):
        return plain
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        paged = PagedAttention(device, BatchPrefillWithPagedKVCacheWrapper)
        error = trial_error(paged, plain, buffers, layer, dtype)
    except Exception as failure:
        logger.warning("krul: heads are recomputed without FlashInfer, which fails: %s", failure)
        return plain
    if not error <= _MAX_TRIAL_ERROR:
        logger.warning("krul: heads are recomputed without FlashInfer, which is off by %.3g", error)
        return plain
    return paged


def trial_error(
    tried: SpanAttention,
    plain: SpanAttention,
    buffers: tuple[torch.Tensor, torch.Tensor],
    layer: Any,
    dtype: torch.dtype,
) -> float:
    """Relative difference of two ways, on random numbers in the shapes of a model's layer."""
    (k_buffer, v_buffer), num_slots = buffers, 64
    device = k_buffer.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q = random(20, layer.tp_q_head_num, layer.qk_head_dim).to(dtype)
    k, v = (random(num_slots, *of_pool.shape[1:]).to(of_pool.dtype) for of_pool in (k_buffer, v_buffer))
    slots = torch.randperm(num_slots, generator=generator, device=device)
    spans = (Span(0, 13, slots[:37]), Span(13, 7, slots[37:44]))
    unscaled = SimpleNamespace(scaling=layer.scaling, k_scale_float=None, v_scale_float=None)
    outputs = []
    for way in (tried, plain):
        way.plan(spans)
        outputs.append(way.attend(q, k, v, unscaled).float())
        way.plan(())
    return float((outputs[0] - outputs[1]).norm() / outputs[1].norm())


class PagedAttention:
    """Attends with FlashInfer's prefill for pages of one slot, which copies no KV and keeps no scores.

    ``wrapper_class`` is ``BatchPrefillWithPagedKVCacheWrapper``. Its causal mask ends at the last token of
    both queries and keys, as a span does.
    """

    name = "flashinfer"

    def __init__(self, device: Device, wrapper_class: Any) -> None:
        self._device = device
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device)
        # Their kernels run one after another on one stream, and may share what they only use while they run.
        self._wrappers = [wrapper_class(workspace, "NHD", backend="fa2") for _ in range(_NUM_PLANS)]
        self._copied: list[Event | None] = [None] * _NUM_PLANS
        self._turn = 0
        self._spans: Sequence[Span] = ()
        self._planned_for: tuple[Any, ...] | None = None

    def plan(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._planned_for = None

    def attend(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        kinds = (q.dtype, q.shape[1:], k_buffer.dtype, k_buffer.shape[1:], v_buffer.shape[1:], layer.scaling)
        if self._planned_for != kinds:
            self._make_plan(q, k_buffer, v_buffer, layer.scaling)
            self._planned_for = kinds
        is_quantized = k_buffer.dtype != q.dtype
        output: torch.Tensor = self._wrappers[self._turn].run(
            q.contiguous(),
            # [num_slots, H, D] -> [num_slots, 1, H, D]: pages of one token
            (k_buffer[:, None], v_buffer[:, None]),
            k_scale=layer.k_scale_float if is_quantized else None,
            v_scale=layer.v_scale_float if is_quantized else None,
        )
        return output

    def _make_plan(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, scaling: float
    ) -> None:
        self._turn = (self._turn + 1) % _NUM_PLANS
        copied = self._copied[self._turn]
        if copied is not None:
            # A plan is copied to the device from page-locked memory that the wrapper uses again.
            copied.synchronize()
        slots = [span.slots for span in self._spans]
        padding = torch.zeros(_INDEX_PADDING, dtype=torch.int64, device=self._device.torch_device)
        self._wrappers[self._turn].plan(
            # Lengths stay on the host: from the device they would be fetched after all that is queued there.
            self._ends([span.num_tokens for span in self._spans]),
            self._ends([len(of_span) for of_span in slots]),
            torch.cat([*slots, padding]).int(),
            self._on_host([1] * len(slots)),
            q.shape[1],
            k_buffer.shape[1],
            q.shape[2],
            1,
            head_dim_vo=v_buffer.shape[2],
            causal=True,
            sm_scale=scaling,
            q_data_type=q.dtype,
            kv_data_type=k_buffer.dtype,
            # Partial results need memory that grows with the attention heads of the model.
            disable_split_kv=True,
        )
        self._copied[self._turn] = self._device.record()

    def _ends(self, lengths: Sequence[int]) -> torch.Tensor:
        """0, then where each of several neighbours of these lengths ends."""
        return self._on_host([0, *accumulate(lengths)])

    def _on_host(self, values: Sequence[int]) -> torch.Tensor:
        tensor = self._device.host_empty((len(values),), torch.int32)
        tensor.copy_(torch.tensor(values))
        return tensor
