"""Builds what decides how a rank's turns are encoded: a selector of strategies, or an error budget."""

from __future__ import annotations

from typing import Any

from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.registry import SelectorOptions, make_selector
from krul_backend.strategy.strategy import Precision
from krul_sglang.engine.budget.error_budget import ErrorBudget, table_path
from krul_sglang.engine.budget.probing import Prober
from krul_sglang.engine.budget.provenance import KvProvenance
from krul_sglang.engine.cache.runtime import KrulRuntime
from krul_sglang.engine.save.strategy_choice import SelectorDecision


def make_selector_decision(runtime: KrulRuntime) -> SelectorDecision:
    """For every strategy but ``budget``."""
    config, shape = runtime.config, runtime.pool.shape
    options = SelectorOptions(
        gamma=config.gamma,
        layer_ratio=config.r_l,
        precision=Precision(config.precision),
        error_limit=config.error_budget,
        native_token_bytes=shape.k_token_bytes + shape.v_token_bytes,
    )
    return SelectorDecision(
        make_selector(config.strategy, options),
        runtime.pool,
        runtime.agreement,
        num_heads=0 if runtime.capture is None else runtime.capture.num_heads,
    )


def make_budget(
    runtime: KrulRuntime, codec: SegmentCodec, provenance: KvProvenance, group: Any | None
) -> ErrorBudget:
    """For the strategy ``budget``. ``group`` joins the ranks while they probe; None for a single rank."""
    config, model, pool = runtime.config, runtime.model, runtime.pool
    return ErrorBudget(
        limit=config.error_budget,
        store=runtime.connection.store,
        provenance=provenance,
        probe_share=config.probe_share,
        # What is learned of a model is kept on disk only if a later start may have the same model.
        table_path=table_path(config.cache_dir, model.identity) if model.is_lasting else None,
        model=model,
        pool=pool,
        codec=codec,
        prober=Prober(runtime.model_runner, runtime.capture, pool, codec, group),
        agreement=runtime.agreement,
    )
