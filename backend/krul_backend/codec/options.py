"""The options of encoding blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from krul_backend.errors import CodecError


@dataclass(frozen=True)
class CodecOptions:
    """Options for encoding blocks. What decoding needs of these options is stored with each segment.

    ``group_size``: tokens that have one scale per key channel, and the unit of partial reads. The other
    options are for pairs that share directions.
    ``slerp_t``: how far the shared direction lies from the lower layer's to the upper layer's.
    ``retained_amount``: a token keeps its own vectors where their angle is above ``d_max - (d_max - d_min) *
    amount`` of the head's largest and smallest one, as MiniCache's text says (section 4.3; its inequality,
    read literally, keeps the most similar tokens); 0 retains no token for its angle.
    ``num_first_tokens``: tokens at the start of the conversation that are always retained.

    Raises:
        CodecError: an amount or t outside [0, 1], no tokens in a group, or a negative number of tokens.
    """

    group_size: int = 64
    slerp_t: float = 0.6
    retained_amount: float = 0.05
    num_first_tokens: int = 1

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise CodecError(f"group_size {self.group_size} is no number of tokens (at least 1)")
        if self.num_first_tokens < 0:
            raise CodecError(f"num_first_tokens {self.num_first_tokens} is negative")
        for name, value in (("slerp_t", self.slerp_t), ("retained_amount", self.retained_amount)):
            if not (math.isfinite(value) and 0 <= value <= 1):
                raise CodecError(f"{name} {value} is not in [0, 1]")
