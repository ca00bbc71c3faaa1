"""Holds what computing and loading cost on this machine, in seconds that a planner adds up; saves them.

A server measures them once per model and device.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from krul_backend.atomic_file import replacing
from krul_backend.errors import RestoreError

FORMAT = "krul restore costs 1"

_logger = logging.getLogger(__name__)

_Numbers = dict[str, Annotated[float, Meta(ge=0)]]


@dataclass(frozen=True)
class ComputeCost:
    """Seconds for one layer: ``launch_s + token_s * n + context_s * n * (p + n / 2)``.

    ``n`` tokens are computed after ``p`` that are in the pool: a token sees ``p`` and, on average, half of
    the others. All three numbers are non-negative.
    """

    launch_s: float
    token_s: float
    context_s: float

    def layer_s(self, num_tokens: int, num_past: int) -> float:
        """Seconds for one layer; nothing for no tokens."""
        if num_tokens == 0:
            return 0.0
        context = num_tokens * (num_past + num_tokens / 2)
        return self.launch_s + self.token_s * num_tokens + self.context_s * context


@dataclass(frozen=True)
class TierCost:
    """Seconds to bring ``n > 0`` bytes of one layer of one segment: ``latency_s + byte_s * n``."""

    latency_s: float
    byte_s: float

    def load_s(self, num_bytes: float) -> float:
        """Seconds for one copy; nothing for no bytes."""
        return self.latency_s + self.byte_s * num_bytes if num_bytes > 0 else 0.0


@dataclass(frozen=True)
class RestoreCosts:
    """All that a plan depends on beside what is stored.

    ``head``: a layer of the separate forward that recomputes heads. ``own``: a layer of the engine's own
    forward, which computes the new tokens, and the whole prefix when nothing is restored. ``tiers``: by
    name. ``overhead_s``: seconds that a restore takes beyond its pipeline, whatever the plan: threads that
    start, streams that get in each other's way. ``serial_tiers``: on a CPU, tiers from which a load takes the
    cores of the forward, which therefore waits until all of it has landed.
    """

    head: ComputeCost
    own: ComputeCost
    tiers: Mapping[str, TierCost]
    overhead_s: float = 0.0
    serial_tiers: tuple[str, ...] = ()


class _Entry(Struct):
    """The costs of one model on one device; each set of numbers by the names of its dataclass."""

    head: _Numbers
    own: _Numbers
    tiers: dict[str, _Numbers]


class _File(Struct):
    """Entries by fingerprint and device. Those of others are kept as they are."""

    costs: dict[str, Raw]
    format: Literal["krul restore costs 1"] = "krul restore costs 1"


def load_costs(path: Path, fingerprint: str, device: str) -> RestoreCosts | None:
    """Read the costs that were saved for this model and device; None if there are none.

    A file that is damaged or not one of these counts as empty, with one warning.
    """
    try:
        raw = _read(path).get(_key(fingerprint, device), Raw(b"null"))
        entry = msgspec.json.decode(raw, type=_Entry | None)
        if entry is None:
            return None
        tiers = {name: TierCost(**cost) for name, cost in entry.tiers.items()}
        return RestoreCosts(ComputeCost(**entry.head), ComputeCost(**entry.own), tiers)
    except (RestoreError, TypeError, ValueError) as error:
        _logger.warning("costs are measured again, those in %s cannot be used: %s", path, error)
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
    tiers = {name: asdict(cost) for name, cost in costs.tiers.items()}
    entry = msgspec.json.encode(_Entry(asdict(costs.head), asdict(costs.own), tiers))
    content = msgspec.json.encode(_File({**entries, _key(fingerprint, device): Raw(entry)}))
    with replacing(path) as file:
        file.write(msgspec.json.format(content, indent=2) + b"\n")


def _key(fingerprint: str, device: str) -> str:
    return f"{fingerprint} {device}"


def _read(path: Path) -> dict[str, Raw]:
    """All entries of the file; none if there is no file. Raises RestoreError for a file of another kind."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).costs
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RestoreError(f"{path} is not a file of format {FORMAT!r} ({error}): remove it") from None
