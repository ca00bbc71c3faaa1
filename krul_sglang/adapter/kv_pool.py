"""Opens SGLang's KV pools for krul, that of a draft model, too, or says why they cannot be served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from krul_backend.codec.layout import FP8_TYPES
from krul_backend.strategy import Precision
from krul_sglang.adapter.unsupported import (
    FOREIGN_ELEMENTS,
    FOREIGN_LAYOUT,
    FOREIGN_POOL,
    FOREIGN_SCALES,
    UNSEEN_INDEX,
    WINDOW_DRAFTS,
)
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.draft_kv import LOSSY_PRECISION, DraftKV
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel, identify_model

_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALING_BACKENDS = ("flashinfer", "triton", "fa3")
"""Attention backends that divide by a layer's scales before they write KV, and multiply when they read it."""


def open_pool(pool: Any, attention: Iterable[Any] = (), backends: Sequence[str] = ()) -> DevicePool:
    """SGLang's ``MHATokenToKVPool``, ``MLATokenToKVPool`` or ``DSATokenToKVPool`` as krul uses it, also where
    it is that of a hybrid model's layers with attention, or of those whose attention has no window.

    Args:
        pool: SGLang's.
        attention: the model's ``RadixAttention`` modules, for the scales of their fp8 keys and values.
        backends: names of the server's attention backends.

    Raises:
        UnsupportedSetupError: for any other pool class, layout or element type, or for scales that these
            backends are not known to use.
    """
    from sglang.srt.mem_cache.memory_pool import (
        DSATokenToKVPool,
        HybridLinearKVPool,
        MHATokenToKVPool,
        MLATokenToKVPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    layer_ids: Sequence[int] | None = None
    if type(pool) is HybridLinearKVPool:
        layer_ids = tuple(pool.full_attention_layer_id_mapping)
        pool = pool.full_kv_pool
    elif type(pool) is SWAKVPool:
        layer_ids = tuple(layer for layer, (_, has_window) in pool.layers_mapping.items() if not has_window)
        if not layer_ids:
            raise FOREIGN_POOL.error("all layers of SWAKVPool have windows")
        pool = pool.full_kv_pool
    is_latent = type(pool) in (MLATokenToKVPool, DSATokenToKVPool)
    if not is_latent and type(pool) is not MHATokenToKVPool:
        raise FOREIGN_POOL.error(type(pool).__name__)
    if not is_latent and pool.kv_cache_layout != "nhd":
        raise FOREIGN_LAYOUT.error(repr(pool.kv_cache_layout))
    stored_as = torch.uint8 if pool.dtype in FP8_TYPES else pool.dtype
    if pool.dtype not in (*_PLAIN_DTYPES, *FP8_TYPES) or pool.store_dtype != stored_as:
        raise FOREIGN_ELEMENTS.error(str(pool.dtype))
    index_of = None if layer_ids is None else {number: index for index, number in enumerate(layer_ids)}
    modules = {
        module.layer_id if index_of is None else index_of[module.layer_id]: module
        for module in attention
        if pool.dtype in FP8_TYPES and (index_of is None or module.layer_id in index_of)
    }

    def scales(layer: int) -> tuple[float, float]:
        module = modules.get(layer)
        if module is None or module.k_scale is None:
            return 1.0, 1.0
        return module.k_scale_float, module.v_scale_float

    def write(layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        of_layer = scales(layer)
        if of_layer == (1.0, 1.0):
            pool.set_kv_buffer(None, slots, k, v, layer_id_override=layer)
        else:
            # The pool divides in place.
            pool.set_kv_buffer(None, slots, k.clone(), v.clone(), *of_layer, layer_id_override=layer)

    for layer in modules:
        of_layer = scales(layer)
        are_used = None not in of_layer and all(name in _SCALING_BACKENDS for name in backends)
        if of_layer != (1.0, 1.0) and not are_used:
            raise FOREIGN_SCALES.error(
                f"{of_layer[0]} and {of_layer[1]} in layer {layer}, {' and '.join(backends)}"
            )
    make = partial(DevicePool, num_tokens=pool.size, write=write, scales=scales, layer_ids=layer_ids)
    # SGLang keeps fp8 as uint8.
    if not is_latent:
        k, v = ([each.view(pool.dtype) for each in part] for part in (pool.k_buffer, pool.v_buffer))
        return make(k, v)
    whole = [rows.view(pool.dtype) for rows in pool.kv_buffer]
    if type(pool) is DSATokenToKVPool:
        parts = [part.view(pool.dtype) for part in _parts_of_pages(pool)]
        return make(parts, whole, attended=list(zip(whole, whole, strict=True)), are_pages=True)
    rank = pool.kv_lora_rank
    latent = [rows[..., :rank] for rows in whole]
    return make([rows[..., rank:] for rows in whole], latent, attended=list(zip(whole, latent, strict=True)))


def _parts_of_pages(pool: Any) -> list[torch.Tensor]:
    """The index of a ``DSATokenToKVPool``, of each layer ``[num_slots, 1, n]``: the row of a page in as many
    parts as it has tokens. As elements of the pool, whatever they are.

    Raises UnsupportedSetupError for an index with other rows, or none in some layers.
    """
    index, num_tokens = pool.index_k_with_scale_buffer, pool.size + pool.page_size
    if pool.index_kpool != 1 or any(len(pages) * pool.page_size != num_tokens for pages in index):
        raise FOREIGN_POOL.error(f"{type(pool).__name__} whose index has not one row of each page and layer")
    return [pages.view(num_tokens, 1, -1).view(pool.store_dtype) for pages in index]


def open_model_pool(runner: Any) -> DevicePool:
    """The pool of SGLang's model runner ``runner``.

    Raises UnsupportedSetupError as ``open_pool`` does, and for pools that were never seen on a server.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    pool = open_pool(
        runner.token_to_kv_pool,
        (module for module in runner.model.modules() if isinstance(module, RadixAttention)),
        (runner.prefill_attention_backend_str, runner.decode_attention_backend_str),
    )
    if pool.are_pages:
        raise UNSEEN_INDEX.error(type(runner.token_to_kv_pool).__name__)
    return pool


def open_draft(
    runners: Sequence[Any],
    target: ServedModel,
    settings: Mapping[str, Any],
    of_server: RankAgreement,
    agreement: RankAgreement,
    *,
    cache_dir: Path,
    ranks_per_host: int,
    is_lossless: bool,
) -> DraftKV | None:
    """The KV of the draft model beside ``target``; None without one. Every rank calls it at the same point.

    ``settings`` are the resolved server arguments. ``of_server`` joins all ranks, ``agreement`` those that
    share the KV heads. Unless ``is_lossless``, KV that is not fp8 is stored in fewer bits. Raises what
    ``open_pool`` does.
    """
    if not runners:
        return None
    (runner,) = runners
    if runner.is_hybrid_swa:
        raise WINDOW_DRAFTS.error(type(runner.token_to_kv_pool).__name__)
    pool = open_model_pool(runner)
    load_format = settings["speculative_draft_load_format"] or settings["load_format"]
    own = identify_model(
        runner.model_config,
        {**settings, "load_format": load_format, "revision": runner.model_config.revision},
        pool,
        of_server,
        agreement,
        cache_dir=cache_dir,
        page_size=target.identity.page_size,
        ranks_per_host=ranks_per_host,
    )
    stores = stores_kv(pool, agreement.rank, ranks_per_host)
    precision = Precision.NATIVE if is_lossless or pool.fp8_format is not None else LOSSY_PRECISION
    return DraftKV(pool, own.identity, target, runner.spec_algorithm.name, stores=stores, precision=precision)


def stores_kv(pool: DevicePool, rank: int, ranks_per_host: int) -> bool:
    """Say whether this rank stores its KV: each does, but of latent KV, which all ranks of a host have alike,
    only the first of them."""
    return not pool.is_latent or rank % ranks_per_host == 0
