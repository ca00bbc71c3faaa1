"""A plugin of SGLang for servers of the tests: a planner and a fault that the product does not have.

``plugin_path`` holds the metadata by which SGLang finds it, on servers that are started with ``WITH_PLUGIN``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from krul_backend.planner.planners import PLANNERS
from tests.support.random_heads import RandomPlanner

_SKIP_HEADS = "TESTS_SKIP_HEADS"
_RECOMPUTE = "krul_sglang.engine.restore.restore_forward.RestoreForward._recompute"
_PATHS = (Path(__file__).parent / "plugin_path", Path(__file__).parents[2])

WITH_PLUGIN = {
    "PYTHONPATH": os.pathsep.join([*map(str, _PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
}
"""Environment of a server that has ``planner = "random"``."""

SKIPPED_HEADS = {**WITH_PLUGIN, _SKIP_HEADS: "1"}
"""Environment of a server that, besides, never recomputes heads, and so gives wrong answers."""


def register() -> None:
    """Called by SGLang in every process of the server, before its arguments are read."""
    PLANNERS[RandomPlanner.name] = RandomPlanner()
    if os.environ.get(_SKIP_HEADS):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_RECOMPUTE, skip_heads, HookType.AROUND)


def skip_heads(original: Any, *args: Any) -> None:
    """AROUND hook of ``RestoreForward._recompute``: leave the slots of heads as they are."""
