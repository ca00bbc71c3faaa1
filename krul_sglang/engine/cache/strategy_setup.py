"""Builds what decides how a rank's turns are stored: a selector of strategies, or an error budget."""

from __future__ import annotations

from typing import Any

from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.registry import SelectorOptions, make_selector
from krul_backend.strategy.strategy import Precision
from krul_sglang.engine.budget.error_budget import ErrorBudget
from krul_sglang.engine.budget.probing import Prober
from krul_sglang.engine.budget.provenance import KvProvenance
from krul_sglang.engine.budget.served_bases import ServedBases
from krul_sglang.engine.cache.runtime import KrulRuntime
from krul_sglang.engine.save.strategy_choice import SelectorDecision


def make_selector_decision(runtime: KrulRuntime, codec: SegmentCodec) -> SelectorDecision:
    """For every strategy but ``subspace``."""
    config = runtime.config
    options = SelectorOptions(
        gamma=config.gamma, layer_ratio=config.r_l, precision=Precision(config.precision)
    )
    return SelectorDecision(
        make_selector(config.strategy, options),
        codec,
        runtime.pool,
        runtime.agreement,
        num_heads=0 if runtime.capture is None else runtime.capture.num_heads,
    )


def make_budget(
    runtime: KrulRuntime,
    codec: SegmentCodec,
    bases: ServedBases,
    provenance: KvProvenance,
    group: Any | None,
) -> ErrorBudget:
    """For the strategy ``subspace``. ``group`` joins the ranks while they probe; None for a single rank."""
    config, pool, store = runtime.config, runtime.pool, runtime.connection.store
    return ErrorBudget(
        limit=config.error_budget,
        probe_share=config.probe_share,
        store=store,
        provenance=provenance,
        model=runtime.model,
        pool=pool,
        codec=codec,
        bases=bases,
        prober=Prober(runtime.model_runner, runtime.capture, pool, codec, store, runtime.model, group),
        agreement=runtime.agreement,
    )
