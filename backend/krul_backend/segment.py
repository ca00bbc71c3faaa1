"""The description of a stored segment: its model, its tokens, how it is encoded, its sizes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from krul_backend.errors import ManifestError

TokenIds = npt.NDArray[np.int64]

FORMAT_VERSION = 8
"""Version of the manifest, every codec's block layout and the SSD's files; part of models' fingerprints."""

MAX_CODEC_PARAMS_BYTES = 256 << 10
"""Of a segment's codec parameters as JSON. Every lookup that finds the segment carries them."""

MIN_RANGE_BYTES = 16 << 10
"""The smallest ranges of blocks that have a checksum each."""
_MAX_RANGES = 64
"""Of the largest block of a segment: its ranges are so long that it has no more."""


def range_bytes_for(layer_num_bytes: Sequence[int]) -> int:
    """Choose the bytes of the ranges of a segment's blocks, each of which has a checksum: a power of two."""
    least = max(MIN_RANGE_BYTES, -(-max(layer_num_bytes, default=0) // _MAX_RANGES))
    return 1 << (least - 1).bit_length()


def num_ranges(num_bytes: int, range_bytes: int) -> int:
    """Count the ranges of a block, or of the end of one."""
    return -(-num_bytes // range_bytes)


def tail_num_bytes(block_num_bytes: int, wanted_num_bytes: int, range_bytes: int) -> int:
    """The size of the end of a block that has its last ``wanted_num_bytes`` in whole ranges. Ranges are
    counted from the block's end, so that only the first one may be shorter."""
    return min(block_num_bytes, num_ranges(wanted_num_bytes, range_bytes) * range_bytes)


@dataclass(frozen=True)
class ModelIdentity:
    """Identifies the model runner that can use stored KV: every field must be equal.

    ``config_digest`` covers the architecture, RoPE settings and the weights' identity as far as they can be
    known; ``dtype`` is the KV pool's element type (``"bfloat16"``), of fp8 KV with a digest of its scales;
    ``num_kv_heads`` and the head sizes are those of one tensor-parallel rank; ``page_size`` is in tokens.
    ``target``: of a draft model the fingerprint of its target, whose pages have the same keys.
    """

    name: str
    config_digest: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    page_size: int
    tp_rank: int
    tp_size: int
    target: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest over all fields and the format version: the namespace of every key of this model."""
        fields = {key: value for key, value in vars(self).items() if key != "fingerprint"}
        payload = orjson.dumps({"format": FORMAT_VERSION, **fields}, option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(payload).hexdigest()[:32]


@dataclass(frozen=True, eq=False)
class SegmentHeader:
    """A manifest without pages and tokens: the part that a reader of a stored segment needs.

    The fields are those of ``SegmentManifest``. ``page_size`` is in tokens.
    """

    page_size: int
    start_token: int
    num_tokens: int
    codec: str
    codec_params: dict[str, Any]
    layer_num_bytes: tuple[int, ...]
    layer_first_token: tuple[int, ...]
    range_bytes: int = MIN_RANGE_BYTES

    @property
    def end_token(self) -> int:
        """Position in the conversation right after the last token."""
        return self.start_token + self.num_tokens


@dataclass(frozen=True, eq=False)
class SegmentManifest:
    """Describes one segment: the pages that one turn added to a conversation, and what is stored of them.

    ``page_keys[i]`` is the chained hash of page ``i`` (it covers every token before it and the tenant's
    namespace). ``parent_key`` is the key of the page right before the segment, None at the start of a
    conversation. ``start_token`` is the absolute position of the first token. ``token_ids`` are the
    ``len(page_keys) * page_size`` tokens themselves: a hit is confirmed by them, not by a hash alone.

    A block may lack its first tokens::

        [start_token, layer_first_token[l])  not stored in layer l
        [layer_first_token[l], end_token)    in layer l's block

    ``layer_first_token[l]`` (a position in the conversation) is where a group of the codec starts, or the
    segment's end: then the block is empty. Even a segment of empty blocks keeps its pages in the chain of the
    conversation. Given as ``()``, every layer holds every token. ``layer_num_bytes[l]`` is the exact size of
    layer ``l``'s block as it is stored: the end of the block as it was encoded, which may begin with some
    bytes of earlier tokens. Trimming a segment gives it another manifest; pages and tokens stay.

    Blocks are checked, cut and read in ranges of ``range_bytes``, counted from their ends, so that these
    stay the same whatever is cut off before them. Given as 0, it is ``range_bytes_for`` the blocks.

    ``tenant`` names whom the segment's bytes count for (the page keys already keep tenants apart).
    ``recompute_s``: seconds that computing the segment takes on the engine that stored it, 0 if not known.

    Raises:
        ManifestError: if the counts contradict each other.
    """

    model: ModelIdentity
    page_keys: tuple[str, ...]
    parent_key: str | None
    start_token: int
    token_ids: TokenIds
    codec: str
    layer_num_bytes: tuple[int, ...]
    codec_params: dict[str, Any] = field(default_factory=dict)
    layer_first_token: tuple[int, ...] = ()
    tenant: str = ""
    recompute_s: float = 0.0
    range_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.range_bytes:
            object.__setattr__(self, "range_bytes", range_bytes_for(self.layer_num_bytes))
        if self.range_bytes < 1:
            raise ManifestError(f"blocks have no ranges of {self.range_bytes} bytes")
        if not self.layer_first_token:
            object.__setattr__(self, "layer_first_token", (self.start_token,) * self.model.num_layers)
        page_size = self.model.page_size
        if not self.page_keys:
            raise ManifestError("a segment needs at least one page")
        if len(set(self.page_keys)) != len(self.page_keys):
            raise ManifestError("a segment names the same page twice")
        if len(self.token_ids) != len(self.page_keys) * page_size:
            raise ManifestError(
                f"{len(self.page_keys)} pages of {page_size} tokens need "
                f"{len(self.page_keys) * page_size} token ids, got {len(self.token_ids)}"
            )
        if self.start_token < 0 or self.start_token % page_size:
            raise ManifestError(f"start_token {self.start_token} is not a multiple of page size {page_size}")
        if (self.parent_key is None) != (self.start_token == 0):
            raise ManifestError(
                f"a segment at token {self.start_token} cannot have parent_key={self.parent_key!r}: "
                "exactly the first segment of a conversation has none"
            )
        if len(self.layer_num_bytes) != self.model.num_layers:
            raise ManifestError(
                f"{len(self.layer_num_bytes)} layer blocks for a model of {self.model.num_layers} layers"
            )
        if len(self.layer_first_token) != self.model.num_layers:
            raise ManifestError(
                f"{len(self.layer_first_token)} first tokens for a model of {self.model.num_layers} layers"
            )
        if not 0.0 <= self.recompute_s < math.inf:
            raise ManifestError(f"computing a segment cannot take {self.recompute_s} s")
        start, end = self.start_token, self.end_token
        for layer, (first, size) in enumerate(zip(self.layer_first_token, self.layer_num_bytes, strict=True)):
            if not start <= first <= end:
                raise ManifestError(
                    f"layer {layer} cannot hold tokens from {first} on in a segment of tokens {start} "
                    f"to {end}"
                )
            if size < 0 or (size == 0) != (first == end):
                raise ManifestError(
                    f"layer {layer} holds {end - first} tokens in {size} bytes: "
                    "exactly the blocks of no tokens are empty"
                )

    @cached_property
    def header(self) -> SegmentHeader:
        """The part of the manifest that a reader needs."""
        return SegmentHeader(
            page_size=self.model.page_size,
            start_token=self.start_token,
            num_tokens=self.num_tokens,
            codec=self.codec,
            codec_params=self.codec_params,
            layer_num_bytes=self.layer_num_bytes,
            layer_first_token=self.layer_first_token,
            range_bytes=self.range_bytes,
        )

    def trimmed(self, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> SegmentManifest:
        """The manifest of this segment without the beginnings of its blocks: itself if nothing can go.

        Of layer ``l`` the tokens from ``layer_first_token[l]`` on are needed, which its block's last
        ``layer_num_bytes[l]`` bytes hold; it keeps these in whole ranges. Layers that start there or later
        already stay as they are.

        Raises:
            ManifestError: other numbers of layers, tokens beyond the segment, or sizes that no such blocks
                have.
        """
        num_layers = self.model.num_layers
        if len(layer_first_token) != num_layers or len(layer_num_bytes) != num_layers:
            raise ManifestError(
                f"{len(layer_first_token)} first tokens and {len(layer_num_bytes)} sizes "
                f"for a segment of {num_layers} layers"
            )
        first_tokens, sizes = list(self.layer_first_token), list(self.layer_num_bytes)
        for layer, (first, size) in enumerate(zip(layer_first_token, layer_num_bytes, strict=True)):
            if first <= first_tokens[layer]:
                continue
            if size >= sizes[layer]:
                raise ManifestError(
                    f"layer {layer} cannot hold the tokens from {first} on in {size} bytes: "
                    f"those from {first_tokens[layer]} on take {sizes[layer]}"
                )
            kept = tail_num_bytes(sizes[layer], size, self.range_bytes)
            if kept < sizes[layer]:
                first_tokens[layer], sizes[layer] = first, kept
        if tuple(sizes) == self.layer_num_bytes:
            return self
        return replace(self, layer_first_token=tuple(first_tokens), layer_num_bytes=tuple(sizes))

    def shares_encoded_pages(self, other: SegmentManifest) -> bool:
        """Whether both hold a common page with the same encoding: a reader can decode both or neither."""
        return (
            (self.codec, self.codec_params) == (other.codec, other.codec_params)
            and self.model.fingerprint == other.model.fingerprint
            and not set(self.page_keys).isdisjoint(other.page_keys)
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end_token(self) -> int:
        """Position in the conversation right after the last token."""
        return self.start_token + self.num_tokens

    @property
    def num_bytes(self) -> int:
        """Bytes of all layer blocks."""
        return sum(self.layer_num_bytes)


def check_codec_params_num_bytes(num_bytes: int) -> None:
    """Raises ManifestError if codec parameters take more bytes as JSON than a store keeps."""
    if num_bytes > MAX_CODEC_PARAMS_BYTES:
        raise ManifestError(
            f"codec parameters of {num_bytes} bytes as JSON: a segment may have {MAX_CODEC_PARAMS_BYTES}"
        )


def checked_token_ids(token_ids: TokenIds, num_pages: int, page_size: int) -> TokenIds:
    """The tokens of ``num_pages`` pages as an array.

    Raises:
        ValueError: they have another shape than ``[num_pages * page_size]``.
    """
    token_ids = np.asarray(token_ids)
    if token_ids.shape != (num_pages * page_size,):
        raise ValueError(
            f"{num_pages} pages of {page_size} tokens need token ids of shape ({num_pages * page_size},), "
            f"got {token_ids.shape}"
        )
    return token_ids
