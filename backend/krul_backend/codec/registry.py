"""Finds a codec by its name: the table of all codecs, and those of one model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from krul_backend.codec.interface import Codec, ModelKV, SegmentDecoder
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.native import NativeCodec
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.pairs.codec import PairCodec
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.held_bases import HeldBases
from krul_backend.codec.units import UnitsCodec
from krul_backend.errors import CodecError
from krul_backend.strategy import Strategy

CODECS: dict[str, Callable[[ModelKV, CodecOptions | None], Codec[Any]]] = {
    NativeCodec.name: NativeCodec,
    PairCodec.name: PairCodec,
}
"""Makes each codec for a model, by its name, but the one in bases. A new codec needs a line here."""

_MAX_OPENED = 256
"""Decoders that are kept: of the conversations that return now."""


class ModelCodecs:
    """The codecs of one model on one rank.

    ``rotary`` is the model's table. None if its rotation cannot be taken off (unknown or not invertible).
    ``subspace`` opens segments whose groups of layers share a subspace, if they are stored in its bases; so
    do those that ``add_bases`` is given. ``may_come(digest)`` says of others whether they may come. All of
    them take at most ``max_bases_bytes`` of the device. ``bases`` is the codec of all these.
    """

    def __init__(
        self,
        shape: LayerShape,
        num_layers: int,
        rotary: RotaryTable | None,
        options: CodecOptions | None = None,
        subspace: SubspaceCodec | None = None,
        may_come: Callable[[str], bool] = lambda digest: False,
        max_bases_bytes: int | None = None,
    ) -> None:
        self.num_layers = num_layers
        model = ModelKV(shape, num_layers, rotary)
        self.bases = HeldBases(model, may_come, max_bases_bytes)
        self._codecs: dict[str, Codec[Any]] = {name: make(model, options) for name, make in CODECS.items()}
        self._codecs[HeldBases.name] = self.bases
        # The least recently used first.
        self._opened: dict[tuple[int, int, bytes], SegmentDecoder] = {}
        self._opened_lock = threading.Lock()
        if subspace is not None:
            self.add_bases(subspace)

    def __getitem__(self, name: str) -> Codec[Any]:
        """The codec of this name. Raises CodecError for an unknown one."""
        if name not in self._codecs:
            raise CodecError(f"codec {name!r:.80} is unknown (known: {', '.join(self._codecs)})")
        return self._codecs[name]

    def add_bases(self, subspace: SubspaceCodec, *, is_older: bool = False) -> None:
        """Open segments that are stored in its bases, too, from here on. Turns are stored in those that come
        last and are not ``is_older``: these stay, and of all others the last ``MOST_BASES - 1``. Any thread
        may call it.
        """
        if self.bases.add(subspace, is_older=is_older):
            self._forget_opened()

    def make_room_for_bases(self, num_bytes: int) -> None:
        """Give up older bases for others that come, which take ``num_bytes`` of the device. Any thread may
        call it.

        Raises:
            NoRoomError: they have none beside the newest ones.
        """
        if self.bases.make_room(num_bytes):
            self._forget_opened()

    def _forget_opened(self) -> None:
        # Among them are decoders of bases that were given up.
        with self._opened_lock:
            self._opened.clear()

    @property
    def native(self) -> UnitsCodec:
        """The codec of segments that are stored as they are."""
        return self.of(Strategy.from_pairs(self.num_layers))

    def of(self, strategy: Strategy) -> UnitsCodec:
        """The codec that stores layers as a strategy says."""
        codec = self[NativeCodec.name if strategy.is_lossless else PairCodec.name]
        assert isinstance(codec, UnitsCodec)
        return codec

    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> SegmentDecoder:
        """A decoder for blocks that were encoded with these parameters at this place.

        Equal arguments get the same decoder again, as long as it is among those asked for last.

        Raises:
            AwaitedBasesError: it is stored in bases that may come.
            CodecError: anything but parameters that one of the codecs writes for this model and place.
        """
        try:
            key = start_token, num_tokens, orjson.dumps(params)
        except TypeError:
            return self._open(params, start_token, num_tokens)
        with self._opened_lock:
            decoder = self._opened.pop(key, None)
            if decoder is None:
                decoder = self._open(params, start_token, num_tokens)
            self._opened[key] = decoder
            if len(self._opened) > _MAX_OPENED:
                del self._opened[next(iter(self._opened))]
        return decoder

    def _open(self, params: Mapping[str, Any], start_token: int, num_tokens: int) -> SegmentDecoder:
        name = params.get("codec") if isinstance(params, Mapping) else None
        if not isinstance(name, str):
            raise CodecError(f"parameters without the name of a codec: {params!r:.80}")
        return self[name].open(params, start_token=start_token, num_tokens=num_tokens)
