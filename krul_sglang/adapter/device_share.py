"""Adds up the device memory that krul takes, and has SGLang size its KV pool without it."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from krul_backend.errors import ConfigError
from krul_backend.memory import format_bytes
from krul_backend.strategy import SUBSPACE
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.config import KrulConfig

if TYPE_CHECKING:
    # Hooks are registered in every process of SGLang, where these modules need not be imported.
    from krul_backend.codec.layout import LayerShape
    from krul_backend.device import Device

logger = logging.getLogger(__name__)

_HELD_BASES = 1.25
"""Room for bases, over what they take if they keep every coefficient. They keep about half of them: so newer
bases have room beside those that they replace."""

_SLOT_BYTES = 32
"""For each token of a conversation: its slots, as loads, stores and heads hold them."""

_SMALL_BYTES = 4 << 20
"""Tables and flags that come with each kind of work."""


@dataclass(frozen=True)
class DeviceShare:
    """The most bytes of its device that one rank of krul takes beside SGLang's KV pool.

    ``query_rows``: what is captured of attention, taken before CUDA graphs are captured. ``bases``: all that
    are held. The others are workspaces, taken while there is such work: ``statistics`` of a turn's attention,
    ``loading``, ``storing`` beside the statistics, and ``heads`` beside what the model's own layers take, as
    in any prefill.
    """

    query_rows: int = 0
    bases: int = 0
    statistics: int = 0
    loading: int = 0
    storing: int = 0
    heads: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(asdict(self).values())

    @classmethod
    def of(
        cls, config: KrulConfig, shape: LayerShape, num_layers: int, context_tokens: int, device: Device
    ) -> DeviceShare:
        """The share of a rank whose pool has such layers. ``context_tokens``: of the longest conversation.

        It is nothing on a CPU: there all of this is the host's memory, of which SGLang leaves most.
        """
        from krul_backend.attention.rows import DEVICE_BLOCK_BYTES
        from krul_backend.codec.interface import MAX_JOINED_BYTES
        from krul_backend.codec.subspace.bases import vector_size
        from krul_backend.codec.subspace.codec import MOST_AWAITED_BYTES
        from krul_backend.codec.subspace.encoders import MOST_VECTOR_BYTES
        from krul_backend.codec.unit_restore import MAX_KEPT_BYTES
        from krul_sglang.engine.restore import MAX_STAGED_BYTES
        from krul_sglang.engine.save import MAX_LAYER_BYTES
        from krul_sglang.learning.bases import LearningPlan, most_bases_bytes

        if device.shares_cores:
            return cls()
        heads = _SLOT_BYTES * context_tokens + _SMALL_BYTES
        # Tails before their forward, those of a layer and their rows in order, blocks of a pair, kept ones.
        loading = heads + MAX_STAGED_BYTES + MAX_JOINED_BYTES * 3 // 2 + 2 * MAX_LAYER_BYTES + MAX_KEPT_BYTES
        storing = heads + 4 * MAX_LAYER_BYTES
        if not config.needs_attention:
            return cls(loading=loading, storing=storing, heads=heads)
        query_rows = config.query_memory_bytes(device.memory_bytes)
        # What is made of a block, and of one layer the keys of the whole conversation.
        statistics = 2 * DEVICE_BLOCK_BYTES + context_tokens * shape.of_numbers.k_token_bytes + _SMALL_BYTES
        if config.strategy != SUBSPACE:
            return cls(query_rows, 0, statistics, loading, storing, heads)
        layers = LearningPlan().most_layers(num_layers, vector_size(shape))
        group = layers * MAX_LAYER_BYTES * (shape.of_numbers.dtype.itemsize // shape.dtype.itemsize)
        # All tokens of a group as numbers, and 1,024 of them in fp32.
        loading += group + 4096 * layers * vector_size(shape)
        # Or as vectors in fp32 and in bf16 with their blocks, and coefficients that the host waits for.
        storing = heads + group + MOST_VECTOR_BYTES * 5 // 2 + MOST_AWAITED_BYTES
        bases = int(_HELD_BASES * most_bases_bytes(shape, num_layers))
        return cls(query_rows, bases, statistics, loading, storing, heads)


def reserve_share(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of ``Scheduler.init_memory_pools``: the model is loaded, and SGLang looks next at how much
    memory is free."""
    runtime = KrulRuntime.find(scheduler)
    if runtime is None:
        return
    from sglang.srt.layers.radix_attention import RadixAttention

    from krul_backend.codec.layout import LayerShape
    from krul_backend.device import Device

    runner = scheduler.tp_worker.model_runner
    modules = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    if not modules:
        # It is refused when its cache is made.
        return
    first, is_latent = modules[0], runner.use_mla_backend
    # Attention takes a whole row of latent KV as the key.
    k_head_dim = first.qk_head_dim - first.v_head_dim if is_latent else first.qk_head_dim
    shape = LayerShape(first.tp_k_head_num, k_head_dim, first.v_head_dim, runner.kv_cache_dtype)
    # A layer may have a module for each form of its attention.
    num_layers = len({module.layer_id for module in modules})
    device = Device.of(next(runner.model.parameters()))
    context_tokens = runner.model_config.context_len
    share = DeviceShare.of(runtime.config, shape, num_layers, context_tokens, device)
    if is_latent:
        # Nothing is recorded.
        share = replace(share, query_rows=0, statistics=0)
    runtime.share = share
    # The pool's configurator, which is asked next, has no other object of ours.
    runtime.attach_to(runner.model)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in asdict(share).items() if size)
    if parts:
        logger.info("krul: of this device %s are left to krul: %s", format_bytes(share.total_bytes), parts)


def leave_share(original: Any, configurator: Any, budget_bytes: int, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of ``KVCacheConfigurator.config_from_budget``, which makes a pool of free memory: what is
    krul's is taken off before. Some servers call it again when CUDA graphs are captured: by then the query
    rows are taken.

    Raises:
        ConfigError: nothing would be left for the pool.
    """
    runtime = KrulRuntime.find(configurator.model)
    if runtime is None:
        return original(configurator, budget_bytes, *args, **kwargs)
    to_come = runtime.share.total_bytes
    if runtime.capture is not None:
        to_come -= runtime.share.query_rows
    if budget_bytes <= to_come:
        raise ConfigError(
            f"SGLang has {format_bytes(budget_bytes)} for its KV pool, and krul needs "
            f"{format_bytes(to_come)} of that: raise --mem-fraction-static, or lower query_memory"
        )
    return original(configurator, budget_bytes - to_come, *args, **kwargs)
