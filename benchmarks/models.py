"""Models by the names that the benchmarks' command lines take."""

from __future__ import annotations

import logging
from pathlib import Path

from krul_sglang.cli.app import REFERENCE_MODEL
from krul_sglang.config import KrulConfig
from krul_sglang.models.smollm2 import make_smollm2


def model_path(name: str) -> str:
    """``bundled``, ``smollm2`` (made if it is not there), or anything else unchanged: a folder, a hub's name.

    Raises:
        ModelError: SmolLM2 cannot be made.
    """
    if name == "bundled":
        return str(REFERENCE_MODEL)
    if name != "smollm2":
        return name
    cache_dir = Path(KrulConfig.load(None).cache_dir).expanduser()
    return str(make_smollm2(cache_dir, logging.getLogger(__name__).info))
