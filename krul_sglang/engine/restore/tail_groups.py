"""Groups the tails of one layer, of all segments of a batch, into what is copied and decoded at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from krul_backend.codec.interface import Restorer, TailGroup
from krul_backend.device import Device
from krul_sglang.engine.restore.segment_reader import SegmentReader


class TailGroups:
    """Has the groups of each layer made by the restorers of the codecs that stored the segments."""

    def __init__(self, readers: Sequence[SegmentReader], device: Device) -> None:
        alike: dict[type[Restorer[Any]], list[SegmentReader]] = {}
        for reader in readers:
            alike.setdefault(reader.decoder.restorer, []).append(reader)
        self._restorers = [(restorer(device), of_restorer) for restorer, of_restorer in alike.items()]

    def of_layer(self, layer: int) -> list[TailGroup]:
        """The groups of a layer; none if no segment has a tail in it."""
        return [group for restorer, readers in self._restorers for group in restorer.groups(layer, readers)]

    @property
    def has_decoded(self) -> bool:
        """Whether anything was decoded, so that ``check`` may find something."""
        return any(restorer.has_decoded for restorer, _ in self._restorers)

    def check(self) -> None:
        """See ``Restorer.check``."""
        for restorer, _ in self._restorers:
            restorer.check()

    def close(self) -> None:
        """See ``Restorer.close``."""
        for restorer, _ in self._restorers:
            restorer.close()
