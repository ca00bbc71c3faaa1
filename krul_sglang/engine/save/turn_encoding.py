"""Says how a finished turn is stored, and encodes the runs of its pages that way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from krul_backend.codec.layout import ReadLayer
from krul_backend.codec.parameters import CODEC_NAME
from krul_backend.codec.segment_codec import SegmentCodec, SegmentEncoding
from krul_backend.strategy.strategy import StoredAs, Strategy


@dataclass(frozen=True)
class TokenRun:
    """Tokens ``[start_token, start_token + num_tokens)`` of a conversation that become one segment.

    ``read`` reads them from the pool. ``head_ends[l]``: tokens of layer ``l`` before that position need not
    be kept; None keeps everything.
    """

    read: ReadLayer
    start_token: int
    num_tokens: int
    head_ends: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class EncodedRun:
    """A run of tokens as it is stored. See ``SegmentManifest`` for the first four.

    ``left_out_num_bytes``: of the parts of blocks that are not kept. ``blocks``: the layer and the bytes
    (uint8, on any device) of every block that is not empty; some are only made when they are asked for.
    """

    codec: str
    params: dict[str, Any]
    layer_first_token: tuple[int, ...]
    layer_num_bytes: tuple[int, ...]
    left_out_num_bytes: int
    blocks: Iterable[tuple[int, torch.Tensor]] = field(repr=False)


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
    ``SegmentParameters``."""

    def __init__(
        self,
        codec: SegmentCodec,
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
        self.layer_token_bytes = codec.layer_token_bytes(strategy)
        self.last_use = codec.last_use(strategy)
        self._codec = codec
        self._strategy = strategy

    def encode(self, index: int, run: TokenRun, pause: Callable[[], None]) -> EncodedRun:
        prepared = self._codec.prepare(
            self._strategy,
            run.read,
            start_token=run.start_token,
            num_tokens=run.num_tokens,
            head_ends=run.head_ends,
            damage=self.damages[index],
        )
        return EncodedRun(
            CODEC_NAME,
            prepared.params,
            prepared.layer_first_token,
            prepared.layer_num_bytes,
            prepared.left_out_num_bytes,
            self._blocks(prepared, run.read, pause),
        )

    def _blocks(
        self, prepared: SegmentEncoding, read: ReadLayer, pause: Callable[[], None]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Unit after unit, so that the device never holds the blocks of several."""
        for unit in prepared.kept_units:
            pause()
            encoded = self._codec.encode_unit(prepared, unit, [read(layer) for layer in unit])
            yield from zip(unit, encoded, strict=True)
