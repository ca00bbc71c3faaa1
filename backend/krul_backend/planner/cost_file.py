"""Calibrated costs on disk, so that a server measures them once per model and device."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from krul_backend.atomic_file import replacing
from krul_backend.errors import RestoreError
from krul_backend.planner.costs import ComputeCost, RestoreCosts, TierCost

FORMAT = "krul restore costs 1"

_logger = logging.getLogger(__name__)


def load_costs(path: Path, fingerprint: str, device: str) -> RestoreCosts | None:
    """What was saved for this model and device; None if nothing was.

    A file that is damaged or not one of these counts as empty, with one warning.
    """
    try:
        entry = _read(path).get(_key(fingerprint, device))
        return None if entry is None else _parse(entry)
    except RestoreError as error:
        _logger.warning("costs are measured again: %s", error)
        return None


def save_costs(path: Path, fingerprint: str, device: str, costs: RestoreCosts) -> None:
    """Add these costs to the file, in one step: readers see the old file or the new one.

    Entries of other models and devices stay. A file that is damaged or not one of these is left as it is,
    with one warning: it may be somebody else's. Of two writers at the same time one entry may be lost.

    Raises:
        OSError: the folder cannot be written to.
    """
    try:
        entries = _read(path)
    except RestoreError as error:
        _logger.warning("measured costs are not saved: %s", error)
        return
    entry = {
        "head": asdict(costs.head),
        "own": asdict(costs.own),
        "tiers": {name: asdict(cost) for name, cost in costs.tiers.items()},
    }
    content = {"format": FORMAT, "costs": {**entries, _key(fingerprint, device): entry}}
    with replacing(path) as file:
        file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def _key(fingerprint: str, device: str) -> str:
    return f"{fingerprint} {device}"


def _read(path: Path) -> dict[str, Any]:
    """All entries of the file; none if there is no file. Raises RestoreError for a file of another kind."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RestoreError(f"{path} cannot be read: {error}") from None
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise RestoreError(f"{path} is not JSON ({error}): remove it to start anew") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RestoreError(f"{path} is not a file of format {FORMAT!r}: remove it, or name another")
    entries = content.get("costs")
    if not isinstance(entries, dict):
        raise RestoreError(f"{path} is damaged (no costs): remove it to start anew")
    return entries


def _parse(entry: Any) -> RestoreCosts:
    try:
        tiers = {name: TierCost(**_numbers(cost)) for name, cost in entry["tiers"].items()}
        return RestoreCosts(
            ComputeCost(**_numbers(entry["head"])), ComputeCost(**_numbers(entry["own"])), tiers
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RestoreError(f"saved costs are damaged ({error!r})") from None


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}, a number of at least 0 is needed")
    return {name: float(value) for name, value in values.items()}
