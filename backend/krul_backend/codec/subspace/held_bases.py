"""The codec ``subspace``: groups of layers in any of the bases that a server holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.codec.interface import Codec, EncodedRun, ModelKV, TokenRun
from krul_backend.codec.subspace.codec import EncodedSegment, SubspaceCodec
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.subspace.sample import SegmentSample
from krul_backend.errors import CodecError, KrulError
from krul_backend.memory import format_bytes
from krul_backend.strategy import SUBSPACE

MOST_BASES = 4
"""Bases in which segments are opened: those that turns are stored in, and three older ones."""


class AwaitedBasesError(CodecError):
    """A segment is stored in bases that are not here, but may come: it cannot be decoded yet."""


class NoRoomError(KrulError):
    """There is no room on the device for more bases."""


@dataclass(frozen=True, eq=False)
class RunLimit:
    """The limit of one run of tokens. Storing it may add ``max_damage``, of which ``sample.outside`` is lost
    whatever the step; ``carried`` was lost before. All in nats at the run's own end, see ``DamagedSpan``.

    ``sample`` is what was read of the run for that, with which encoding it begins. ``attention``:
    ``[L, Hkv, tokens of the run]``, see ``GroupBasis.token_worth``.
    """

    max_damage: float
    sample: SegmentSample
    carried: float
    attention: torch.Tensor


@dataclass(frozen=True, eq=False)
class SubspaceRun(EncodedRun):
    """A run of tokens as it is stored in bases. ``segment``: all of it, with what that costs."""

    segment: EncodedSegment


class HeldBases(Codec[RunLimit]):
    """Opens segments in the bases that it was given, and encodes in those of a sample.

    ``may_come`` is asked for bases that are not here, by their digest: whether they may come. ``max_bytes``:
    what all of them may take on the device; None without a limit.
    """

    name = SUBSPACE

    def __init__(self, model: ModelKV, may_come: Callable[[str], bool], max_bytes: int | None = None) -> None:
        super().__init__(model)
        self._max_bytes = max_bytes
        # By the digest of their bases; the newest ones are the last.
        self._held: dict[str, SubspaceCodec] = {}
        self._lock = threading.Lock()
        self._may_come = may_come

    @property
    def num_held(self) -> int:
        """In how many different bases segments can be opened."""
        return len(self._held)

    def add(self, subspace: SubspaceCodec, *, is_older: bool) -> bool:
        """See ``ModelCodecs.add_bases``. Returns whether others were given up for it."""
        digest = subspace.bases.digest
        with self._lock:
            others = [(known, each) for known, each in self._held.items() if known != digest]
            place = len(others) - 1 if is_older and others else len(others)
            others.insert(place, (digest, subspace))
            self._held = dict(others[-MOST_BASES:])
        return len(others) > MOST_BASES

    def make_room(self, num_bytes: int) -> bool:
        """Give up the oldest bases until those that come, which take ``num_bytes``, will have room beside the
        newest ones. Returns whether any were given up.

        Raises:
            NoRoomError: not even beside the newest ones alone.
        """
        if self._max_bytes is None:
            return False
        with self._lock:
            held = list(self._held.items())
            while len(held) > 1 and _working_bytes(held) + num_bytes > self._max_bytes:
                held.pop(0)
            gives_up = len(held) < len(self._held)
            self._held = dict(held)
        if _working_bytes(held) + num_bytes > self._max_bytes:
            raise NoRoomError(
                f"bases of {format_bytes(num_bytes)} have no room in {format_bytes(self._max_bytes)} beside "
                "those that are used now; the next start takes the newest"
            )
        return gives_up

    def encode(self, run: TokenRun, how: RunLimit, pause: Callable[[], None] = lambda: None) -> SubspaceRun:
        subspace = self._subspace(how.sample.bases.digest)
        encoded = subspace.encode(
            run.read,
            start_token=run.start_token,
            num_tokens=run.num_tokens,
            attention=how.attention,
            max_damage=how.max_damage,
            carried_damage=how.carried,
            before_group=pause,
            sample=how.sample,
        )
        layout = subspace.open(encoded.params, start_token=run.start_token, num_tokens=run.num_tokens)
        first = layout.kept_from(run.head_ends or (run.start_token,) * self.model.num_layers)
        kept = layout.kept_num_bytes(first)
        blocks = [
            (group.start, block[block.numel() - kept[group.start] :])
            for group, block in zip(layout.stored_as.groups, encoded.blocks, strict=True)
            if kept[group.start]
        ]
        left_out = encoded.num_bytes - sum(kept)
        return SubspaceRun(self.name, encoded.params, first, kept, left_out, blocks, encoded)

    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> SubspaceDecoder:
        """See ``Codec.open``.

        Raises:
            AwaitedBasesError: it is stored in bases that may come.
            CodecError: anything but parameters that this codec writes for this model and place.
        """
        return self._subspace(params.get("bases")).open(
            params, start_token=start_token, num_tokens=num_tokens
        )

    def _subspace(self, digest: object) -> SubspaceCodec:
        subspace = self._held.get(digest) if isinstance(digest, str) else None
        if subspace is None:
            if isinstance(digest, str) and self._may_come(digest):
                raise AwaitedBasesError(f"stored in bases {digest:.16}, which are looked for")
            raise CodecError(f"stored in bases {digest!r:.80}, which are not here")
        return subspace


def _working_bytes(held: Sequence[tuple[str, SubspaceCodec]]) -> int:
    return sum(subspace.bases.working_bytes for _, subspace in held)
