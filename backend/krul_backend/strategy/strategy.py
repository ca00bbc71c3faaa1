"""Describes how layers are stored: alone or in pairs, at some precision, or in groups of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from krul_backend.errors import StrategyError
from krul_backend.planner import NO_DECODING, DecodeCost


class Precision(Enum):
    """How precisely the elements of stored vectors are kept.

    ``NATIVE`` is the pool's own element type (bf16 as a rule): nothing is lost.
    """

    NATIVE = "native"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"

    @property
    def bits(self) -> int | None:
        """Bits of one code; None for the pool's own element type."""
        return None if self is Precision.NATIVE else int(self.value.removeprefix("int"))


Pair = tuple[int, int]
"""Two layers ``(i, j)``, ``i < j``, that keep one direction per token and head."""


@dataclass(frozen=True)
class LayerStrategy:
    """How one layer is stored. ``partner`` is the layer that it shares with, None if it is stored alone."""

    precision: Precision = Precision.NATIVE
    partner: int | None = None


class LayerCosts(Protocol):
    """Costs of decoding a layer, not counting the copy of its bytes."""

    def of(self, *, is_serial: bool) -> LayerCosts:
        """Those of a restore whose forward waits for all of it, or of one that loads beside a forward."""

    def layer(self, precision: Precision) -> DecodeCost:
        """Of a layer on its own."""

    def paired_layer(self, precision: Precision) -> DecodeCost:
        """Of a layer in a pair."""

    def grouped_layer(self) -> DecodeCost:
        """Of a layer in a group that shares a subspace."""


class StoredAs(ABC):
    """Describes how all layers of a segment are stored.

    ``lossy_layers``: for each layer whether it comes back changed. ``pairs``: the pairs that share, and
    ``precisions`` of layers that are stored alone or in pairs.
    """

    @property
    @abstractmethod
    def lossy_layers(self) -> tuple[bool, ...]: ...

    @property
    def is_lossless(self) -> bool:
        return not any(self.lossy_layers)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return ()

    @property
    def precisions(self) -> tuple[Precision, ...]:
        return ()

    @abstractmethod
    def decode_costs(self, costs: LayerCosts) -> tuple[DecodeCost, ...]:
        """The cost of decoding each layer, ``[L]``."""


@dataclass(frozen=True)
class Strategy(StoredAs):
    """How all layers are stored, one entry per layer. Partners name each other and have the same precision.

    Raises:
        StrategyError: no layer at all, a partner out of range, a layer paired with itself, overlapping pairs,
            or partners of different precision.
    """

    layers: tuple[LayerStrategy, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise StrategyError("a strategy needs at least one layer")
        for i, layer in enumerate(self.layers):
            j = layer.partner
            if j is None:
                continue
            if not 0 <= j < len(self.layers):
                raise StrategyError(f"layer {i} is paired with layer {j} of {len(self.layers)} layers")
            if i == j:
                raise StrategyError(f"layer {i} is paired with itself")
            other = self.layers[j]
            if other.partner != i:
                raise StrategyError(f"layer {i} is paired with layer {j}, and that one with {other.partner}")
            if other.precision is not layer.precision:
                raise StrategyError(
                    f"layers {i} and {j} share directions at {layer.precision.value} and "
                    f"{other.precision.value}: a pair has one precision"
                )

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The shared pairs ``(i, j)`` with ``i < j``, by ``i``."""
        return tuple(
            (i, layer.partner)
            for i, layer in enumerate(self.layers)
            if layer.partner is not None and i < layer.partner
        )

    @property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """The groups of layers that are encoded together: ``(i, j)`` or ``(i,)``, by first layer."""
        return tuple(
            (i,) if layer.partner is None else (i, layer.partner)
            for i, layer in enumerate(self.layers)
            if layer.partner is None or i < layer.partner
        )

    @property
    def precisions(self) -> tuple[Precision, ...]:
        return tuple(layer.precision for layer in self.layers)

    @property
    def lossy_layers(self) -> tuple[bool, ...]:
        return tuple(layer != LayerStrategy() for layer in self.layers)

    def decode_costs(self, costs: LayerCosts) -> tuple[DecodeCost, ...]:
        return tuple(
            costs.layer(layer.precision) if layer.partner is None else costs.paired_layer(layer.precision)
            for layer in self.layers
        )

    @classmethod
    def from_pairs(
        cls,
        num_layers: int,
        pairs: Iterable[Pair] = (),
        precision: Precision | Sequence[Precision] = Precision.NATIVE,
    ) -> Strategy:
        """A strategy with these pairs. ``precision`` is one for all layers, or one per layer.

        Raises:
            StrategyError: see the class; also for pairs that overlap or name a layer out of range.
        """
        precisions = [precision] * num_layers if isinstance(precision, Precision) else list(precision)
        if len(precisions) != num_layers:
            raise StrategyError(f"{len(precisions)} precisions for {num_layers} layers")
        partners: dict[int, int] = {}
        for i, j in pairs:
            for layer, partner in ((i, j), (j, i)):
                if not 0 <= layer < num_layers:
                    raise StrategyError(f"pair ({i}, {j}) names a layer out of range 0..{num_layers - 1}")
                if layer in partners:
                    raise StrategyError(f"pair ({i}, {j}): layer {layer} is in two pairs")
                partners[layer] = partner
        return cls(tuple(LayerStrategy(precisions[i], partners.get(i)) for i in range(num_layers)))

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values that ``from_json`` accepts."""
        return [{"precision": layer.precision.value, "partner": layer.partner} for layer in self.layers]

    @classmethod
    def from_json(cls, layers: Sequence[Mapping[str, Any]]) -> Strategy:
        """The strategy that ``to_json`` wrote. Raises StrategyError for anything else."""
        parsed = []
        for layer in layers:
            if not isinstance(layer, Mapping) or set(layer) != {"precision", "partner"}:
                raise StrategyError(f"a layer of a strategy has precision and partner, got {layer!r}")
            partner = layer["partner"]
            if partner is not None and (isinstance(partner, bool) or not isinstance(partner, int)):
                raise StrategyError(f"partner {partner!r} is not a layer")
            parsed.append(LayerStrategy(parse_precision(layer["precision"]), partner))
        return cls(tuple(parsed))


SUBSPACE = "subspace"
"""Names the strategy and the codec of groups of layers that share a subspace."""


@dataclass(frozen=True)
class LayerGroups(StoredAs):
    """Groups of consecutive layers that share a subspace.

    ``ends``: for each group its last layer, plus one.
    """

    ends: tuple[int, ...]

    @property
    def groups(self) -> tuple[range, ...]:
        """The layers of each group."""
        return tuple(range(start, end) for start, end in zip((0, *self.ends), self.ends, strict=False))

    @property
    def lossy_layers(self) -> tuple[bool, ...]:
        """All do."""
        return (True,) * self.ends[-1]

    def decode_costs(self, costs: LayerCosts) -> tuple[DecodeCost, ...]:
        """See ``StoredAs``. A group is decoded at once, from the head of its last layer on, which is the
        shortest. So that one is charged for all of them."""
        of_layer = costs.grouped_layer()
        return tuple(
            of_layer.times(len(group)) if layer == group[-1] else NO_DECODING
            for group in self.groups
            for layer in group
        )


def parse_precision(name: object) -> Precision:
    """The precision called ``name``. Raises StrategyError for an unknown name."""
    try:
        return Precision(name)
    except ValueError:
        accepted = ", ".join(precision.value for precision in Precision)
        raise StrategyError(f"precision {name!r} is unknown (accepted: {accepted})") from None
