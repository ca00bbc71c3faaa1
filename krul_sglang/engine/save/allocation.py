"""Decides which tokens are not stored because a restore would recompute them (Krul, section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.held_bases import AwaitedBasesError
from krul_backend.planner import OnlineCosts, RestorePlanner, StoredRun, allocate
from krul_backend.segment import ModelIdentity, tail_num_bytes
from krul_backend.store.interface import KVStore
from krul_backend.strategy import LayerCosts
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.save.turn_encoding import TurnEncoding

EXPECTED_NEW_TOKENS = 128
"""Length of the turn that is expected to follow."""


class SpaceAllocation:
    """Plans the return of a whole conversation: what would be recomputed then is not worth its space now.

    It plans as if nothing of it were on the device. Called on the offload thread.

    If the plan would load nothing at all, everything is stored: otherwise a device that is busy today would
    decide that the conversation can never be loaded.

    ``decode_costs``: what decoding costs.
    """

    def __init__(
        self,
        planner: RestorePlanner,
        costs: OnlineCosts,
        decode_costs: LayerCosts,
        agreement: RankAgreement,
        *,
        page_size: int,
        max_head_tokens: int,
    ) -> None:
        self._planner = planner
        self._costs = costs
        self._decode_costs = decode_costs
        self._agreement = agreement
        self._page_size = page_size
        self._max_head_tokens = max_head_tokens

    def head_ends(self, num_tokens: int, encoding: TurnEncoding) -> tuple[int, ...] | None:
        """For each layer the token before which nothing needs to be kept; None to keep everything.

        ``num_tokens``: of the whole conversation. ``encoding`` is what its last turn is stored with. Heads
        never grow from layer to layer: a token's hidden state in a layer needs the layer before it.

        With several ranks each asks once for every turn, also one that has no room for it, with the same
        kind of encoding, and gets the first rank's answer.
        """
        costs = self._costs.current()
        decode_costs = self._decode_costs.of(is_serial=DRAM_TIER in costs.serial_tiers)
        run = StoredRun(
            tier=DRAM_TIER,
            first_token=0,
            end_token=num_tokens,
            layer_token_bytes=encoding.layer_token_bytes,
            decode=encoding.stored_as.decode_costs(decode_costs),
            last_use=encoding.last_use,
            stored_from=(0,) * len(encoding.last_use),
        )
        heads = allocate(
            self._planner, run, costs, self._page_size, EXPECTED_NEW_TOKENS, self._max_head_tokens
        )
        mine = None if heads[-1] == num_tokens else heads
        decided = orjson.loads(self._agreement.broadcast(orjson.dumps(mine)))
        return None if decided is None else tuple(decided)


def trim_path(
    store: KVStore,
    model: ModelIdentity,
    codec: ModelCodecs,
    page_keys: Sequence[str],
    head_ends: Sequence[int],
) -> None:
    """Drop what is stored of a conversation before its heads' ends, from the segments that it alone uses.

    Not while a part of it has not been encoded: a fast copy does not tell the store that this conversation
    continues a segment of others, see ``KVStore.trim``.

    Raises:
        CodecError: a segment whose parameters ``codec`` cannot read, or heads of another number of layers.
    """
    if store.find_missing(model, page_keys):
        return
    for segment in store.path_segments(model, page_keys):
        header = segment.header
        if all(
            first_token >= min(head_end, header.end_token)
            for first_token, head_end in zip(header.layer_first_token, head_ends, strict=True)
        ):
            continue
        try:
            decoder = codec.open(
                header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
            )
        except AwaitedBasesError:
            continue
        # Heads may have become shorter since the last turn: what is gone stays gone.
        kept_from = tuple(map(max, decoder.kept_from(head_ends), header.layer_first_token))
        kept_num_bytes = decoder.kept_num_bytes(kept_from)
        # Blocks keep whole ranges: of short turns nothing can go, turn after turn.
        if any(
            tail_num_bytes(num_bytes, kept, header.range_bytes) < num_bytes
            for num_bytes, kept in zip(header.layer_num_bytes, kept_num_bytes, strict=True)
        ):
            store.trim(segment.segment_id, kept_from, kept_num_bytes)
