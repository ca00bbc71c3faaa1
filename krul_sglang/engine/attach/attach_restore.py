"""Makes a cache restore: proves that heads can be recomputed, measures this machine, chooses the planner."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.errors import KrulError
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.cost_file import load_costs, save_costs
from krul_backend.planner.costs import RestoreCosts
from krul_backend.planner.planners import make_planner
from krul_backend.strategy.strategy import Precision
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.config import KrulConfig
from krul_sglang.engine.attach.cost_calibration import CostCalibration, units_in_use
from krul_sglang.engine.attach.start_proof import prove_heads
from krul_sglang.engine.cache.linker import EngineParts
from krul_sglang.engine.cache.radix_cache import KrulRadixCache
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.unsupported import UnsupportedSetupError
from krul_sglang.engine.restore.head_recompute import HeadRecompute, unsupported_model
from krul_sglang.engine.restore.restore import HeadProof, Restore
from krul_sglang.engine.restore.restore_forward import RestoreForward
from krul_sglang.engine.restore.restore_planning import RestorePlanning
from krul_sglang.engine.restore.restore_trace import TraceLog
from krul_sglang.engine.save.planned_allocation import PlannedAllocation

logger = logging.getLogger(__name__)

COSTS_FILE = "restore-costs.json"
_DEFAULT_CHUNK_TOKENS = 8192
WHOLE_LOADS = "full-load"
"""The planner that needs no heads, unless a load fails."""


def attach_restore(cache: KrulRadixCache, parts: EngineParts, chunked_prefill_size: int | None) -> None:
    """Called by every rank at the same point of its start, when nothing runs yet.

    Raises:
        UnsupportedSetupError: the planner needs heads, and this model's cannot be recomputed.
        IncompatibleEngineError: they can be, but not to what a prefill computes.
    """
    runner, config = parts.model_runner, parts.config
    pool = parts.pool
    heads, proof = _proven_heads(runner, cache, pool, parts)
    calibration = CostCalibration(runner, cache, pool, heads, parts.restore_agreement)
    costs = _costs(calibration, parts)
    # Pairs are measured as pairs with shared directions; those that are predicted need maps of the model.
    codec = SegmentCodec(pool.shape, pool.num_layers, parts.rotary)
    units = units_in_use(config.strategy, Precision(config.precision), pool.num_layers)
    decode_costs = calibration.decode_costs(codec, units, costs.tiers[DRAM_TIER])
    online = OnlineCosts(costs)
    planner = make_planner(config.planner)
    linker = cache.krul_linker
    chunk_tokens = _chunk_tokens(chunked_prefill_size)
    max_head_tokens = config.head_token_limit(chunk_tokens)
    planning = RestorePlanning(
        planner,
        online,
        decode_costs,
        linker.codec,
        parts.restore_agreement,
        page_size=parts.model.identity.page_size,
        max_head_tokens=max_head_tokens,
        max_new_tokens=chunk_tokens,
        tier_costs=parts.connection.store.tier_costs,
    )
    traces = TraceLog(online, pool.num_layers)
    forward = RestoreForward(
        linker.loader,
        heads,
        parts.restore_agreement,
        traces,
        req_to_token=runner.req_to_token_pool.req_to_token,
        chunk_tokens=chunk_tokens,
        skip_heads=config.fault_injection == "skip-heads",
    )
    linker.attach_restore(
        Restore(
            proof,
            planning,
            forward,
            traces,
            parts.model.identity.page_size,
            parts.connection.store.report_damage,
        )
    )
    runner.krul_restore_forward = forward
    if not config.store_full_tail and heads is not None:
        linker.allocate_space(
            PlannedAllocation(
                planner,
                online,
                decode_costs,
                parts.agreement,
                page_size=parts.model.identity.page_size,
                max_head_tokens=max_head_tokens,
            )
        )
    if parts.model.identity.tp_rank == 0:
        _log(config, costs)


def _proven_heads(
    runner: Any, cache: KrulRadixCache, pool: DevicePool, parts: EngineParts
) -> tuple[HeadRecompute, HeadProof] | tuple[None, None]:
    try:
        return _prove(runner, cache, pool, parts)
    except UnsupportedSetupError as error:
        if parts.config.planner != WHOLE_LOADS:
            raise
        logger.warning("%s. A load that fails ends in an error of its request", error)
        return None, None


def _prove(
    runner: Any, cache: KrulRadixCache, pool: DevicePool, parts: EngineParts
) -> tuple[HeadRecompute, HeadProof]:
    """Raises UnsupportedSetupError whatever a model does that krul does not know."""
    try:
        heads = HeadRecompute(runner, pool, parts.capture)
        return heads, prove_heads(runner, cache, pool, heads)
    except KrulError:
        raise
    except Exception as error:
        logger.debug("the proof of heads failed", exc_info=True)
        raise unsupported_model(
            runner.model, f"its layers failed with {type(error).__name__}: {error}"
        ) from error


def _costs(calibration: CostCalibration, parts: EngineParts) -> RestoreCosts:
    """Measured at the first start with a model on a device, read from a file at later ones.

    All ranks measure, or none: measuring runs the model.
    """
    device_name = parts.pool.streams.name
    fingerprint = parts.model.identity.fingerprint
    path = Path(parts.config.cache_dir).expanduser() / COSTS_FILE
    known = load_costs(path, fingerprint, device_name)
    is_known = torch.tensor([known is not None], dtype=torch.float64)
    of_ranks = parts.restore_agreement.gather(is_known, (1,))
    assert of_ranks is not None
    if known is not None and all(of_rank.item() for of_rank in of_ranks):
        return known
    measured = calibration.measure()
    if not parts.model.is_lasting:
        return measured
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_costs(path, fingerprint, device_name, measured)
    except OSError as error:
        logger.warning("krul: what was measured cannot be kept, and is measured again next time: %s", error)
    return measured


def _chunk_tokens(chunked_prefill_size: int | None) -> int:
    """As many tokens as a forward of this engine may have."""
    if chunked_prefill_size is None or chunked_prefill_size <= 0:
        return _DEFAULT_CHUNK_TOKENS
    return chunked_prefill_size


def _log(config: KrulConfig, costs: RestoreCosts) -> None:
    tier = costs.tiers[DRAM_TIER]
    logger.info(
        "krul: planner %s; per layer and 1000 tokens: prefill %.2f ms, head %.2f ms; loading %.2f GB/s",
        config.planner,
        1e3 * costs.own.layer_s(1000, 0),
        1e3 * costs.head.layer_s(1000, 0),
        1e-9 / tier.byte_s if tier.byte_s > 0 else float("inf"),
    )
