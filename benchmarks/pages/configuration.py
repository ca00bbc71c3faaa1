"""The text of ``docs/configuration.md``: every option of ``KrulConfig``, its default and its meaning."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

import orjson

from benchmarks.pages import ROOT
from krul_sglang.config import CONFIG_FILE_VARIABLE, DAEMON_MARK, ENV_PREFIX, FLAG, KrulConfig

PAGE = ROOT / "docs" / "configuration.md"

_HEAD = f"""# Configuration

Written by `python -m benchmarks.pages` from `krul_sglang/config.py`; a test compares the two.

The defaults work. An option can be given in three places, and a later one wins:

1. a TOML file, named by the environment variable `{CONFIG_FILE_VARIABLE}`: `host_memory = "64GiB"`
2. an environment variable `{ENV_PREFIX}<OPTION>`: `{ENV_PREFIX}HOST_MEMORY=64GiB`
3. SGLang's own flag: `{FLAG} '{{"host_memory": "64GiB"}}'`

An unknown option or a bad value stops the server, with one line that says what is accepted.

{DAEMON_MARK} options belong to the daemon that the server starts. With `endpoint` the server joins a daemon
that runs already, and these options are refused: give them to `krul-backend serve` instead
([tiers.md](tiers.md)).
"""


def default_text(option: Field[Any]) -> str:
    """The default as a user would write it in JSON: ``"auto"``, ``"512MiB"``, ``0.25``, ``false``."""
    value = KrulConfig().as_dict()[option.name]
    if isinstance(value, int) and not isinstance(value, bool) and value and value % (1 << 20) == 0:
        value = f"{value >> 20}MiB"
    return orjson.dumps(value).decode()


def page() -> str:
    lines = ["| option | default | accepted | meaning |", "|---|---|---|---|"]
    for option in fields(KrulConfig):
        accepted, description = option.metadata["accepted"], option.metadata["description"]
        lines.append(f"| `{option.name}` | `{default_text(option)}` | {accepted} | {description} |")
    return "\n".join((_HEAD, *lines, ""))
