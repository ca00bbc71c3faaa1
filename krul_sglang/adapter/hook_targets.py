"""Lists what of SGLang krul hooks or relies on, and checks at start that it is still there.

SGLang logs and swallows errors of plugin load and of hook application, so a renamed target would run the
server without krul. ``verify_engine`` is therefore called where an exception does stop the server: in the
radix cache factory.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass

from krul_backend.errors import KrulError

SUPPORTED_SGLANG = ("0.5.23",)

PREPARE_SERVER_ARGS = "sglang.srt.server_args.prepare_server_args"
SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"
INIT_ATTENTION = "sglang.srt.managers.scheduler.Scheduler.init_all_attention_backends"
INIT_POOLS = "sglang.srt.managers.scheduler.Scheduler.init_memory_pools"
POOL_BUDGET = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget"
NEW_BATCH = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
ON_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"
CLOSE_SESSION = "sglang.srt.managers.scheduler.Scheduler.close_session"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
INTERNAL_STATE = (
    "sglang.srt.managers.scheduler_components.internal_state."
    "SchedulerInternalStateController.get_internal_state"
)
CACHED_TOKENS = (
    "sglang.srt.managers.scheduler_components.output_streamer."
    "SchedulerOutputStreamer.get_cached_tokens_details"
)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHT_WRITERS = tuple(
    f"{_UPDATER}.{name}"
    for name in (
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "begin_weight_update",
        "end_weight_update",
        "check_weights",
        "release_memory_occupation",
        "resume_memory_occupation",
    )
)
"""Methods after which a running server may have other weights, or a pool with other contents.

Between ``begin_weight_update`` and ``end_weight_update`` a trainer may write into the weights by itself;
``check_weights`` overwrites them when it is told to reset.
"""


class IncompatibleEngineError(KrulError):
    """The installed SGLang is not one that this release of krul was tested with."""


@dataclass(frozen=True)
class Target:
    """A callable of the engine. ``parameters`` are the names that krul passes or overrides, in order."""

    path: str
    parameters: tuple[str, ...]
    hooked: bool = False


_WRAPPER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker"
_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_RESIDUAL = "sglang.srt.layers.layer_boundary.residual.batch"

TARGETS = (
    Target(PREPARE_SERVER_ARGS, ("argv",), hooked=True),
    Target(SCHEDULER_INIT, ("self", "server_args"), hooked=True),
    Target(INIT_POOLS, ("self",), hooked=True),
    Target(POOL_BUDGET, ("self", "budget_bytes"), hooked=True),
    Target(INIT_ATTENTION, ("self",), hooked=True),
    Target("sglang.srt.speculative.base_spec_worker.BaseSpecWorker._draft_model_runners", ("self",)),
    Target(NEW_BATCH, ("self", "running_batch"), hooked=True),
    Target(
        "sglang.srt.managers.schedule_batch.Req.init_next_round_input", ("self", "tree_cache", "cow_mamba")
    ),
    Target(ON_IDLE, ("self",), hooked=True),
    Target(CLOSE_SESSION, ("self", "recv_req"), hooked=True),
    Target("sglang.srt.managers.scheduler.Scheduler.is_fully_idle", ("self",)),
    Target(INTERNAL_STATE, ("self", "recv_req"), hooked=True),
    Target(CACHED_TOKENS, ("self", "req"), hooked=True),
    *(Target(path, ("self", "recv_req"), hooked=True) for path in WEIGHT_WRITERS),
    Target(_UPDATER, ("scheduler", "_session")),
    Target("sglang.srt.mem_cache.registry.create_unified_radix_cache", ("ctx", "cache_class")),
    Target(f"{_CACHE}.init_cache_linker", ("self", "cache_linker")),
    Target(f"{_CACHE}.check_hicache_events", ("self",)),
    Target(f"{_CACHE}.checkpoint_into_tree", ("self", "req", "up_to", "kwargs")),
    Target(f"{_CACHE}.claim_kv_row", ("self", "req")),
    Target(f"{_CACHE}.free_kv_row", ("self", "kv", "ranges")),
    Target(f"{_CACHE}.on_release", ("self", "req", "checkpointed")),
    Target("sglang.srt.session.streaming_session.StreamingSession.borrowed_slot", ("self", "req")),
    Target("sglang.srt.mem_cache.utils.get_storage_hash_str", ("key", "prior_hash", "page_size")),
    Target(f"{_CACHE}.path_device_indices", ("self", "node")),
    Target(f"{_CACHE}.evict", ("self", "params")),
    Target(f"{_CACHE}.evict_for_alloc", ("self", "params")),
    Target(f"{_CACHE}.inc_lock_ref", ("self", "node_id")),
    Target(f"{_CACHE}.dec_lock_ref", ("self", "node_id", "params")),
    Target(f"{_WRAPPER}.match", ("self", "key", "req", "result")),
    Target(f"{_WRAPPER}._sync_restorable_prefix", ("self", "restorable", "num_pages", "device_hit_pages")),
    Target(f"{_CACHE}._all_reduce_attn_groups", ("self",)),
    Target(f"{_WRAPPER}.load_back", ("self", "req")),
    Target(f"{_WRAPPER}.offload_nodes", ("self", "node_ids")),
    Target(f"{_WRAPPER}.release_request", ("self", "rid")),
    Target(f"{_LINKER}.lookup", ("self", "rid", "transfers")),
    Target(f"{_LINKER}.load", ("self", "rid", "transfers")),
    Target(f"{_LINKER}.finish_layer_wise_loading", ("self", "counter_index")),
    Target(FORWARD, ("self", "batch"), hooked=True),
    Target(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner", "capture_hidden_mode", "return_hidden_states_before_norm"),
    ),
    Target("sglang.srt.model_executor.model_runner.ModelRunner.forward", ("self", "forward_batch")),
    Target(f"{_RESIDUAL}.start", ("forward_batch",)),
    Target(f"{_RESIDUAL}.to_pp", ("hidden_states", "forward_batch")),
    Target(f"{_RESIDUAL}.clear", ("forward_batch",)),
    Target(f"{_RESIDUAL}.stream_of", ("forward_batch",)),
    Target("sglang.srt.layers.layer_boundary.residual.stream.ResidualStream.export", ("self", "hidden")),
    Target(
        "sglang.srt.layers.layer_boundary.stage.StageBoundary.from_pp", ("self", "tensors", "forward_batch")
    ),
    Target("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend", ("self",)),
    Target(
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override"),
    ),
)


def check_version() -> None:
    """Raises IncompatibleEngineError unless the installed SGLang is a supported release."""
    import sglang

    if sglang.__version__ not in SUPPORTED_SGLANG:
        raise IncompatibleEngineError(
            f"SGLang {sglang.__version__} is installed; this release of krul-sglang supports "
            f"{', '.join(SUPPORTED_SGLANG)} (pip install 'sglang=={SUPPORTED_SGLANG[-1]}')"
        )


def check_signatures(targets: tuple[Target, ...] = TARGETS) -> None:
    """Raises IncompatibleEngineError if a target is gone or no longer takes the expected parameters."""
    for target in targets:
        try:
            function = pkgutil.resolve_name(_with_colon(target.path))
        except (ImportError, AttributeError) as error:
            raise IncompatibleEngineError(_describe(target, "does not exist")) from error
        found = tuple(inspect.signature(function).parameters)
        wanted = iter(found)
        if not all(name in wanted for name in target.parameters):
            raise IncompatibleEngineError(
                _describe(target, f"takes ({', '.join(found)}), expected ({', '.join(target.parameters)})")
            )


def check_hooks_installed(targets: tuple[Target, ...] = TARGETS) -> None:
    """Raises IncompatibleEngineError if a hook was registered and yet SGLang did not apply it."""
    for target in targets:
        if target.hooked and not hasattr(pkgutil.resolve_name(_with_colon(target.path)), "__wrapped__"):
            raise IncompatibleEngineError(
                _describe(target, "is not hooked: SGLang logged why when it loaded its plugins")
            )


def verify_engine() -> None:
    """All checks. Raises IncompatibleEngineError with one line that names what is wrong."""
    check_version()
    check_signatures()
    check_hooks_installed()


def _with_colon(path: str) -> str:
    """``package.module:Class.method``: the form that ``pkgutil.resolve_name`` splits without guessing."""
    parts = path.split(".")
    first_class = next((i for i, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[:first_class]) + ":" + ".".join(parts[first_class:])


def _describe(target: Target, what: str) -> str:
    import sglang

    return (
        f"SGLang {sglang.__version__}: {target.path} {what}; "
        f"this release of krul-sglang supports {', '.join(SUPPORTED_SGLANG)}"
    )
