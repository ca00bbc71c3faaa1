"""Decides which tokens are not stored because a restore would recompute them (Krul, section 6.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.strategy.strategy import Strategy


class SpaceAllocation(ABC):
    """Decides which tokens of a conversation are not worth their space. Called on the offload thread."""

    @abstractmethod
    def head_ends(
        self,
        num_tokens: int,
        layer_token_bytes: tuple[float, ...],
        last_use: tuple[int, ...],
        strategy: Strategy,
    ) -> tuple[int, ...] | None:
        """For each layer the token before which nothing needs to be kept; None to keep everything.

        ``num_tokens``: of the whole conversation. ``strategy`` is what its last turn is stored with;
        ``layer_token_bytes[l]`` are the bytes that a token takes in layer ``l``'s block then, and
        ``last_use[l]`` the last layer that needs that block. Heads never grow from layer to layer: a token's
        hidden state in a layer needs the layer before it. Tensor-parallel ranks ask with equal arguments and
        must get equal answers, or what they can restore differs. Each of them asks once for every turn, also
        one that has no room for it, so that they may decide together.
        """


def trim_path(
    store: KVStore,
    model: ModelIdentity,
    codec: SegmentCodec,
    page_keys: Sequence[str],
    head_ends: Sequence[int],
) -> None:
    """Drop what is stored of a conversation before its heads' ends, from the segments that it alone uses.

    Raises:
        CodecError: a segment whose parameters ``codec`` cannot read, or heads of another number of layers.
    """
    for segment in store.path_segments(model, page_keys):
        header = segment.header
        if all(
            first_token >= min(head_end, header.end_token)
            for first_token, head_end in zip(header.layer_first_token, head_ends, strict=True)
        ):
            continue
        decoder = codec.open(
            header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
        )
        # Heads may have become shorter since the last turn: what is gone stays gone.
        kept_from = tuple(map(max, decoder.kept_from(head_ends), header.layer_first_token))
        if kept_from != header.layer_first_token:
            store.trim(segment.segment_id, kept_from, decoder.kept_num_bytes(kept_from))
