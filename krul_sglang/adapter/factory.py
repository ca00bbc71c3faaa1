"""Builds krul's radix cache inside the scheduler, or stops the server with the reason."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from krul_backend.strategy import SUBSPACE
from krul_sglang.adapter.hook_targets import SCHEDULER_INIT, IncompatibleEngineError, verify_engine
from krul_sglang.adapter.platforms.nvidia import provide_toolkit
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.adapter.unsupported import SMALL_PAGES, check_flags, check_model, model_facts, options_of
from krul_sglang.config import KrulConfig
from krul_sglang.engine.common.moved_runs import MOVED_TOKENS
from krul_sglang.reasons import REASONS
from krul_sglang.traced_restore import RESTORES

logger = logging.getLogger(__name__)

BACKEND_NAME = "krul"
_RESET_WEIGHTS = "reset_tensors"
"""The action of SGLang's ``check_weights`` that overwrites weights; the others only read."""


def select_linker(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of ``Scheduler.__init__``: turn SGLang's external linker path on, with krul's linker.

    The scheduler reads the leaf once, at the start of its constructor; the command line cannot set it
    together with ``--radix-cache-backend``.
    """
    from sglang.srt.runtime_context import get_context, get_memory

    memory = get_memory()
    if memory.radix_cache_backend != BACKEND_NAME:
        return
    runtime = KrulRuntime(KrulConfig.load(memory.unified_cache_external_linker_config))
    # A server that is started through Python has not passed ``check_launch``.
    provide_toolkit(Path(runtime.config.cache_dir).expanduser())
    runtime.attach_to(scheduler)
    get_context().override(
        BACKEND_NAME,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config={
            "linker": "KrulLinker",
            "linker_module_path": "krul_sglang.adapter.linker",
            "linker_extra_config": {"options": runtime.config.as_dict()},
        },
    )


def attach_capture(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook of ``Scheduler.init_all_attention_backends``: record queries for attention statistics.

    It must come before CUDA graphs are captured, which the cache's factory does not.

    Raises:
        ConfigError, UnsupportedSetupError: see ``attach_turn_capture``.
    """
    runtime = KrulRuntime.find(scheduler)
    if runtime is not None:
        model_runner = scheduler.tp_worker.model_runner
        if scheduler.draft_worker is not None:
            runtime.draft_runners = scheduler.draft_worker._draft_model_runners()
        runtime.attach_to(model_runner)
        if runtime.config.needs_attention:
            from krul_sglang.adapter.attach import attach_turn_capture

            runtime.capture = attach_turn_capture(model_runner, runtime.config)
    return result


def build_cache(ctx: Any) -> Any:
    """Factory behind ``--radix-cache-backend krul``; ``ctx`` is SGLang's ``TreeCacheBuildContext``.

    Raises:
        IncompatibleEngineError: another SGLang release, or hooks that are not in place.
        UnsupportedSetupError: a server setting, model or pool that krul cannot serve.
        ConfigError: a memory budget that this machine does not have.
        DaemonError: the daemon that keeps stored KV cannot be started or joined.
        See also ``measure``.
    """
    verify_engine()

    import torch
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.runtime_context import get_context, get_memory, get_parallel

    from krul_backend.codec.registry import ModelCodecs
    from krul_backend.tiers.common.range_hashes import compile_hashes
    from krul_sglang.adapter.attach import measure, most_chunk_tokens
    from krul_sglang.adapter.kv_pool import open_draft, open_model_pool, stores_kv
    from krul_sglang.adapter.model_bases import BasesFile
    from krul_sglang.adapter.radix_cache import KrulRadixCache
    from krul_sglang.adapter.rank_engine import RankEngine, RankSetup
    from krul_sglang.adapter.start_proof import read_rotary_table
    from krul_sglang.adapter.state_pool import open_states
    from krul_sglang.engine.budget import SharedBases
    from krul_sglang.engine.common.agreement import RankAgreement
    from krul_sglang.engine.common.served_model import checkpoint_of, identify_model
    from krul_sglang.engine.common.store_connection import connect_store
    from krul_sglang.learning.model_kv import BARE_MODELS

    runner = ctx.tp_worker.model_runner
    runtime = KrulRuntime.of(runner)
    config = runtime.config
    if not get_memory().enable_unified_cache_external_linker:
        raise IncompatibleEngineError(
            f"SGLang's external linker is off, although the hook on {SCHEDULER_INIT} switched it on; "
            "krul would never load or store anything"
        )
    resolved = get_context().resolved_server_args_dict()
    # krul has switched this one on itself.
    flags = {**resolved, "enable_unified_cache_external_linker": False, **options_of(config)}
    check_flags(flags)
    check_model(model_facts(ctx.model_config), str(ctx.model_config.model_path))
    pool = open_model_pool(runner)
    # "auto" takes the checkpoint's format, which only the pool tells.
    check_flags({**flags, "kv_cache_dtype": pool.fp8_format})
    warn_of_small_pages(ctx.params.page_size, ctx.tp_rank)
    config.check_endpoint()
    num_hosts = resolved["nnodes"]
    num_ranks_here = max(1, ctx.tp_size * resolved["dp_size"] // num_hosts)
    # All ranks of the server start as one. Those that share a request's heads go on together: with DP
    # attention they are fewer.
    start_agreement = RankAgreement.create(ctx.tp_size)
    num_sharing = get_parallel().attn_tp_size
    agreement, restore_agreement = RankAgreement.create(num_sharing), RankAgreement.create(num_sharing)
    # Ranks may see different cgroups; all take the smallest budget, so that they hold the same prefixes.
    budget = torch.tensor([config.host_memory_bytes(num_ranks=num_ranks_here)], dtype=torch.float64)
    budgets = start_agreement.gather(budget, (1,))
    assert budgets is not None
    # Leased blocks are read-only arrays on purpose; torch has no read-only tensors and would warn.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    ranks_per_host = max(1, ctx.tp_size // num_hosts)
    cache_dir = Path(config.cache_dir).expanduser()
    model = identify_model(
        ctx.model_config,
        resolved,
        pool,
        start_agreement,
        agreement,
        cache_dir=cache_dir,
        page_size=ctx.params.page_size,
        ranks_per_host=ranks_per_host,
    )
    if ctx.tp_rank == 0:
        logger.info("krul: configuration %s", config.as_dict())
        logger.info("krul: %s", what_may_change(config))
    compile_hashes()
    connection = connect_store(
        config,
        model.identity,
        pool.streams,
        start_agreement,
        rank_bytes=int(min(of_rank.item() for of_rank in budgets)),
        ranks_per_host=ranks_per_host,
    )
    draft = open_draft(
        runtime.draft_runners,
        model,
        resolved,
        start_agreement,
        agreement,
        cache_dir=cache_dir,
        ranks_per_host=ranks_per_host,
        is_lossless=config.is_lossless,
    )
    states = open_states(runner, model, resolved, agreement)
    rotary = read_rotary_table(runner.model, pool.layer_ids)
    file: BasesFile | None = None
    if config.strategy == SUBSPACE:
        store = connection.store
        # A store that is this server's alone, and ends with it, has nobody to share them with.
        can_share = model.is_lasting and (config.endpoint or store.stats().tiers)
        file = BasesFile(
            checkpoint_of(ctx.model_config, resolved),
            cache_dir,
            model.identity,
            pool,
            rotary,
            SharedBases(store, model.identity) if can_share else None,
            has_rotary=ctx.model_config.hf_config.model_type not in BARE_MODELS,
            rank=start_agreement.rank,
            ranks_per_host=ranks_per_host,
            relearn_within=config.error_budget if config.relearn else None,
        )
    setup = RankSetup(
        config,
        runtime.gate,
        runner,
        runtime.capture,
        model,
        pool,
        ModelCodecs(
            pool.shape,
            pool.num_layers,
            rotary,
            may_come=file.may_come if file is not None else lambda digest: False,
            max_bases_bytes=runtime.share.bases or None,
        ),
        connection,
        num_ranks_here,
        stores_kv(pool, agreement.rank, ranks_per_host),
        draft,
        states,
        rotary,
        None if file is None else file.served,
        start_agreement,
        agreement,
        restore_agreement,
        ctx.params.tp_cache_group if ctx.tp_size > 1 else None,
        most_chunk_tokens(resolved["chunked_prefill_size"]),
    )

    def make_cache(params: Any) -> KrulRadixCache:
        """SGLang makes the linker next, which needs what is measured with the cache."""
        cache = KrulRadixCache(params, runtime.capture)
        runtime.engine = RankEngine(setup, measure(setup, cache))
        return cache

    # The linker is made by SGLang, which hands on nothing of ours but these parameters.
    runtime.attach_to(ctx.params)
    runtime.cache = create_unified_radix_cache(ctx, cache_class=make_cache)
    if file is not None:
        # Last, so that it disturbs no measurement.
        file.learn(setup.start_agreement, setup.codec.make_room_for_bases, runtime.engine.add_bases)
    connection.locks.begin()
    return runtime.cache


def what_may_change(config: KrulConfig) -> str:
    """One line for the log: whether stored KV comes back as it was."""
    if config.is_lossless:
        return f"stored KV comes back to the bit (strategy={SUBSPACE} keeps it many times smaller)"
    if config.strategy == SUBSPACE:
        return (
            f"stored KV may change predictions by {config.error_budget:g} nats per token "
            "(error_budget; strategy=none loses nothing)"
        )
    return (
        f"strategy={config.strategy} with precision={config.precision} changes answers, by how much is not "
        "limited (strategy=none with precision=native loses nothing)"
    )


def warn_of_small_pages(page_size: int, tp_rank: int) -> None:
    """Warn of ``--page-size 1``, on the first rank only."""
    if page_size == 1 and tp_rank == 0:
        logger.warning(SMALL_PAGES)


def forward_with_restore(original: Any, worker: Any, batch: Any = None, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of ``TpModelWorker.forward_batch_generation``: prefixes that are restored come first.

    It runs on the host at every forward, also one that is replayed as a graph. So recording of attention is
    set up here, too. A forward that verifies drafted tokens restores nothing: its batch still has the lengths
    and the load of the prompt.
    """
    runtime = KrulRuntime.find(worker.model_runner)
    # A draft model's worker has the drafts verified without SGLang's batch of the scheduler.
    seen = kwargs.get("forward_batch") if batch is None else batch
    if runtime is None or seen is None:
        return original(worker, batch, *args, **kwargs)
    runtime.gate.note_forward()
    if seen.forward_mode.is_idle():
        # Other ranks have requests, this one none.
        return original(worker, batch, *args, **kwargs)
    runtime.linker.steps.note_work()
    capturing = nullcontext() if runtime.capture is None else runtime.capture.recording(seen)
    # With DP attention all loads have ended, and how long a forward takes depends on what other ranks run.
    may_restore = not runtime.engine.setup.has_dp_attention
    with capturing:
        if may_restore and seen.forward_mode.is_extend_without_speculative():
            restore = runtime.linker.restore_path.forward
            result = restore.run(batch, lambda: original(worker, batch, *args, **kwargs))
        else:
            result = original(worker, batch, *args, **kwargs)
    if runtime.linker.provenance is not None:
        runtime.linker.provenance.after_forward(seen)
    if runtime.linker.draft is not None:
        runtime.linker.note_draft(seen)
    return result


def change_weights(original: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of the methods that write weights: gives the model a new identity before they run.

    An update that fails counts as a change: it may have written some weights.
    """
    runtime = KrulRuntime.find(updater.scheduler)
    is_change = getattr(request, "action", _RESET_WEIGHTS) == _RESET_WEIGHTS
    if runtime is None or not is_change:
        return original(updater, request, *args, **kwargs)
    runtime.cache.linker.begin_weights_change()
    try:
        return original(updater, request, *args, **kwargs)
    finally:
        # Of a session of several updates the last one completes the weights.
        if updater._session is None:
            runtime.cache.end_weights_change()


def use_idle_time(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of ``Scheduler.on_idle``: encodes, and probes a stored path while no request runs or waits.

    If requests wait while none runs, they may need the memory of the path that is kept for a probe.
    """
    runtime = KrulRuntime.find(scheduler)
    if runtime is None:
        return
    runtime.gate.note_idle()
    if scheduler.is_fully_idle():
        runtime.cache.linker.probe_when_idle()
    else:
        runtime.cache.linker.drop_probe_candidate()


def end_session(result: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook of ``close_session``: the conversation of a session that a client closes is demoted."""
    runtime = KrulRuntime.find(scheduler)
    if runtime is not None:
        runtime.linker.end_session(request.session_id)
    return result


def schedule(original: Any, scheduler: Any, running_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of ``get_new_batch_prefill``: requests for which much is read are passed over while others
    can go on, and what is stored of those that wait comes to DRAM."""
    runtime = KrulRuntime.find(scheduler)
    if runtime is None:
        return original(scheduler, running_batch, *args, **kwargs)
    queue, held_back, hooks = scheduler.waiting_queue, list[Any](), runtime.linker.steps.hooks
    if not running_batch.batch_is_full:
        num_running = len(running_batch.reqs) + (scheduler.chunked_req is not None)
        with hooks:
            held_back = runtime.cache.look_ahead.hold_back(queue, num_running)
    if held_back:
        passed_over = {req.rid for req in held_back}
        scheduler.waiting_queue = [req for req in queue if req.rid not in passed_over]
    try:
        return original(scheduler, running_batch, *args, **kwargs)
    finally:
        if held_back:
            scheduler.waiting_queue = _in_order(queue, [*held_back, *scheduler.waiting_queue])
        runtime.gate.has_queue = bool(scheduler.waiting_queue)
        with hooks:
            runtime.cache.look_ahead.look_up(scheduler.waiting_queue)


def _in_order(queue: Sequence[Any], left: Sequence[Any]) -> list[Any]:
    """Sort requests that are ``left`` as they were in ``queue``, and put new ones behind them."""
    place = {id(req): number for number, req in enumerate(queue)}
    return sorted(left, key=lambda req: place.get(id(req), len(queue)))


def add_moved_tokens(result: Any, streamer: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook of ``get_cached_tokens_details``: says how many of a request's tokens came back as a moved
    run. They are among those of the host."""
    num_tokens = getattr(req, MOVED_TOKENS, 0)
    return {**result, "moved": num_tokens} if result and num_tokens else result


def add_stats(result: Any, controller: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook of ``get_internal_state``: ``/server_info`` shows krul's counters under ``"krul"``.

    The last restores are under ``"krul_restores"``, reasons of the last requests under ``"krul_reasons"``.
    """
    runtime = KrulRuntime.find(controller.scheduler)
    if runtime is not None:
        share = {"total": runtime.share.total_bytes, **asdict(runtime.share)}
        result.internal_state[BACKEND_NAME] = {
            **runtime.linker.stats(),
            "held_back": runtime.cache.look_ahead.num_held_back,
            "device_share": share,
        }
        result.internal_state[RESTORES] = runtime.linker.traces()
        result.internal_state[REASONS] = runtime.linker.reasons.as_text()
    return result
