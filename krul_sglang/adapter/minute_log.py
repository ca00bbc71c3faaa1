"""Logs once a minute what was saved and restored in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from krul_backend.memory import format_bytes
from krul_sglang.engine.restore import LoadCounters
from krul_sglang.engine.save import OffloadCounters

logger = logging.getLogger(__name__)

MINUTE_S = 60.0


class MinuteLog:
    """Writes one line for each minute in which something was saved, dropped or restored. For one thread."""

    def __init__(
        self, saved: OffloadCounters, restored: LoadCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._saved = saved
        self._restored = restored
        self._clock = clock
        self._next_s = clock() + MINUTE_S
        self._before = self._counts()

    def tick(self) -> None:
        """Write the line if a minute is over. Called in each scheduling step."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + MINUTE_S
        before, self._before = self._before, self._counts()
        turns, dropped, copied, stored_tokens, stored, requests, tokens, loaded = (
            now - then for now, then in zip(self._before, before, strict=True)
        )
        if turns or stored or requests:
            logger.info(
                "krul: in the last minute %d turns ended, %d were not saved whole, %s were saved as is "
                "and %d tokens for good in %s; %d requests got %d tokens back, for which %s were loaded",
                turns,
                dropped,
                format_bytes(copied),
                stored_tokens,
                format_bytes(stored),
                requests,
                tokens,
                format_bytes(loaded),
            )

    def _counts(self) -> tuple[int, ...]:
        saved, restored = self._saved, self._restored
        return (
            saved.turns,
            sum(saved.dropped_turns.values()),
            saved.fast_copy_bytes,
            saved.tokens,
            saved.num_bytes,
            restored.requests,
            restored.tokens,
            restored.num_bytes,
        )
