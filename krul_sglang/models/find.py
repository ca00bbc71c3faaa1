"""Finds a model by the name that a command line was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from krul_backend.errors import ConfigError

REFERENCE_MODEL = Path(__file__).parents[1] / "assets" / "reference-model"
BUNDLED = "bundled"
"""The name of the reference model."""
SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def find_model(name: str, tell: Callable[[str], None], *, option: str) -> str:
    """The folder of a model, or the name of one on a hub unchanged: only the hub can check it.

    ``name``: ``bundled``, ``smollm2``, a checkpoint directory or a hub name. SmolLM2 is made if it is not
    there; ``tell`` is given a line about each step. ``option`` is what errors call the name.

    Raises:
        ModelError: SmolLM2 cannot be made.
        ConfigError: no such model.
    """
    if name == BUNDLED:
        if not REFERENCE_MODEL.exists():
            raise ConfigError(f"this installation comes without {REFERENCE_MODEL.name}; give {option}")
        return str(REFERENCE_MODEL)
    if name == SMOLLM2:
        return str(smollm2_folder(tell))
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{option} {name} has no config.json: it is not a checkpoint directory")
        return str(directory)
    if directory.exists() or _HUB_NAME.fullmatch(name) is None:
        raise ConfigError(f"{option} {name} is not a directory (and cannot be a hub name)")
    return name


def smollm2_folder(tell: Callable[[str], None]) -> Path:
    """The folder of SmolLM2 in krul's cache directory; it is made if it is not there.

    Raises:
        ModelError: it cannot be made.
        ConfigError: the cache directory cannot be written to.
    """
    # Imported late: the help of a command line needs neither.
    from krul_sglang.config import KrulConfig
    from krul_sglang.models.smollm2 import make_smollm2

    cache_dir = Path(KrulConfig.load(None).cache_dir).expanduser()
    try:
        return make_smollm2(cache_dir, tell)
    except OSError as error:
        raise ConfigError(f"cache directory {cache_dir}: {error}") from error
