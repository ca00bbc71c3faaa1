"""Chooses the strategy that a finished turn is stored with, from the attention of its conversation."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from krul_backend.attention.statistics import AttentionStatistics, concatenate_heads
from krul_backend.codec.pairs.selectors import Evidence, StrategySelector
from krul_backend.codec.registry import ModelCodecs
from krul_backend.strategy import SUBSPACE, StoredAs
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import LayerEncoding, TurnEncoding

logger = logging.getLogger(__name__)

_MAX_STATISTICS_BYTES = 256 << 20


class ConversationStatistics:
    """Keeps attention statistics of conversations by the key of the last page that they cover.

    Over ``max_bytes``, the conversations that were extended longest ago are forgotten first; their statistics
    start again from nothing.
    """

    def __init__(self, max_bytes: int = _MAX_STATISTICS_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_last_page: OrderedDict[str, AttentionStatistics] = OrderedDict()

    def extend(self, page_keys: Sequence[str], turn: AttentionStatistics) -> AttentionStatistics:
        """Add a turn to the conversation whose pages are ``page_keys``; returns the sum of all its turns.

        Earlier turns are kept too: a conversation may branch at any of them.
        """
        earlier = next(
            (self._by_last_page[key] for key in reversed(page_keys) if key in self._by_last_page), None
        )
        total = turn if earlier is None else earlier + turn
        replaced = self._by_last_page.pop(page_keys[-1], None)
        self._by_last_page[page_keys[-1]] = total
        self._num_bytes += total.nbytes - (0 if replaced is None else replaced.nbytes)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._by_last_page.popitem(last=False)[1].nbytes
        return total


class Decision(ABC):
    """Chooses how a turn is stored: on every rank the same. Used by one thread."""

    @abstractmethod
    def decide(self, turn: Turn | None, missing: Sequence[range]) -> TurnEncoding:
        """Choose for the ``missing`` runs of a turn's pages, which will be stored.

        Called on every rank, with None where the turn is not stored.
        """

    @abstractmethod
    def forget_model(self) -> None:
        """Drop what was learned of the model: its weights have changed. No turn is being stored."""


class SelectorDecision(Decision):
    """Lets a selector choose from attention statistics of all heads and all turns of the conversation."""

    def __init__(
        self,
        selector: StrategySelector,
        codec: ModelCodecs,
        pool: DevicePool,
        agreement: RankAgreement,
        *,
        num_heads: int,
    ) -> None:
        self._selector = selector
        self._codec = codec
        self._pool = pool
        self._agreement = agreement
        self._num_heads = num_heads
        self._conversations = ConversationStatistics()

    def decide(self, turn: Turn | None, missing: Sequence[range]) -> TurnEncoding:
        statistics = self._agree(self._statistics(turn))
        if turn is not None and statistics is not None:
            statistics = self._conversations.extend(turn.page_keys, statistics)
        strategy = self._selector.select(Evidence(self._pool.num_layers, statistics))
        return LayerEncoding(self._codec, strategy, (None,) * len(missing))

    def forget_model(self) -> None:
        self._conversations = ConversationStatistics()

    def _statistics(self, turn: Turn | None) -> AttentionStatistics | None:
        """This rank's heads over the turn's rows; None if it was not recorded."""
        if turn is None or turn.attention is None:
            return None
        slots, num_tokens = turn.slots, len(turn.token_ids)
        try:
            return turn.attention.statistics(lambda layer: self._pool.gather_keys(layer, slots), num_tokens)
        except Exception:
            # The other ranks wait for this one: without its heads, all choose without statistics.
            logger.exception("krul: attention statistics of a turn failed")
            return None

    def _agree(self, mine: AttentionStatistics | None) -> AttentionStatistics | None:
        num_layers = self._pool.num_layers
        shape = (self._num_heads * num_layers**2 + num_layers + 1,)
        flat = None
        if mine is not None:
            flat = torch.cat(
                [mine.squared_distance.flatten(), mine.ir_mass, torch.tensor([float(mine.num_rows)])]
            )
        parts = self._agreement.gather(flat, shape)
        if parts is None:
            return None
        return concatenate_heads(
            [
                AttentionStatistics(
                    part[: -num_layers - 1].view(self._num_heads, num_layers, num_layers),
                    part[-num_layers - 1 : -1],
                    int(part[-1]),
                )
                for part in parts
            ]
        )


class ChoiceCounters:
    """Counts turns, those that were stored in shared subspaces, and pairs and precisions of the others."""

    def __init__(self) -> None:
        self.turns = 0
        self.subspace_turns = 0
        self.pairs: Counter[str] = Counter()
        self.precisions: Counter[str] = Counter()

    def add(self, stored_as: StoredAs) -> None:
        self.turns += 1
        # Groups have neither. They count when they are encoded: they may turn out to be native.
        self.pairs.update(f"{i}-{j}" for i, j in stored_as.pairs)
        self.precisions.update(precision.value for precision in stored_as.precisions)

    def note_encoded(self, codec: str) -> None:
        """The first segment of a turn was encoded with this codec."""
        self.subspace_turns += codec == SUBSPACE

    def as_dict(self) -> dict[str, Any]:
        return {
            "turns": self.turns,
            "subspace_turns": self.subspace_turns,
            "pairs": dict(self.pairs),
            "precisions": dict(self.precisions),
        }
