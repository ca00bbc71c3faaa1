"""Registers krul with SGLang: the entry point of group ``sglang.srt.plugins``.

SGLang calls it in each of its processes. Nothing changes unless the server was started with
``--radix-cache-backend krul``; but no server falls back to krul's CPU platform beside a GPU.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from krul_backend.errors import KrulError

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the ``krul`` radix cache backend and the hooks it needs. Safe to call again."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from krul_sglang.adapter import device_share, factory, hook_targets

    if get_radix_cache_factory(factory.BACKEND_NAME) is not None:
        return
    register_radix_cache_backend(factory.BACKEND_NAME, factory.build_cache)
    HookRegistry.register(hook_targets.PREPARE_SERVER_ARGS, check_launch, HookType.AFTER)
    HookRegistry.register(hook_targets.SCHEDULER_INIT, factory.select_linker, HookType.BEFORE)
    HookRegistry.register(hook_targets.INIT_POOLS, device_share.reserve_share, HookType.BEFORE)
    HookRegistry.register(hook_targets.POOL_BUDGET, device_share.leave_share, HookType.AROUND)
    HookRegistry.register(hook_targets.INIT_ATTENTION, factory.attach_capture, HookType.AFTER)
    HookRegistry.register(hook_targets.NEW_BATCH, factory.schedule, HookType.AROUND)
    HookRegistry.register(hook_targets.ON_IDLE, factory.use_idle_time, HookType.BEFORE)
    HookRegistry.register(hook_targets.CLOSE_SESSION, factory.end_session, HookType.AFTER)
    HookRegistry.register(hook_targets.FORWARD, factory.forward_with_restore, HookType.AROUND)
    for path in hook_targets.WEIGHT_WRITERS:
        HookRegistry.register(path, factory.change_weights, HookType.AROUND)
    HookRegistry.register(hook_targets.INTERNAL_STATE, factory.add_stats, HookType.AFTER)
    HookRegistry.register(hook_targets.CACHED_TOKENS, factory.add_moved_tokens, HookType.AFTER)


def check_launch(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of ``prepare_server_args``: end a wrong launch with one line, before any process starts.

    The scheduler checks again, on resolved values, also for servers that are started through Python.
    """
    from krul_sglang.adapter.factory import BACKEND_NAME
    from krul_sglang.adapter.platforms.nvidia import refuse_cpu_beside_gpu

    try:
        refuse_cpu_beside_gpu(server_args.device)
        if server_args.radix_cache_backend == BACKEND_NAME:
            _check(server_args)
    except KrulError as error:
        sys.exit(f"krul-sglang: {error}")


def _check_model(server_args: Any) -> None:
    """Refuse models of kinds that krul cannot serve, by their configuration, before weights are read.

    Raises UnsupportedSetupError.
    """
    from sglang.srt.configs.model_config import ModelConfig

    from krul_sglang.adapter.unsupported import check_model, model_facts

    try:
        facts = model_facts(ModelConfig.from_server_args(server_args))
    except Exception as error:
        # SGLang reads it again, and reports the error better.
        logger.debug("krul: the model's configuration cannot be read: %s", error)
        return
    check_model(facts, str(server_args.model_path))


def _check(server_args: Any) -> None:
    """Raises KrulError, whose text is the line to show, if krul cannot serve with these arguments."""
    from krul_backend.errors import ConfigError
    from krul_sglang.adapter.hook_targets import check_version
    from krul_sglang.adapter.platforms.nvidia import provide_toolkit
    from krul_sglang.adapter.unsupported import check_flags, flags_of
    from krul_sglang.config import FLAG, KrulConfig

    check_version()
    flag_values = server_args.unified_cache_external_linker_config
    if flag_values is not None and not isinstance(flag_values, dict):
        raise ConfigError(f"{FLAG}: expected a JSON object, got {type(flag_values).__name__}")
    config = KrulConfig.load(flag_values)
    check_flags(flags_of(server_args, config))
    model_path = str(server_args.model_path)
    if model_path.startswith(("/", "./", "../", "~")) and not Path(model_path).expanduser().exists():
        raise ConfigError(f"--model-path {model_path}: no such file or directory")
    _check_model(server_args)
    config.check_endpoint()
    config.host_memory_bytes(num_ranks=1)
    provide_toolkit(Path(config.cache_dir).expanduser())
