"""Sets up what a rank captures with, proves its heads, and measures what restores cost."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.restore import can_fuse_groups
from krul_backend.device import Device
from krul_backend.memory import format_bytes
from krul_backend.planner import OnlineCosts, RestoreCosts, TierCost, load_costs, save_costs
from krul_backend.strategy import SUBSPACE, Precision
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.adapter.cost_calibration import CostCalibration, units_in_use
from krul_sglang.adapter.head_attention import NoHeadsError
from krul_sglang.adapter.head_recompute import HeadRecompute
from krul_sglang.adapter.kv_pool import open_model_pool
from krul_sglang.adapter.rank_engine import MeasuredRank, RankSetup
from krul_sglang.adapter.start_proof import prove_heads
from krul_sglang.adapter.state_pool import has_states
from krul_sglang.adapter.unsupported import (
    LATENT_STRATEGY,
    MEDIA_STRATEGY,
    NOT_MOVABLE,
    STATE_STRATEGY,
    takes_media,
)
from krul_sglang.config import KrulConfig
from krul_sglang.engine.budget import show
from krul_sglang.engine.capture import CapturePlan, QueryCapture, QueryShape
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore import DecodeCosts, HeadProof, RestoreMode

COSTS_FILE = "restore-costs.json"
_DEFAULT_CHUNK_TOKENS = 8192
WHOLE_LOADS = "full-load"
"""The planner of models whose heads cannot be recomputed."""

TURNS_PER_REQUEST = 4
"""Turns that may be recorded at a time, for each request that may run: those that ended wait to be stored,
and what was not recorded cannot be compressed."""

logger = logging.getLogger(__name__)


def attach_turn_capture(model_runner: Any, config: KrulConfig) -> QueryCapture | None:
    """Build the capture for a model runner whose pools exist, and hook its model; None if it has latent KV,
    whose bases look at no attention.

    Raises:
        ConfigError: see ``CapturePlan.fit``.
        UnsupportedSetupError: the model has latent KV, or layers without KV in the pool of all tokens, that
            there are no bases for, or takes images or sounds.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from krul_sglang.learning.model_kv import HYBRID_MODELS, LATENT_MODELS

    kind = model_runner.model_config.hf_config.model_type
    if isinstance(model_runner.token_to_kv_pool, MLATokenToKVPool):
        if config.strategy == SUBSPACE and kind in LATENT_MODELS:
            return None
        raise LATENT_STRATEGY.error(f'strategy = "{config.strategy}"')
    if takes_media(model_runner.model_config) and (
        config.strategy != SUBSPACE or model_runner.model_config.is_audio_model
    ):
        raise MEDIA_STRATEGY.error(f'strategy = "{config.strategy}"')
    if has_states(model_runner) != (config.strategy == SUBSPACE and kind in HYBRID_MODELS):
        raise STATE_STRATEGY.error(f'strategy = "{config.strategy}"')
    layer_ids = open_model_pool(model_runner).layer_ids
    modules = sorted(
        (
            module
            for module in model_runner.model.modules()
            if isinstance(module, RadixAttention) and module.layer_id in layer_ids
        ),
        key=lambda module: module.layer_id,
    )
    first = modules[0]
    shape = QueryShape(
        num_layers=len(modules),
        num_query_heads=first.tp_q_head_num,
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        dtype=model_runner.dtype,
        scaling=first.scaling,
    )
    req_to_token = model_runner.req_to_token_pool.req_to_token
    plan = CapturePlan.fit(
        shape,
        max_requests=TURNS_PER_REQUEST * req_to_token.shape[0],
        num_rows=config.query_rows,
        max_bytes=config.query_memory_bytes(Device.of(req_to_token).memory_bytes),
    )
    capture = QueryCapture(shape, plan, device=torch.device(model_runner.device))
    logger.info(
        "krul: query rows of up to %d requests at a time, %d rows of %d heads each: %s",
        plan.num_requests,
        plan.num_rows,
        shape.num_query_heads,
        format_bytes(plan.num_bytes),
    )
    capture.install(modules)
    return capture


def measure(setup: RankSetup, tree_cache: Any) -> MeasuredRank:
    """Prove heads, and measure what restores cost. Called by every rank at the same point of its start.

    If heads cannot be recomputed, whole prefixes are loaded: see ``RestoreMode``. ``tree_cache`` is SGLang's,
    and still empty.

    Raises:
        UnsupportedSetupError: ``truncation_reuse`` needs heads, and this model's cannot be recomputed.
    """
    config, pool, codec = setup.config, setup.pool, setup.codec
    heads, proof, mode = _proven_heads(setup, tree_cache)
    if config.truncation_reuse and (heads is None or setup.rotary is None):
        raise NOT_MOVABLE.error(
            "heads that cannot be recomputed" if heads is None else "a rotary embedding that cannot be undone"
        )
    calibration = CostCalibration(setup.model_runner, tree_cache, pool, heads, setup.start_agreement)
    # A property of the machine, not a measurement: the forward of a CPU waits until a load has landed whole.
    # A slower link takes no cores.
    serial_tiers = (DRAM_TIER,) if pool.streams.shares_cores and not config.link_mbs else ()
    costs = replace(_costs(calibration, setup), serial_tiers=serial_tiers)
    units = units_in_use(config.strategy, Precision(config.precision), pool.num_layers)
    decode_costs = calibration.decode_costs(codec, units, costs.tiers[DRAM_TIER])
    if (draft := setup.draft) is not None and not pool.streams.shares_cores:
        # Plans do not count its costs. But a GPU's kernels are compiled here, and not while a load waits.
        of_draft = CostCalibration(setup.model_runner, tree_cache, draft.pool, None, setup.start_agreement)
        of_draft.decode_costs(draft.codec, [((0,), draft.precision)], costs.tiers[DRAM_TIER])

    def add_bases(subspace: SubspaceCodec, is_older: bool) -> None:
        if not is_older or decode_costs.group is None:
            measure_group = partial(calibration.group_cost, subspace, costs.tiers[DRAM_TIER])
            if costs.serial_tiers:
                decode_costs.serial = DecodeCosts(
                    decode_costs.single, decode_costs.pair, measure_group(has_all_cores=True)
                )
            decode_costs.group = measure_group()
        codec.add_bases(subspace, is_older=is_older)
        rank = setup.agreement.rank
        num_held = codec.bases.num_held
        show("bases_held", "Different bases in which segments can be decoded.", num_held, rank)

    if setup.bases is not None and setup.bases.subspace is not None:
        add_bases(setup.bases.subspace, is_older=False)
    if setup.start_agreement.rank == 0:
        _log(mode, costs)
    online = OnlineCosts(_through_link(costs, config.link_mbs))
    run_heads = None if heads is None else heads.run
    return MeasuredRank(mode, proof, run_heads, online, decode_costs, add_bases, _kernels(pool, heads))


def _kernels(pool: DevicePool, heads: HeadRecompute | None) -> dict[str, str]:
    """Whose kernels recompute heads, decode groups in bases, and write rows to their slots."""
    return {
        "heads": "none" if heads is None else heads.kernel,
        "coder": "triton" if can_fuse_groups(pool.shape.of_numbers, pool.streams) else "torch",
        "scatter": "triton" if pool.streams.runs_triton else "torch",
    }


def _proven_heads(
    setup: RankSetup, tree_cache: Any
) -> tuple[HeadRecompute | None, HeadProof | None, RestoreMode]:
    """Heads that are proven on every rank; if they fail on one, whatever its error is, none has them."""
    runner, config = setup.model_runner, setup.config
    heads = proof = None
    why = ""
    try:
        if setup.states is not None:
            kind = "recurrent layers" if setup.states.window_pages is None else "a pool of windows"
            raise NoHeadsError(f"it has {kind}, whose states are not in the KV of tokens")
        if runner.lora_manager is not None:
            raise NoHeadsError("they would be computed without adapters")
        if setup.has_dp_attention:
            raise NoHeadsError("with DP attention other ranks would have to compute with this one")
        if takes_media(runner.model_config):
            raise NoHeadsError("they would be computed without images and sounds")
        heads = HeadRecompute(runner, setup.pool, setup.capture)
        proof = prove_heads(runner, tree_cache, setup.pool, heads)
    except NoHeadsError as error:
        why = str(error)
    except Exception as error:
        logger.debug("the proof of heads failed", exc_info=True)
        why = f"its layers failed with {type(error).__name__}: {error}"
    failures = [of_rank.decode() for of_rank in setup.start_agreement.gather_bytes(why.encode()) if of_rank]
    if not failures:
        return heads, proof, RestoreMode(config.planner, "as configured")
    why = f"heads of {type(runner.model).__name__} cannot be recomputed: {' '.join(failures[0].split())}"
    mode = RestoreMode(WHOLE_LOADS, why)
    if setup.start_agreement.rank == 0:
        logger.warning(
            'krul: %s. So planner = "%s" serves: stored prefixes are loaded whole, or computed where that is '
            "sooner, as is what fails to load",
            mode.why,
            mode.planner,
        )
    return None, None, mode


def _costs(calibration: CostCalibration, setup: RankSetup) -> RestoreCosts:
    """Costs that were measured at the first start with a model on a device, and read from a file later. Those
    of a busier machine are measured again.

    Either all ranks measure or none: measuring runs the model.
    """
    device_name = setup.pool.streams.name
    fingerprint = setup.model.identity.fingerprint
    path = Path(setup.config.cache_dir).expanduser() / COSTS_FILE
    known = load_costs(path, fingerprint, device_name)
    agreement = setup.start_agreement
    if agreement.holds_on_all(known is not None):
        assert known is not None
        if agreement.holds_on_all(not calibration.are_too_slow(known)):
            return known
        logger.info("krul: a prompt takes less than half of what was measured before: it is measured again")
    measured = calibration.measure()
    if not setup.model.is_lasting:
        return measured
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_costs(path, fingerprint, device_name, measured)
    except OSError as error:
        logger.warning("krul: what was measured cannot be kept, and is measured again next time: %s", error)
    return measured


def _through_link(costs: RestoreCosts, link_mbs: float) -> RestoreCosts:
    """The costs if loads go through a link of so many megabytes per second; 0: none."""
    if not link_mbs:
        return costs
    tier = costs.tiers[DRAM_TIER]
    slower = TierCost(tier.latency_s, max(tier.byte_s, 1e-6 / link_mbs))
    return replace(costs, tiers={**costs.tiers, DRAM_TIER: slower})


def most_chunk_tokens(chunked_prefill_size: int | None) -> int:
    """Most tokens that one forward of this engine computes."""
    if chunked_prefill_size is None or chunked_prefill_size <= 0:
        return _DEFAULT_CHUNK_TOKENS
    return chunked_prefill_size


def _log(mode: RestoreMode, costs: RestoreCosts) -> None:
    tier = costs.tiers[DRAM_TIER]
    logger.info(
        "krul: planner %s; per layer and 1000 tokens: prefill %.2f ms, head %.2f ms; loading %.2f GB/s",
        mode.planner,
        1e3 * costs.own.layer_s(1000, 0),
        1e3 * costs.head.layer_s(1000, 0),
        1e-9 / tier.byte_s if tier.byte_s > 0 else float("inf"),
    )
