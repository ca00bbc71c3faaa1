"""The parameters that are stored beside a segment's blocks so that they can be decoded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from krul_backend.codec.coefficients.coders import num_records
from krul_backend.codec.coefficients.scales import NO_OFFSET, RECORD_TOKENS, pack_offsets, unpack_offsets
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases
from krul_backend.errors import CodecError

SMALLEST_STEP, LARGEST_STEP = 2.0**-24, 2.0**8
"""The smallest and the largest step that a segment can have."""


class _StoredGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a group as JSON has them. Bytes are base64."""

    offsets: bytes
    records: bytes


class _Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of a segment as JSON has them."""

    codec: Literal["subspace"]
    version: Literal[2]
    bases: str
    first_tokens: Annotated[int, Meta(ge=0, le=RECORD_TOKENS)]
    step: Annotated[float, Meta(ge=SMALLEST_STEP, le=LARGEST_STEP)]
    damage: Annotated[float, Meta(ge=0, le=sys.float_info.max)]
    groups: tuple[_StoredGroup, ...]


@dataclass(frozen=True, eq=False)
class GroupParameters:
    """The parameters of one group of layers in a segment.

    ``offsets`` uint8 ``[bands]``: how this segment's scales differ from the model's. ``record_num_bytes``
    uint32 ``[records]``: the size of each record of its block.
    """

    offsets: NDArray[np.uint8]
    record_num_bytes: NDArray[np.uint32]

    def stored(self) -> _StoredGroup:
        """Return the group as it stands in a segment's parameters; ``parse`` reads it back.

        Raises:
            CodecError: a record of 2^18 bytes or more.
        """
        largest = int(self.record_num_bytes.max())
        if largest >= 1 << 18:
            raise CodecError(f"a record of {largest} bytes is too long: {(1 << 18) - 4} are the most")
        # Sizes are multiples of 4.
        sizes = (self.record_num_bytes // 4).astype("<u2").tobytes()
        return _StoredGroup(pack_offsets(self.offsets).tobytes(), sizes)

    @classmethod
    def parse(cls, stored: _StoredGroup, basis: GroupBasis, num_tokens: int) -> GroupParameters:
        offsets = unpack_offsets(np.frombuffer(stored.offsets, np.uint8), basis.rank)
        if len(stored.records) != 2 * num_records(num_tokens):
            raise CodecError(
                f"{num_tokens} tokens have {num_records(num_tokens)} records, got {len(stored.records) // 2}"
            )
        return cls(offsets, np.frombuffer(stored.records, "<u2").astype(np.uint32) * 4)


@dataclass(frozen=True, eq=False)
class SubspaceParameters:
    """All parameters of a segment. With them, the bases and the segment's place its blocks can be decoded.

    ``num_first_tokens``: how many tokens at the segment's start are stored as in the pool. ``step``: the
    quantizer's step for a token of average worth. ``damage``: see ``EncodedSegment``.
    """

    bases_digest: str
    num_first_tokens: int
    step: float
    damage: float
    groups: tuple[GroupParameters, ...]

    @property
    def mean_offset(self) -> float:
        """How much larger coefficients are than in the text that the bases were learned from, in quarter
        octaves: the mean over all bands whose levels are not all zero; 0 if there is none."""
        offsets = np.concatenate([group.offsets for group in self.groups])
        offsets = offsets[offsets > 0]
        return float(offsets.mean()) - NO_OFFSET if len(offsets) else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values that ``parse`` accepts."""
        stored = _Stored(
            codec="subspace",
            version=2,
            bases=self.bases_digest,
            first_tokens=self.num_first_tokens,
            step=self.step,
            damage=self.damage,
            groups=tuple(group.stored() for group in self.groups),
        )
        values: dict[str, Any] = msgspec.to_builtins(stored)
        return values

    @classmethod
    def parse(cls, params: Mapping[str, Any], bases: ModelBases, num_tokens: int) -> SubspaceParameters:
        """Parse ``params`` and check them against the bases and the segment's length.

        Raises:
            CodecError: anything but what ``to_json`` writes for such a segment, or other bases.
        """
        try:
            stored = msgspec.convert(params, _Stored)
        except (msgspec.ValidationError, OverflowError) as error:
            raise CodecError(f"not the parameters of a segment in shared subspaces: {error}") from None
        if stored.bases != bases.digest:
            raise CodecError(f"stored with bases {stored.bases:.80}, not with those at hand")
        if stored.first_tokens > num_tokens:
            raise CodecError(f"{stored.first_tokens} first tokens in a segment of {num_tokens}")
        if len(stored.groups) != len(bases.groups):
            raise CodecError(f"{len(bases.groups)} groups have as many parameters, got {len(stored.groups)}")
        parsed = (
            GroupParameters.parse(group, basis, num_tokens)
            for group, basis in zip(stored.groups, bases.groups, strict=True)
        )
        return cls(bases.digest, stored.first_tokens, stored.step, stored.damage, tuple(parsed))
