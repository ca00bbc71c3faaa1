"""What one run of the benchmark measures, and every default."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.restore.model import SHAPES
from benchmarks.restore.tiers import DramTier, SsdTier, Tier
from krul_backend.device import Device
from krul_backend.errors import KrulError


class RestoreBenchmarkError(KrulError):
    """Options that measure nothing."""


class WrongRestoreError(KrulError):
    """A restore gave other results than recomputing, or a check that must fail did not."""


@dataclass(frozen=True)
class TierSpec:
    """``bandwidth_gbs`` in 1e9 bytes per second limits the tier; None leaves it as fast as it is."""

    name: str
    bandwidth_gbs: float | None = None

    @classmethod
    def parse(cls, text: str, bandwidth_gbs: float | None = None) -> TierSpec:
        """``dram``, ``ssd``, or with a limit, ``dram:0.2``; ``bandwidth_gbs`` is that of tiers without one.

        Raises:
            RestoreBenchmarkError: another tier, or a limit that is no positive number.
        """
        name, _, limit = text.partition(":")
        if name not in (DramTier.name, SsdTier.name):
            raise RestoreBenchmarkError(
                f"tier {text!r} is unknown (accepted: dram, ssd, dram:GB/s, ssd:GB/s)"
            )
        try:
            limit_gbs = float(limit) if limit else bandwidth_gbs
        except ValueError:
            raise RestoreBenchmarkError(f"tier {text!r}: {limit!r} is not a number of GB/s") from None
        if limit_gbs is not None and not limit_gbs > 0:
            raise RestoreBenchmarkError(f"tier {text!r} is limited to {limit_gbs} GB/s, that is no bandwidth")
        return cls(name, limit_gbs)

    def least_s(self, num_bytes: int) -> float:
        """Seconds that the limit alone makes of a load of ``num_bytes``."""
        return 0.0 if self.bandwidth_gbs is None else num_bytes / (self.bandwidth_gbs * 1e9)

    def open(self, device: Device, folder: Path) -> Tier:
        """An empty tier; ``folder`` is for its files."""
        if self.name == SsdTier.name:
            return SsdTier(device, folder, self.bandwidth_gbs)
        return DramTier(device, self.bandwidth_gbs)


@dataclass(frozen=True)
class Configuration:
    """``history_tokens`` that are stored, as ``turns`` segments, and ``new_tokens`` after them.

    ``dtype`` of weights and KV. ``is_one_layer``: see ``Decoder``. ``threads`` compute; one more loads.
    ``max_load_s``: settings in which the tier's limit alone makes a full load longer are left out.

    Raises:
        RestoreBenchmarkError: an unknown shape, or lengths that are not whole pages.
    """

    shapes: tuple[str, ...] = ("small-mha", "small-gqa")
    tiers: tuple[TierSpec, ...] = (TierSpec("dram"),)
    history_tokens: tuple[int, ...] = (512, 1024, 2048)
    new_tokens: int = 64
    turns: int = 4
    page_size: int = 64
    repeats: int = 5
    max_load_s: float = 2.5
    device: str = "cpu"
    dtype: str = "bfloat16"
    is_one_layer: bool = False
    threads: int = 1
    ssd_folder: Path | None = None

    def __post_init__(self) -> None:
        unknown = [shape for shape in self.shapes if shape not in SHAPES]
        if unknown:
            raise RestoreBenchmarkError(f"shapes {unknown} are unknown (accepted: {', '.join(SHAPES)})")
        for tokens in self.history_tokens:
            if tokens < self.page_size or tokens % self.page_size:
                raise RestoreBenchmarkError(
                    f"history of {tokens} tokens is not whole pages of {self.page_size}"
                )
        for name in ("new_tokens", "turns", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise RestoreBenchmarkError(f"{name} {getattr(self, name)} is not a positive number")

    def to_json(self) -> dict[str, Any]:
        folder = None if self.ssd_folder is None else self.ssd_folder.name
        return {**asdict(self), "ssd_folder": folder}
