"""Watches how much the text that is stored differs from the text that the bases were learned from."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)

UNFAMILIAR_OFFSET = 2.0
"""Mean offsets above this are those of text unlike that which was learned from: see docs/compression.md."""

_MEAN_TOKENS = 16_384
"""The mean is over about so many tokens."""

_LEAST_TOKENS = 4096
"""Nothing is said of the mean of fewer tokens."""


class TextDrift:
    """Keeps the last and the mean offset of stored segments; see ``SubspaceParameters.mean_offset``.

    It warns once if the mean says that the text is unlike what was learned from. If the server has a metrics
    page (``--enable-metrics``), both numbers are there. Used by one thread.
    """

    def __init__(self, model_path: str, tp_rank: int) -> None:
        self.last: float | None = None
        self.mean: float | None = None
        self._model_path = model_path
        self._tp_rank = tp_rank
        self._num_tokens = 0
        self._has_warned = False

    def add(self, offset: float, num_tokens: int) -> None:
        """Count a segment of so many tokens."""
        self._num_tokens = min(self._num_tokens + num_tokens, _MEAN_TOKENS)
        before = offset if self.mean is None else self.mean
        self.last = offset
        self.mean = before + (offset - before) * min(1.0, num_tokens / self._num_tokens)
        _publish(self.last, self.mean, self._tp_rank)
        if self.mean > UNFAMILIAR_OFFSET and self._num_tokens >= _LEAST_TOKENS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "krul: text is unlike that which the bases were learned from (mean offset %.1f, familiar "
                "text has less than %g) and takes more memory than it has to; learn from text like it: "
                "`krul-sglang learn --model-path %s --text FILE`",
                self.mean,
                UNFAMILIAR_OFFSET,
                self._model_path,
            )

    def as_dict(self) -> dict[str, Any]:
        return {"last_offset": self.last, "mean_offset": self.mean}


def _publish(last: float, mean: float, tp_rank: int) -> None:
    # SGLang sets it before its processes start, if it has a metrics page.
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return
    for name, value in (("last", last), ("mean", mean)):
        _gauge(name).labels(tp_rank).set(value)


@cache
def _gauge(name: str) -> Any:
    from prometheus_client import Gauge

    return Gauge(
        f"krul_text_offset_{name}",
        "How much larger coefficients are than in the text learned from, in quarter octaves.",
        ["tp_rank"],
        multiprocess_mode="mostrecent",
    )
