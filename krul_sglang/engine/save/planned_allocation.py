"""Leaves out of stored turns the heads that a restore of the conversation would recompute."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import RestorePlanner
from krul_backend.planner.planners import allocate
from krul_backend.planner.problem import StoredRun
from krul_backend.strategy.strategy import Strategy
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.save.allocation import SpaceAllocation

EXPECTED_NEW_TOKENS = 128
"""Length of the turn that is expected to follow."""


class PlannedAllocation(SpaceAllocation):
    """Plans the return of the whole conversation, as if nothing of it were on the device.

    If the plan would load nothing at all, everything is stored: otherwise a device that is busy today would
    decide that the conversation can never be loaded.

    ``decode_token_s(strategy)`` are the seconds per token that decoding costs in each layer, ``[L]``.
    """

    def __init__(
        self,
        planner: RestorePlanner,
        costs: OnlineCosts,
        decode_token_s: Callable[[Strategy], tuple[float, ...]],
        agreement: RankAgreement,
        *,
        page_size: int,
        max_head_tokens: int,
    ) -> None:
        self._planner = planner
        self._costs = costs
        self._decode_token_s = decode_token_s
        self._agreement = agreement
        self._page_size = page_size
        self._max_head_tokens = max_head_tokens

    def head_ends(
        self,
        num_tokens: int,
        layer_token_bytes: tuple[float, ...],
        last_use: tuple[int, ...],
        strategy: Strategy,
    ) -> tuple[int, ...] | None:
        run = StoredRun(
            tier=DRAM_TIER,
            first_token=0,
            end_token=num_tokens,
            layer_token_bytes=layer_token_bytes,
            decode_token_s=self._decode_token_s(strategy),
            last_use=last_use,
            stored_from=(0,) * len(strategy.layers),
        )
        heads = allocate(
            self._planner,
            run,
            self._costs.current(),
            self._page_size,
            EXPECTED_NEW_TOKENS,
            self._max_head_tokens,
        )
        return self._agreed(None if heads[-1] == num_tokens else heads)

    def _agreed(self, heads: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """The first rank's ``heads``, on every rank."""
        decided = orjson.loads(self._agreement.broadcast(orjson.dumps(heads)))
        return None if decided is None else tuple(decided)
