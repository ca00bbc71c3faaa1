"""Says how a finished turn is stored, and encodes the runs of its pages that way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from krul_backend.codec.interface import EncodedRun, TokenRun
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitPlan
from krul_backend.strategy import StoredAs, Strategy


class TurnEncoding(ABC):
    """How one turn is stored: chosen by a ``Decision`` on the thread that stores turns. If there is an
    ``exact`` one, ``encode`` is called later, on the thread that encodes.

    ``stored_as``: what becomes of the layers. ``layer_token_bytes``: the bytes that a token is expected to
    take in each layer's block. ``last_use[l]``: the last layer that needs the block of layer ``l``.
    ``exact``: how the turn is stored at first, as it is, to be encoded later; None if ``encode`` is no more
    than a copy. ``is_copy``: this is such an encoding.
    """

    stored_as: StoredAs
    layer_token_bytes: tuple[float, ...]
    last_use: tuple[int, ...]
    exact: TurnEncoding | None = None
    is_copy: bool = False

    @abstractmethod
    def encode(self, index: int, run: TokenRun, pause: Callable[[], None]) -> EncodedRun:
        """Encode run number ``index`` of the turn's missing runs, or the beginning of it.

        ``pause`` is called between pieces of the work, which it may hold up.

        Raises:
            CodecError: see the codecs.
        """


class LayerEncoding(TurnEncoding):
    """Stores layers alone or in pairs, as a strategy says. ``damages``: of each run, see
    ``UnitPlan``."""

    def __init__(
        self,
        codec: ModelCodecs,
        strategy: Strategy,
        damages: Sequence[float | None],
        *,
        is_copy: bool = False,
    ) -> None:
        self.stored_as = strategy
        self.is_copy = is_copy
        native = Strategy.from_pairs(codec.num_layers)
        if strategy != native:
            self.exact = LayerEncoding(codec, native, damages, is_copy=True)
        self.damages = tuple(damages)
        self._codec = codec.of(strategy)
        self._strategy = strategy
        self.layer_token_bytes = self._codec.layer_token_bytes(strategy)
        self.last_use = self._codec.last_use(strategy)

    def encode(self, index: int, run: TokenRun, pause: Callable[[], None]) -> EncodedRun:
        return self._codec.encode(run, UnitPlan(self._strategy, self.damages[index]), pause)
