"""Stores what belongs to a turn's KV beside it: a draft model's KV, or states of recurrent layers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from krul_backend.codec.interface import TokenRun
from krul_backend.errors import StoreClosedError
from krul_backend.planner import OnlineCosts
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.hint import NO_HINT
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.common.draft_kv import DraftKV
from krul_sglang.engine.save.segment_writer import OffloadCounters, Reading, SegmentWriter
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import LayerEncoding

logger = logging.getLogger(__name__)


class CompanionSaver(ABC):
    """Stores what the store does not hold yet of a turn's ``companion``, under an identity of its own. Used
    by the thread that stores turns, before the turn's own KV.

    ``what`` it is, for messages. ``of_end``: it belongs to a turn's last page, and not to each of its pages.
    ``num_layers``, ``costs``: of what a restore saves, see ``SegmentWriter``.
    """

    of_end = False

    def __init__(
        self,
        store: KVStore,
        companion: DraftKV | BoundaryStates,
        what: str,
        num_layers: int,
        costs: OnlineCosts | None,
    ) -> None:
        self.store = store
        self._companion = companion
        self._what = what
        # It changes no prediction: states are stored as they are, and drafts are verified.
        self._encoding = LayerEncoding(companion.codec, companion.strategy, (0.0,))
        self.written = OffloadCounters()
        self.writer = SegmentWriter(
            store, companion.pool.streams, num_layers, self.written, while_full=nullcontext, costs=costs
        )

    def save(
        self,
        turn: Turn,
        stream: Any,
        pause: Callable[[], None],
        is_wanted: Callable[[], bool],
        reading: Reading,
    ) -> None:
        """Store what is missing of a turn. An error does not fail the turn, which is counted.

        ``pause``: see ``TurnEncoding.encode``; ``is_wanted``, ``reading``: as for ``SegmentWriter.write``.
        """
        counters, identity = self._companion.counters, self._companion.identity_for(turn.model)
        write = partial(
            self.writer.write, stream=stream, is_wanted=is_wanted, reading=reading, model=identity
        )

        def write_run(turn: Turn, pages: range, run: TokenRun, **options: Any) -> bool:
            return write(turn, pages, self._encoding.encode(0, run, pause), **options)

        try:
            if not turn.hint.drop and not self._has_saved(turn, identity, write_run):
                counters.dropped_turns += 1
            if turn.hint != NO_HINT or turn.session is not None:
                page_keys = turn.page_keys[-1:] if self.of_end else turn.page_keys
                self.store.advise(turn.hint, model=identity, page_keys=page_keys, session=turn.session)
        except KeyError:
            logger.debug("krul: nothing is stored of a turn's %s", self._what)
        except StoreClosedError as error:
            counters.dropped_turns += 1
            logger.warning("krul: the %s of %d tokens: %s", self._what, len(turn.token_ids), error)
        except Exception:
            counters.dropped_turns += 1
            logger.exception("krul: the %s of %d tokens could not be stored", self._what, len(turn.token_ids))
        counters.num_bytes = self.written.num_bytes

    def release(self, turn: Turn) -> None:  # noqa: B027
        """Nothing more is wanted of a turn."""

    @abstractmethod
    def _has_saved(self, turn: Turn, identity: ModelIdentity, write: Callable[..., bool]) -> bool:
        """Store what is missing with ``write(turn, pages, run)``; False if something of it was not stored."""
