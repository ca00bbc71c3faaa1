"""The parameters that are stored beside a segment's blocks so that they can be decoded."""

from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.coders import num_records
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.coefficients.scales import NO_OFFSET, pack_offsets, unpack_offsets
from krul_backend.codec.parameters import check_codec
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import SUBSPACE

CODEC_VERSION = 1

SMALLEST_STEP, LARGEST_STEP = 2.0**-24, 2.0**8
"""The smallest and the largest step that a segment can have."""

_KEYS = {"codec", "version", "bases", "coder", "first_tokens", "step", "damage", "groups"}


@dataclass(frozen=True, eq=False)
class GroupParameters:
    """The parameters of one group of layers in a segment.

    ``offsets`` uint8 ``[bands]``: how this segment's scales differ from the model's. ``record_num_bytes``
    uint32 ``[records]``: the size of each record of its block.
    """

    offsets: NDArray[np.uint8]
    record_num_bytes: NDArray[np.uint32]

    def to_json(self) -> dict[str, str]:
        """Plain JSON values that ``parse`` accepts.

        Raises:
            CodecError: a record of 2^18 bytes or more.
        """
        largest = int(self.record_num_bytes.max())
        if largest >= 1 << 18:
            raise CodecError(f"a record of {largest} bytes is too long: {(1 << 18) - 4} are the most")
        # Sizes are multiples of 4.
        sizes = (self.record_num_bytes // 4).astype("<u2").tobytes()
        return {"offsets": _text(pack_offsets(self.offsets).tobytes()), "records": _text(sizes)}

    @classmethod
    def parse(cls, values: object, basis: GroupBasis, num_tokens: int) -> GroupParameters:
        if not isinstance(values, Mapping) or set(values) != {"offsets", "records"}:
            raise CodecError(f"a group has offsets and records, got {values!r:.200}")
        offsets = unpack_offsets(np.frombuffer(_bytes(values["offsets"]), np.uint8), basis.rank)
        sizes = _bytes(values["records"])
        if len(sizes) != 2 * num_records(num_tokens):
            raise CodecError(
                f"{num_tokens} tokens have {num_records(num_tokens)} records, got {len(sizes) // 2}"
            )
        return cls(offsets, np.frombuffer(sizes, "<u2").astype(np.uint32) * 4)


@dataclass(frozen=True, eq=False)
class SubspaceParameters:
    """All parameters of a segment. With them, the bases and the segment's place its blocks can be decoded.

    ``num_first_tokens``: how many tokens at the segment's start are stored as in the pool. ``step``: the
    quantizer's step for a token of average worth. ``damage``: see ``EncodedSegment``.
    """

    bases_digest: str
    coder: str
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
        return {
            "codec": SUBSPACE,
            "version": CODEC_VERSION,
            "bases": self.bases_digest,
            "coder": self.coder,
            "first_tokens": self.num_first_tokens,
            "step": self.step,
            "damage": self.damage,
            "groups": [group.to_json() for group in self.groups],
        }

    @classmethod
    def parse(cls, params: Mapping[str, Any], bases: ModelBases, num_tokens: int) -> SubspaceParameters:
        """Parse ``params`` and check them against the bases and the segment's length.

        Raises:
            CodecError: anything but what ``to_json`` writes for such a segment, or other bases.
        """
        check_codec(params, SUBSPACE, CODEC_VERSION, _KEYS)
        if params["bases"] != bases.digest:
            raise CodecError(f"stored with bases {params['bases']!r:.80}, not with those at hand")
        num_first_tokens = params["first_tokens"]
        if type(num_first_tokens) is not int or not 0 <= num_first_tokens <= min(num_tokens, RECORD_TOKENS):
            raise CodecError(f"{num_first_tokens!r} first tokens in a segment of {num_tokens}")
        step = _number(params["step"], "step", SMALLEST_STEP, LARGEST_STEP)
        damage = _number(params["damage"], "damage", 0, sys.float_info.max)
        groups = params["groups"]
        if not isinstance(groups, list) or len(groups) != len(bases.groups):
            raise CodecError(f"{len(bases.groups)} groups have as many parameters, got {groups!r:.200}")
        parsed = (
            GroupParameters.parse(group, basis, num_tokens)
            for group, basis in zip(groups, bases.groups, strict=True)
        )
        return cls(bases.digest, str(params["coder"]), num_first_tokens, step, damage, tuple(parsed))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: object) -> bytes:
    try:
        if isinstance(text, str):
            return base64.b64decode(text, validate=True)
        raise ValueError("no text")
    except (binascii.Error, ValueError):
        raise CodecError(f"not base64: {text!r:.80}") from None


def _number(value: object, name: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise CodecError(f"{name} {value!r:.80} is not a number from {least:g} to {most:g}")
    return float(value)
